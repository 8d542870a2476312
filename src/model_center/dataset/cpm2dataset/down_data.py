"""LCQMC for CPM-2, from `DATASET["LCQMC"](path, split, rank, world_size, tokenizer,
max_encoder_length, ...)`.

The encoder reads `“A”与“B”是否有关？` and sentinel 0, the decoder that sentinel, whose logits
choose the class. Items hold `enc_input`, int32 (max_encoder_length,), and `dec_input`, int32
(max_decoder_length,), padded with 0; `enc_length` and `dec_length`, int32 (), without the padding;
`index`, int32 (max_decoder_length,): 1 at the sentinel; and `targets`, int64 (), the class.
"""

from __future__ import annotations

import pathlib
from typing import ClassVar, Protocol

from model_center.dataset import lcqmc
from model_center.dataset.padding import Item, count, one_hot, padded
from model_center.dataset.protocols import Example
from model_center.dataset.task_dataset import TaskTable, Tokenizer, at_least


class SentinelTokenizer(Tokenizer, Protocol):
    """A tokenizer with numbered sentinels: `CPM2Tokenizer`."""

    def get_sentinel_id(self, idx: int) -> int:
        """The id of sentinel `idx`."""
        ...


class LCQMC_Dataset(lcqmc.PairTask):
    """Pairs of questions that ask different things (0) or the same (1)."""

    lengths: ClassVar = {
        "enc_input": "enc_length",
        "dec_input": "dec_length",
        "index": "dec_length",
    }
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
        """Pairs of at most `max_encoder_length` ids.

        Args:
            path: the folder that holds a folder for each task, or the task's own.
            split: "train", "dev" or "test".
            rank: accepted, and of no effect: DistributedDataLoader divides the rows.
            world_size: as `rank`.
            tokenizer: of the model.
            max_encoder_length: of the encoder's ids.
            max_decoder_length: of the decoder's ids.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the format.
        """
        super().__init__(lcqmc.examples(path, split), tokenizer)
        self.sentinel = tokenizer.get_sentinel_id(0)
        self.max_length, self.max_decoder_length = max_encoder_length, max_decoder_length
        at_least(max_encoder_length, len(self._prompt("", "")), "max_encoder_length")
        at_least(max_decoder_length, 1, "max_decoder_length")

    def encode(self, example: Example) -> Item:
        """The prompt of a pair, and the start of its answer."""
        ids = lcqmc.truncated(
            self._prompt, example.fields["a"], example.fields["b"], self.max_length
        )
        return {
            "enc_input": padded(ids, self.max_length),
            "enc_length": count(len(ids)),
            "dec_input": padded([self.sentinel], self.max_decoder_length),
            "dec_length": count(1),
            "index": one_hot(0, self.max_decoder_length),
        }

    def _prompt(self, a: str, b: str) -> list[int]:
        return [
            *self.tokenizer.encode(f"“{a}”与“{b}”是否有关？", add_special_tokens=False),
            self.sentinel,
        ]


DATASET = TaskTable(LCQMC=LCQMC_Dataset)
