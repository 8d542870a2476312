"""Rows on which CPM-1 is trained, from token data."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from model_center.dataset.pairs import PairRows, SequencePairs, TokenSequences, padded
from model_center.dataset.protocols import Epoch, shards_of
from model_center.dataset.sampler import draw

IGNORED = -100
END_OF_LINE = 4  # the id of </n> in CPM-1's vocabulary
MergedRow = tuple[npt.NDArray[Any], npt.NDArray[np.int64], int, npt.NDArray[np.bool_]]


class CPM1_Dataset(PairRows):
    """Inputs and targets from two files of token data, padded.

    A row is `ctx` int64 (max_length,), padded with 0; `tgt` the same, padded with -100; `len_ctx`,
    the ids in ctx. Where one of a pair is longer than `max_length`, all three are None.

    Args:
        ctx: sequences of ids, an MMapIndexedDataset for example.
        tgt: as many, the targets of each.
        max_length: of a row.

    Raises:
        DataError: when the files do not belong together.
    """

    LONG = {"ctx": None, "tgt": None, "len_ctx": None}  # noqa: RUF012

    def __init__(self, ctx: TokenSequences, tgt: TokenSequences, max_length: int = 1024) -> None:
        self._pairs, self._length = SequencePairs(ctx, tgt, max_length, max_length), max_length

    def row(self, ctx: npt.NDArray[Any], tgt: npt.NDArray[Any]) -> dict[str, Any]:
        """The ids, padded."""
        return {
            "ctx": padded(ctx, self._length, 0),
            "tgt": padded(tgt, self._length, IGNORED),
            "len_ctx": len(ctx),
        }


class CPM1_Dataset_Merge(Dataset[MergedRow]):
    """Sequences of which a random span is to be generated, the rest being context.

    Of n ids, the span [l, r) has l in [n/8, n/4] and r in [3n/4, n]; it goes to the end when the
    last id is that of a line break. Both are a function of (seed, epoch, row): equal in every
    process, other ones in every epoch, and the same after a resume. A row is a tuple of numpy
    arrays and a number:

        ids          (n,), of the file's dtype
        targets      int64 (n,): at l-1, ..., r-2 the id that follows, which is in the span; else
                     -100
        length       n
        is_context   bool (n,): False in the span

    So each id of the span is predicted from the context and the ids of the span before it.
    Sequences of fewer than two ids, which have nothing to predict, and of more than `max_length`
    are left out: `len` counts the others, `num_skipped` them, and `sizes` are the lengths of rows.

    Args:
        ctx: sequences of ids, an MMapIndexedDataset for example.
        max_length: of a row.
        seed: of the spans.
    """

    def __init__(self, ctx: TokenSequences, max_length: int = 1024, seed: int = 0) -> None:
        self._ctx, self._seed = ctx, seed
        self._rows = np.flatnonzero((ctx.sizes >= 2) & (ctx.sizes <= max_length))
        self.sizes = ctx.sizes[self._rows]
        self.num_skipped = len(ctx) - len(self._rows)
        self._epoch = Epoch()

    @property
    def num_shards(self) -> int:
        """Among how many ranks the file is divided already."""
        return shards_of(self._ctx)

    def set_epoch(self, epoch: int) -> None:
        """Spans are those of `epoch` from now on; DistributedDataLoader calls it."""
        self._epoch.number = epoch

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> MergedRow:
        row = int(self._rows[operator.index(index)])
        ids = self._ctx[row].copy()
        left, right = self._span(row, ids)
        targets = np.full(len(ids), IGNORED, np.int64)
        targets[left - 1 : right - 1] = ids[left:right]
        is_context = np.ones(len(ids), np.bool_)
        is_context[left:right] = False
        return ids, targets, len(ids), is_context

    def _span(self, row: int, ids: npt.NDArray[Any]) -> tuple[int, int]:
        """[l, r), with at least one id before it and in it."""
        count, key = len(ids), (self._seed, self._epoch.number, row)
        left = max(1, draw(count // 8, count // 4, *key, 0))
        right = draw(max(count * 3 // 4, left + 1), count, *key, 1)
        return left, count if ids[-1] == END_OF_LINE else right

    def collate(self, rows: Sequence[MergedRow]) -> dict[str, torch.Tensor]:
        """A batch as CPM1 takes it, of B `rows` padded to the longest, S.

        `input_tokens`, `input_span` (all 0: one sample a row) and `targets` are int64 (B, S),
        `input_length` is int64 (B,), `input_context` bool (B, S).
        """
        ids, targets, lengths, is_context = zip(*rows, strict=True)
        tokens = _stacked([row.astype(np.int64) for row in ids], 0)
        return {
            "input_tokens": tokens,
            "input_length": torch.tensor(lengths),
            "input_context": _stacked(is_context, True),
            "input_span": torch.zeros_like(tokens),
            "targets": _stacked(targets, IGNORED),
        }


def _stacked(rows: Sequence[npt.NDArray[Any]], fill: int) -> torch.Tensor:
    """(B, longest): the rows, and `fill` after them."""
    return pad_sequence(
        [torch.from_numpy(row) for row in rows], batch_first=True, padding_value=fill
    )
