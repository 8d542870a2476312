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
from typing import Any, ClassVar

import torch
from torch.utils.data import default_collate

from model_center.dataset.padding import Item, padded, shortened
from model_center.dataset.task_dataset import Tokenizer, at_least, token_id
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
        question, context = self.question.lstrip(), self.context.lstrip()
        return f"Question: {question} Answer: <extra_id_0> Context: {context}"


class SQuAD_Dataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Questions with one answer each to train on, or with all their answers to be scored by.

    Train items hold int64 tensors, `input_ids` and `attention_mask` (max_encoder_length,) and,
    (max_decoder_length,), `targets`, padded with -100; `decoder_input_ids`, which is `targets` one
    place later behind the pad id, padded with it; `decoder_attention_mask`. Of several answers one
    is chosen at random, the same in every epoch. Other items hold texts: `inputs`, the prompt, and
    `targets`, the set of answers; batches of `collate` hold a list of each, as generation takes it.
    """

    lengths: ClassVar = {
        "input_ids": "attention_mask",
        "attention_mask": "attention_mask",
        "targets": "decoder_attention_mask",
        "decoder_input_ids": "decoder_attention_mask",
        "decoder_attention_mask": "decoder_attention_mask",
    }

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        tokenizer: Tokenizer,
        max_encoder_length: int,
        max_decoder_length: int,
        seed: int = 0,
    ) -> None:
        """The questions of one split.

        Args:
            path: the folder of `train-v1.1.json` and `dev-v1.1.json`.
            split: "train", "dev" or "test".
            tokenizer: of the model.
            max_encoder_length: of a prompt's ids, at least 4.
            max_decoder_length: of an answer's ids, at least 4.
            seed: chooses among several answers.

        A test split, which is not published, is empty without its file, as in ModelCenter.

        Raises:
            DataError: for a file that is missing, not of SQuAD's format or empty.
        """
        at_least(max_encoder_length, 4, "max_encoder_length")
        at_least(max_decoder_length, 4, "max_decoder_length")
        file = pathlib.Path(path, f"{split}-v1.1.json")
        self.may_be_empty = split == "test" and not file.is_file() and file.parent.is_dir()
        if split not in {"train", "dev", "test"} or not (file.is_file() or self.may_be_empty):
            raise DataError(
                f"SQuAD, split {split!r}: there is no {file}. Splits are 'train' and 'dev'."
            )
        self.questions = [] if self.may_be_empty else read(file)
        self.for_training = split == "train"
        self.tokenizer = tokenizer
        self.max_encoder_length, self.max_decoder_length = max_encoder_length, max_decoder_length
        self.seed = seed

    def __len__(self) -> int:
        """The number of questions."""
        return len(self.questions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Question `index`, tokenised now if it is one to train on.

        Raises:
            DataError: then, if the tokenizer has no sentinels.
        """
        question = self.questions[index]
        if self.for_training:
            return self._train_item(question)
        return {"inputs": question.prompt, "targets": set(question.answers or [NO_ANSWER])}

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch: tensors (B, longest row), or lists of texts."""
        if not self.for_training:
            return {key: [item[key] for item in items] for key in items[0]}
        return dict(shortened(default_collate(list(items)), self.lengths))

    def _train_item(self, question: Question) -> Item:
        answer = random.Random(f"{self.seed} {question.id}").choice(
            question.answers or (NO_ANSWER,)
        )
        for sentinel in ("<extra_id_0>", "<extra_id_1>"):
            token_id(self.tokenizer, sentinel)
        longest, pad = self.max_decoder_length, self.tokenizer.pad_token_id or 0
        ids = self._cut(question.prompt, self.max_encoder_length)
        target = self._cut(f"<extra_id_0> {answer} <extra_id_1>", longest)
        item = {
            "input_ids": padded(ids, self.max_encoder_length, pad),
            "attention_mask": padded([1] * len(ids), self.max_encoder_length),
            "decoder_input_ids": padded([pad, *target][:longest], longest, pad),
            "targets": padded(target, longest, -100),
            "decoder_attention_mask": padded([1] * len(target), longest),
        }
        return {key: value.long() for key, value in item.items()}

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
