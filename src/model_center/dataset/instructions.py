"""Instruction tuning: conversations in JSON lines, of which a model learns the answers.

A line is one of
    {"messages": [{"role": "system" | "user" | "assistant", "content": text}, ...]}
    {"conversations": [{"from": "system" | "human" | "gpt", "value": text}, ...]}    (ShareGPT)
    {"instruction": text, "input": text, "output": text}                             (Alpaca;
    `input` may be missing)
"""

from __future__ import annotations

import json
import pathlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from model_center.dataset import padding
from model_center.dataset.example import Example
from model_center.dataset.line_file import LineFile
from model_center.dataset.padding import Item
from model_center.dataset.task_dataset import Tokenizer, at_least
from model_center.errors import DataError

Message = dict[str, str]
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows where in the text its tokens are, as transformers' fast ones."""

    is_fast: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | Mapping[str, str] | None

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> str:
        """A conversation as one text."""
        ...


class InstructionDataset(torch.utils.data.Dataset[Item]):
    """Conversations, written by the tokenizer's chat template or, if it has none, by `plain_text`.

    Items hold `input_ids`, int64 (length,), at most `max_length`, the end is cut; `targets`, int64
    (length,): the next id where that is part of an answer of the assistant or ends it, -100
    elsewhere; and `input_length`. Tokenised in `__getitem__`; to waste no padding, see
    `packing.PackedSamples`.
    """

    def __init__(self, path: str | pathlib.Path, tokenizer: ChatTokenizer, max_length: int) -> None:
        """The conversations of a file.

        Raises:
            DataError: for a file that is missing or empty, naming file and line for one that is not
                of a known format, and for a tokenizer without offsets.
        """
        at_least(max_length, 2, "max_length")
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} does not tell where tokens come from: "
                "expected a fast tokenizer."
            )
        if not pathlib.Path(path).is_file():
            raise DataError(f"there is no file {path}: expected conversations in JSON lines.")
        self.examples = LineFile(pathlib.Path(path), read, labelled=False)
        self.tokenizer = tokenizer
        self.max_length = max_length

    @property
    def fill(self) -> dict[str, int]:
        """What rows are padded with, by key; 0 for keys that are not named."""
        return {"input_ids": self.tokenizer.pad_token_id or 0, "targets": -100}

    def __len__(self) -> int:
        """The number of conversations."""
        return len(self.examples)

    def __getitem__(self, index: int) -> Item:
        """Conversation `index`.

        Raises:
            DataError: if the chat template refuses it, or writes the start of a conversation
                differently when it goes on.
        """
        text, answers = self._written(self.examples[index].fields["messages"])
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = torch.tensor(encoded["input_ids"][: self.max_length])
        learnt = [
            any(begin < stop and start < end for start, stop in answers)
            for begin, end in encoded["offset_mapping"]
        ]
        targets = torch.full_like(ids, -100)
        targets[:-1] = ids[1:].where(torch.tensor(learnt[1 : len(ids)], dtype=torch.bool), -100)
        return {"input_ids": ids, "targets": targets, "input_length": torch.tensor(len(ids))}

    def collate(self, items: Sequence[Item]) -> Item:
        """A batch: (B, longest) tensors, padded on the right, and (B,) lengths."""
        return padding.collate(items, self.fill)

    def _written(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the (start, stop) of its answers with what ends them."""
        text = self._write(messages)
        answers = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before, through = (
                    self._write(messages[:place], answer=True),
                    self._write(messages[: place + 1]),
                )
                if not (text.startswith(before) and text.startswith(through)):
                    raise DataError(
                        f"the chat template of {type(self.tokenizer).__name__} rewrites "
                        f"earlier messages: {text!r}."
                    )
                answers.append((len(before), len(through.rstrip())))
        return text, answers

    def _write(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        if not self.tokenizer.chat_template:
            return plain_text(
                messages,
                self.tokenizer.bos_token or "",
                self.tokenizer.eos_token or "",
                answer=answer,
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer
            )
        # a template raises what its author likes: that roles must alternate, for example
        except Exception as error:
            raise DataError(
                f"{self.examples.path}: the chat template of {type(self.tokenizer).__name__} "
                f"refuses a conversation: {error} (it is {reprlib.repr(messages)})."
            ) from error


def plain_text(messages: Sequence[Message], bos: str, eos: str, *, answer: bool) -> str:
    """The text with headings, each answer ended by `eos`; with `answer`, up to the next one."""
    ends = {"assistant": eos}
    parts = [
        "### "
        f"{message['role'].capitalize()}:\n{message['content']}{ends.get(message['role'], '')}\n\n"
        for message in messages
    ]
    return bos + "".join(parts) + ("### Assistant:\n" if answer else "")


def read(line: str) -> list[Example]:
    """The conversation of a line."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"got {type(row).__name__}: expected a JSON object.")
    messages = [_message(message) for message in _messages(row)]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("there is no answer of the assistant.")
    # templates cannot say where it begins when nothing is before it
    if messages[0]["role"] == "assistant":
        raise ValueError(
            "it begins with an answer of the assistant: expected a message of the user or "
            "system before it."
        )
    return [Example(fields={"messages": messages}, label=None)]


def _messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "messages" in row:
        return list(row["messages"])
    if "conversations" in row:
        return [{"role": turn["from"], "content": turn["value"]} for turn in row["conversations"]]
    if "instruction" not in row:
        raise ValueError(
            f"got the fields {', '.join(row)}: expected messages, conversations, or "
            "instruction and output."
        )
    asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


def _message(message: Mapping[str, Any]) -> Message:
    role, content = message["role"], message["content"]
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(
            f"got the message {message!r}: expected a role of {', '.join(ROLES)} and a text."
        )
    return {"role": ROLES[role], "content": content}
