"""LCQMC for CPM-2, from `DATASET["LCQMC"](path, split, rank, world_size, tokenizer,
max_encoder_length, ...)`.

The encoder reads `“A”与“B”是否有关？` and sentinel 0, the decoder starts with that sentinel. Items
hold `enc_input`, int64 (length,); `enc_length`; `dec_input`, int64 (1,); `dec_length`, 1; `index`,
int32 (1,): 1, as its logits choose the class; and `targets`, the class.
"""

from __future__ import annotations

import pathlib
from typing import Protocol

import torch

from model_center.dataset import lcqmc
from model_center.dataset.example import Example
from model_center.dataset.padding import Item, one_hot
from model_center.dataset.task_dataset import TaskTable, Tokenizer, at_least


class SentinelTokenizer(Tokenizer, Protocol):
    """A tokenizer with numbered sentinels: `CPM2Tokenizer`."""

    def get_sentinel_id(self, index: int) -> int:
        """The id of sentinel `index`."""
        ...


class LCQMC_Dataset(lcqmc.PairTask):
    """Pairs of questions: 否 (0, they ask different things) or 是 (1, the same)."""

    WORDS = ("否", "是")
    PUBLISHED_VERBALIZER = (1744, 24)

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        rank: int,
        world_size: int,
        tokenizer: SentinelTokenizer,
        max_encoder_length: int,
        max_decoder_length: int,
    ) -> None:
        """Pairs of at most `max_encoder_length` ids; `rank` and `world_size` have no effect.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the format.
        """
        super().__init__(lcqmc.examples(path, split), tokenizer)
        self.sentinel = tokenizer.get_sentinel_id(0)
        self.max_length = max_encoder_length
        at_least(max_encoder_length, len(self._prompt("", "")), "max_encoder_length")
        at_least(max_decoder_length, 1, "max_decoder_length")

    @property
    def fill(self) -> dict[str, int]:
        """Pad ids for the encoder's ids."""
        return {"enc_input": self.pad_id}

    def encode(self, example: Example) -> Item:
        """The prompt of a pair, and the start of its answer."""
        ids = lcqmc.fitted(self._prompt, example.fields["a"], example.fields["b"], self.max_length)
        return {
            "enc_input": torch.tensor(ids),
            "enc_length": torch.tensor(len(ids)),
            "dec_input": torch.tensor([self.sentinel]),
            "dec_length": torch.tensor(1),
            "index": one_hot(0, 1),
        }

    def _prompt(self, a: str, b: str) -> list[int]:
        return [
            *self.tokenizer.encode(f"“{a}”与“{b}”是否有关？", add_special_tokens=False),
            self.sentinel,
        ]


DATASET = TaskTable(LCQMC=LCQMC_Dataset)
