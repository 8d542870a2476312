"""Instruction tuning: rows of JSON lines, of which a model learns the answers.

`conversations` says what a row may be, `chat` where its answers are.
"""

from __future__ import annotations

import pathlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from model_center.dataset import padding
from model_center.dataset.chat import ChatTokenizer, Span, Writer
from model_center.dataset.conversations import read
from model_center.dataset.line_file import LineFile
from model_center.dataset.padding import Item
from model_center.dataset.task_dataset import at_least
from model_center.errors import DataError


class InstructionDataset(torch.utils.data.Dataset[Item]):
    """Conversations as `chat.Writer` writes them; texts between the tokenizer's bos and eos.

    Items hold `input_ids`, int64 (length,), at most `max_length`, the end is cut; `targets`, int64
    (length,): the next id where that is part of an answer of the assistant or ends it, or of a
    text, -100 elsewhere; and `input_length`. Tokenised in `__getitem__`; to waste no padding, see
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
            DataError: if the chat template refuses it.
        """
        text, answers = self._written(self.examples[index].fields)
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

    def _written(self, fields: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """The text of a row, and the (start, stop) of what is learnt of it."""
        if "text" in fields:
            bos, eos = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            text = bos + fields["text"] + eos
            return text, [(len(bos), len(text))]
        try:
            return Writer(self.tokenizer, fields["tools"]).text_and_answers(fields["messages"])
        # a template raises what its author likes: that roles must alternate, for example
        except Exception as error:
            raise DataError(
                f"{self.examples.path}: the chat template of {type(self.tokenizer).__name__} "
                f"refuses a conversation: {error} (it is {reprlib.repr(fields['messages'])})."
            ) from error
