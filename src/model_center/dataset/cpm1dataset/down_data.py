"""LCQMC for CPM-1, from `DATASET["LCQMC"](path, split, rank, world_size, tokenizer, max_length)`.

The prompt is `"A"与"B"的关系是:`, a blank, and `。`; the model sees both sides of the blank. Items
hold, (max_length,): `input_tokens`, int32, which begin with id 1 and are padded with 0;
`input_context`, bool, False at the blank only; `input_span`, int32 zeros; and `index`, int32: 1 at
the last token before the blank, whose logits choose the class. `input_length`, int32 (), is the
length without padding, `targets`, int64 (), the class.
"""

from __future__ import annotations

import pathlib

import torch

from model_center.dataset import lcqmc
from model_center.dataset.padding import Item, count, one_hot, padded
from model_center.dataset.protocols import Example
from model_center.dataset.task_dataset import TaskTable, Tokenizer, at_least

START = 1  # what texts begin with in CPM's vocabularies
BLANK = 0


class LCQMC_Dataset(lcqmc.PairTask):
    """Pairs of questions that ask different things (0) or the same (1)."""

    lengths = dict.fromkeys(
        ("input_tokens", "input_context", "input_span", "index"), "input_length"
    )
    PUBLISHED_VERBALIZER = (15682, 16357)

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        rank: int,
        world_size: int,
        tokenizer: Tokenizer,
        max_length: int,
    ) -> None:
        """Pairs of at most `max_length` ids.

        Args:
            path: the folder that holds a folder for each task, or the task's own.
            split: "train", "dev" or "test".
            rank: accepted, and of no effect: DistributedDataLoader divides the rows.
            world_size: as `rank`.
            tokenizer: of the model.
            max_length: of a row.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the format.
        """
        super().__init__(lcqmc.examples(path, split), tokenizer)
        self.right = tokenizer.encode("。", add_special_tokens=False)
        self.max_length = max_length
        at_least(max_length, len(self._prompt("", "")) + 1 + len(self.right), "max_length")

    def encode(self, example: Example) -> Item:
        """The prompt of a pair, with its blank."""
        room = self.max_length - 1 - len(self.right)
        left = lcqmc.truncated(self._prompt, example.fields["a"], example.fields["b"], room)
        ids = [*left, BLANK, *self.right]
        return {
            "input_tokens": padded(ids, self.max_length),
            "input_length": count(len(ids)),
            "input_context": torch.arange(self.max_length) != len(left),
            "input_span": padded([], self.max_length),
            "index": one_hot(len(left) - 1, self.max_length),
        }

    def _prompt(self, a: str, b: str) -> list[int]:
        return [START, *self.tokenizer.encode(f'"{a}"与"{b}"的关系是:', add_special_tokens=False)]


DATASET = TaskTable(LCQMC=LCQMC_Dataset)
