"""SuperGLUE for BERT: texts with their class, from `DATASET[task](path, split, rank, world_size,
tokenizer, max_encoder_length)`.

Items hold `input_ids`, `attention_mask` and `token_type_ids`, int64 (max_encoder_length,), and
`labels`, int64 (). COPA's hold the three twice, for the first choice with suffix 0 and for the
second with 1. In a test split without labels, items hold `idx`, the number of the example, instead.
"""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Sequence
from typing import ClassVar

import torch

from model_center.dataset import prompts, superglue
from model_center.dataset.padding import Item
from model_center.dataset.protocols import Example
from model_center.dataset.task_dataset import TaskDataset, TaskTable, Tokenizer, at_least, word_ids

KEYS = ("input_ids", "attention_mask", "token_type_ids")


class SuperGLUE(TaskDataset):
    """A SuperGLUE task for BERT; a subclass says how an example is written."""

    task = ""
    lengths = dict.fromkeys(KEYS, "attention_mask")

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        rank: int,
        world_size: int,
        tokenizer: Tokenizer,
        max_encoder_length: int,
    ) -> None:
        """Rows of `max_encoder_length` ids, padded.

        Args:
            path: the folder that holds a folder for each task, or the task's own.
            split: "train", "dev" or "test".
            rank: accepted, and of no effect: DistributedDataLoader divides the rows.
            world_size: as `rank`.
            tokenizer: of the model.
            max_encoder_length: of a row, at least 8.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the task's format.
        """
        at_least(max_encoder_length, 8, "max_encoder_length")
        super().__init__(superglue.examples(path, self.task, split), tokenizer)
        self.split, self.max_length = split, max_encoder_length

    @classmethod
    def get_verbalizer(cls, tokenizer: Tokenizer) -> list[int]:
        """The ids in `tokenizer` of the words for the classes, in the order of the labels."""
        return word_ids(tokenizer, prompts.WORDS[cls.task])

    def written(self, *texts: str) -> Item:
        """Inputs of a text, of which the end is cut, or of a pair, of which the longer is cut."""
        encoded = self.tokenizer(
            *texts,
            max_length=self.max_length,
            padding="max_length",
            truncation=True,
            return_token_type_ids=True,
        )
        return {key: torch.tensor(encoded[key]) for key in KEYS}


class BoolQ_Dataset(SuperGLUE):
    """One text: the passage, then the question."""

    task = "BoolQ"

    def encode(self, example: Example) -> Item:
        """`passage. question`."""
        return self.written(f"{example.fields['passage']}. {example.fields['question']}")


class RTE_Dataset(SuperGLUE):
    """Premise and hypothesis."""

    task = "RTE"

    def encode(self, example: Example) -> Item:
        """(premise, hypothesis)."""
        return self.written(example.fields["premise"], example.fields["hypothesis"])


class CB_Dataset(RTE_Dataset):
    """Premise and hypothesis, three classes; rows of rare classes repeat in the train split."""

    task = "CB"

    @functools.cached_property
    def order(self) -> list[int]:
        """Numbers of rows; in train, a class k times rarer than another comes floor(k) times."""
        labels = self.examples.labels
        return oversampled(labels) if self.split == "train" else list(range(len(labels)))

    def __len__(self) -> int:
        """The number of items, repeated ones counted as often as they come."""
        return len(self.order)

    def __getitem__(self, index: int) -> Item:
        """Item `index` of the order with repetitions."""
        return super().__getitem__(self.order[index])


class COPA_Dataset(SuperGLUE):
    """Two pairs, one for each choice."""

    task = "COPA"
    lengths: ClassVar = {key + choice: f"attention_mask{choice}" for key in KEYS for choice in "01"}

    def encode(self, example: Example) -> Item:
        """(choice, `The cause of "premise"`), twice."""
        asked = prompts.copa_question(example.fields)
        return {
            f"{key}{choice}": value
            for choice, field in enumerate(("choice1", "choice2"))
            for key, value in self.written(example.fields[field], asked).items()
        }


class WiC_Dataset(SuperGLUE):
    """The two sentences, without the word."""

    task = "WiC"

    def encode(self, example: Example) -> Item:
        """(sentence 1, sentence 2)."""
        return self.written(example.fields["sentence1"], example.fields["sentence2"])


class WSC_Dataset(SuperGLUE):
    """One text that ends with the question."""

    task = "WSC"

    def encode(self, example: Example) -> Item:
        """The prompt of the other models."""
        return self.written(prompts.wsc(example.fields))


def oversampled(labels: Sequence[int]) -> list[int]:
    """Indices of all rows, each floor(rows of the largest class / rows of its class) times."""
    counts = collections.Counter(labels)
    largest = max(counts.values())
    return [index for index, label in enumerate(labels) for _ in range(largest // counts[label])]


DATASET = TaskTable(
    BoolQ=BoolQ_Dataset,
    CB=CB_Dataset,
    COPA=COPA_Dataset,
    RTE=RTE_Dataset,
    WiC=WiC_Dataset,
    WSC=WSC_Dataset,
)
