"""Rows of equal length out of documents of any length, for training from scratch."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.order import permutation
from model_center.dataset.protocols import Epoch
from model_center.errors import DataError

IGNORED = -100


class Concatenation(Dataset[dict[str, torch.Tensor]]):
    """Documents one after the other, cut into rows of `length` tokens.

    The documents' order is shuffled anew in every epoch (`set_epoch`, which DistributedDataLoader
    calls), so rows join other documents each time. Nothing is copied: a row is found by bisection.

    Args:
        what: the documents, for messages.
        length: tokens of a row.
        seed: of the orders.
        shuffle: False leaves the documents in their order.

    Attributes:
        num_tokens: of all documents.

    Raises:
        DataError: when there are fewer than two tokens, or the length is no length.
    """

    def __init__(self, what: object, length: int, seed: int, *, shuffle: bool) -> None:
        if length < 1:
            raise DataError(f"length is {length}: expected at least 1, the tokens of a row.")
        self._length, self._seed, self._shuffle = length, seed, shuffle
        self.num_tokens = int(self._sizes().sum())
        if self.num_tokens < 2:
            raise DataError(
                f"{what} has {self.num_tokens} tokens: expected at least two, one of which is "
                "predicted."
            )
        self._epoch = Epoch()
        self._laid_out: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    def _sizes(self) -> npt.NDArray[np.int64]:
        """(documents,): tokens of each, what separates them included."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Rows of an epoch, the last one included that may not be full."""
        return (self.num_tokens - 2) // self._length + 1

    def row_lengths(self) -> npt.NDArray[np.int64]:
        """What lengths rows have, padding left out: one or two."""
        full, last = divmod(self.num_tokens - 1, self._length)
        return np.array([self._length, last])[[full > 0, last > 0]]

    def set_epoch(self, epoch: int) -> None:
        """The documents are in the order of `epoch` from now on."""
        self._epoch.number = epoch

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where the tokens [start, stop) of the epoch are: of each document its number, the first
        token, and how many.
        """
        order, ends = self._layout()
        place = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            done = start - (int(ends[place - 1]) if place else 0)
            end = min(int(ends[place]), stop)
            yield int(order[place]), done, end - start
            start, place = end, place + 1

    def _layout(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The documents in the epoch's order, and the tokens up to the end of each; made once."""
        epoch = self._epoch.number
        if self._laid_out is None or self._laid_out[0] != epoch:
            sizes = self._sizes()
            count = len(sizes)
            order = permutation(count, self._seed, epoch) if self._shuffle else np.arange(count)
            self._laid_out = epoch, order, np.cumsum(sizes[order])
        return self._laid_out[1:]

    def __getstate__(self) -> dict[str, Any]:
        """Without the layout, which worker processes make themselves."""
        return {**self.__dict__, "_laid_out": None}


class PackedDataset(Concatenation):
    """All documents of token data one after the other, cut into rows.

    The documents' order is shuffled anew in every epoch (`set_epoch`, which DistributedDataLoader
    calls), so rows join other documents each time. Nothing is copied: memory is 16 bytes a document
    and process, 24 more while an order is made, and a row is found by bisection. A row, in which
    targets are the ids one place later:

        input_ids   int64 (length,)
        targets     int64 (length,)

    Over the rows of an epoch every token is a target once, except the very first. The last row is
    filled up with the separator (or 0), and targets -100.

    Args:
        indexed: token data. Its documents are those that it marks; sequences are, where it marks
            none.
        length: ids of a row.
        seed: of the orders.
        separator: an id that follows every document; None when they end with their own (`preprocess
            --append-eod`).
        shuffle: False leaves the documents in their order.

    Raises:
        DataError: when there are fewer than two tokens, or the length is no length.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        length: int,
        seed: int = 0,
        separator: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self._indexed, self._separator = indexed, separator
        self._starts = document_starts(indexed)
        super().__init__(indexed, length, seed, shuffle=shuffle)

    def _sizes(self) -> npt.NDArray[np.int64]:
        return np.diff(self._starts) + (self._separator is not None)

    def __getitem__(self, index: SupportsIndex) -> dict[str, torch.Tensor]:
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}.")
        start = row % len(self) * self._length
        tokens = self._read(start, min(start + self._length + 1, self.num_tokens))
        missing = self._length + 1 - len(tokens)
        ids = torch.from_numpy(np.pad(tokens, (0, missing), constant_values=self._separator or 0))
        targets = ids[1:].clone()
        targets[self._length - missing :] = IGNORED
        return {"input_ids": ids[:-1].clone(), "targets": targets}

    def _read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens [start, stop) of the epoch."""
        parts = []
        for number, done, count in self._spans(start, stop):
            first, last = self._starts[number], self._starts[number + 1]
            tokens = self._indexed.tokens[first + done : min(last, first + done + count)]
            parts.append(tokens.astype(np.int64))
            if len(tokens) < count:
                parts.append(np.array([self._separator]))
        return np.concatenate(parts)


def document_starts(indexed: MMapIndexedDataset) -> npt.NDArray[np.int64]:
    """(documents + 1,): tokens before each document, and in all.

    Sequences after the last mark are documents of their own.
    """
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(indexed.sizes, dtype=np.int64)])
    marked = indexed.doc_idx[-1] if len(indexed.doc_idx) else 0
    marks = np.concatenate([[0], indexed.doc_idx, np.arange(marked, len(before))])
    return np.unique(before[marks])
