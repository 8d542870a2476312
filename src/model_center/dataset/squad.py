"""SQuAD (Rajpurkar et al. 2016) as text to text: `<path>/train-v1.1.json`, `dev-v1.1.json`.

The input is `Question: ... Answer: <extra_id_0> Context: ...`, of which the end is cut, the target
`<extra_id_0> answer <extra_id_1>`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from model_center.dataset import padding, verbalizer
from model_center.dataset.padding import Item
from model_center.dataset.task_dataset import Tokenizer, at_least
from model_center.errors import DataError

NO_ANSWER = "no answer"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a paragraph, and the answers given to it (train: one, dev: several)."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """What the model reads."""
        return f"Question: {self.question} Answer: <extra_id_0> Context: {self.context}"


class SQuAD_Dataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Questions with one answer each to train on, or with all their answers to be scored by.

    Train items hold int64 tensors (length,): `input_ids` and `attention_mask`; `targets`, and
    `decoder_input_ids`, which is `targets` one place later behind the pad id;
    `decoder_attention_mask`. Of several answers one is chosen at random, the same in every epoch.
    In batches, `targets` is padded by -100. Dev items hold texts: `inputs`, the prompt, and
    `targets`, the set of answers; their batches hold a list of each, as generation takes it.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        tokenizer: Tokenizer,
        max_encoder_length: int,
        max_decoder_length: int,
        seed: int = 0,
    ) -> None:
        """The questions of "train" or "dev"; `seed` chooses among several answers.

        Raises:
            DataError: for a file that is missing, not of SQuAD's format or empty.
        """
        at_least(max_encoder_length, 4, "max_encoder_length")
        at_least(max_decoder_length, 4, "max_decoder_length")
        file = pathlib.Path(path, f"{split}-v1.1.json")
        if split not in {"train", "dev"} or not file.is_file():
            raise DataError(
                f"SQuAD, split {split!r}: there is no {file}. Splits are 'train' and 'dev'."
            )
        self.questions = read(file)
        self.for_training = split == "train"
        self.tokenizer = tokenizer
        self.max_encoder_length, self.max_decoder_length = max_encoder_length, max_decoder_length
        self.seed = seed
        verbalizer.token_id(tokenizer, "<extra_id_0>")

    def __len__(self) -> int:
        """The number of questions."""
        return len(self.questions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Question `index`, tokenised now if it is one to train on."""
        question = self.questions[index]
        if self.for_training:
            return self._train_item(question)
        return {"inputs": question.prompt, "targets": set(question.answers or [NO_ANSWER])}

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch: (B, longest) tensors, padded on the right, or lists of texts."""
        if not self.for_training:
            return {key: [item[key] for item in items] for key in items[0]}
        pad = self.tokenizer.pad_token_id or 0
        return dict(
            padding.collate(items, {"input_ids": pad, "decoder_input_ids": pad, "targets": -100})
        )

    def _train_item(self, question: Question) -> Item:
        answer = random.Random(f"{self.seed} {question.id}").choice(
            question.answers or (NO_ANSWER,)
        )
        ids = self._cut(question.prompt, self.max_encoder_length)
        target = self._cut(f"<extra_id_0> {answer} <extra_id_1>", self.max_decoder_length)
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.ones(len(ids), dtype=torch.int64),
            "decoder_input_ids": torch.tensor([self.tokenizer.pad_token_id or 0, *target[:-1]]),
            "targets": torch.tensor(target),
            "decoder_attention_mask": torch.ones(len(target), dtype=torch.int64),
        }

    def _cut(self, text: str, max_length: int) -> list[int]:
        return self.tokenizer.encode(text, truncation=True, max_length=max_length)


def read(file: pathlib.Path) -> list[Question]:
    """The questions of a file in SQuAD's format.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    try:
        questions = list(_questions(json.loads(file.read_text(encoding="utf-8"))))
    except KeyError as error:
        raise DataError(
            f"{file}: there is no field {error}. Expected SQuAD's format, version 1.1."
        ) from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} is not of SQuAD's format, version 1.1: {error}") from error
    if not questions:
        raise DataError(f"{file} holds no questions.")
    return questions


def _questions(content: Any) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = tuple(answer["text"] for answer in asked["answers"])
                yield Question(str(asked["id"]), paragraph["context"], asked["question"], answers)
