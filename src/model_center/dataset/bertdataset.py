"""SuperGLUE for BERT: pairs of texts with their class, from `DATASET[task](path, split, rank,
world_size, tokenizer, ...)`.

Items hold `input_ids`, `attention_mask` and `token_type_ids`, int64 (length,), and `labels`, int64
(). COPA's hold the three twice, for the first choice with suffix 0 and for the second with 1. In a
test split without labels, items hold `idx`, the number of the example, instead.
"""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Sequence

import torch

from model_center.dataset import prompts, superglue, truncation
from model_center.dataset.example import Example
from model_center.dataset.padding import Item
from model_center.dataset.task_dataset import TaskDataset, TaskTable, Tokenizer, at_least


class BertTask(TaskDataset):
    """A SuperGLUE task for BERT; a subclass says how an example is written as a pair."""

    task = ""

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        rank: int,
        world_size: int,
        tokenizer: Tokenizer,
        max_encoder_length: int,
    ) -> None:
        """Rows of at most `max_encoder_length` ids; `rank` and `world_size` have no effect.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the task's format.
        """
        at_least(max_encoder_length, 8, "max_encoder_length")
        super().__init__(superglue.examples(path, self.task, split), tokenizer)
        self.split, self.max_length = split, max_encoder_length

    def pair(self, first: str, second: str) -> Item:
        """Inputs of a pair, of which the longer text is cut first."""
        return tensors(truncation.cut_longest(self.tokenizer, first, second, self.max_length))

    @property
    def fill(self) -> dict[str, int]:
        """Pad ids for ids, 0 for masks and types; also with COPA's suffixes."""
        return {f"input_ids{suffix}": self.pad_id for suffix in ("", "0", "1")}


class BoolQ_Dataset(BertTask):
    """The question, then the passage, of which alone something is cut."""

    task = "BoolQ"

    def encode(self, example: Example) -> Item:
        """(question, passage)."""
        fields = example.fields
        return tensors(
            truncation.keep_first(
                self.tokenizer, fields["question"], fields["passage"], self.max_length
            )
        )


class RTE_Dataset(BertTask):
    """Premise and hypothesis."""

    task = "RTE"

    def encode(self, example: Example) -> Item:
        """(premise, hypothesis)."""
        return self.pair(example.fields["premise"], example.fields["hypothesis"])


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


class COPA_Dataset(BertTask):
    """Two pairs, one for each choice."""

    task = "COPA"

    def encode(self, example: Example) -> Item:
        """(choice, `The cause of "premise"`), twice."""
        fields = example.fields
        asked = prompts.copa_question(fields)
        pairs = [self.pair(fields["choice1"], asked), self.pair(fields["choice2"], asked)]
        return {
            f"{key}{choice}": value
            for choice, pair in enumerate(pairs)
            for key, value in pair.items()
        }


class WiC_Dataset(BertTask):
    """The word with the first sentence, and the second."""

    task = "WiC"

    def encode(self, example: Example) -> Item:
        """(`word: sentence 1`, sentence 2)."""
        fields = example.fields
        return self.pair(f"{fields['word']}: {fields['sentence1']}", fields["sentence2"])


class WSC_Dataset(BertTask):
    """One text that ends with the question."""

    task = "WSC"

    def encode(self, example: Example) -> Item:
        """The prompt of the other models, cut at its beginning."""
        ids = truncation.keep_end(self.tokenizer, prompts.wsc(example.fields), self.max_length)
        return tensors(
            {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        )


def tensors(encoded: dict[str, list[int]]) -> Item:
    """The lists of a tokenizer as int64 tensors, in the order of an item's keys."""
    return {
        key: torch.tensor(encoded[key]) for key in ("input_ids", "attention_mask", "token_type_ids")
    }


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
