"""Token data on disk: sequences by number, from a memory map; a file may exceed memory."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from model_center.dataset import indexed_format as format
from model_center.dataset.indexed_format import CODES as dtypes
from model_center.dataset.indexed_format import bin_path as data_file_path
from model_center.dataset.indexed_format import code_of as code
from model_center.dataset.indexed_format import idx_path as index_file_path
from model_center.errors import DataError

__all__ = [
    "IndexedCachedDataset",
    "Joined",
    "MMapIndexedDataset",
    "code",
    "data_file_path",
    "dtypes",
    "index_file_path",
    "make_dataset",
]

Array = npt.NDArray[Any]


class MMapIndexedDataset(Dataset[Array]):
    """The sequences of `PREFIX.bin` that `PREFIX.idx` describes, read when asked for.

    `dataset[i]` is a read-only 1-D array that lies on the file itself; i may be negative and of any
    integer type. `dataset[a:b:c]` is a list of them. It pickles as its path, so worker processes
    map the file themselves.

    Args:
        path: PREFIX. Indexes of the older "cached" kind are understood too.
        skip_warmup: accepted for old programs; pages are read when they are needed, never all
            beforehand.

    Raises:
        DataError: when a file is missing, truncated or of another format; the message names it.
    """

    def __init__(self, path: str, skip_warmup: bool = True) -> None:
        self._prefix = str(path)
        self._index = format.read_index(self._prefix)
        self._tokens: Array = np.zeros(0, self._index.dtype)
        if self._index.num_bytes:
            # A plain array over the map: np.memmap's own class costs a Python call per slice.
            self._tokens = np.memmap(
                format.bin_path(self._prefix), dtype=self._index.dtype, mode="r"
            ).view(np.ndarray)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._prefix,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._prefix!r})"

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._index.sizes)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Array | list[Array]:
        """One sequence, or a list of them for a slice.

        Raises:
            IndexError: for a number that is out of range.
            DataError: when the index points outside of the data.
        """
        if isinstance(index, slice):
            return [self._sequence(number) for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sequence {number} of {self}: it has {len(self)}.")
        return self._sequence(number % len(self))

    def _sequence(self, number: int) -> Array:
        start = int(self._index.offsets[number]) // self.dtype.itemsize
        sequence = self._tokens[start : start + int(self._index.sizes[number])]
        if start < 0 or len(sequence) != self._index.sizes[number]:
            raise DataError(
                f"{format.idx_path(self._prefix)} is damaged: sequence {number} lies "
                "outside of the data."
            )
        return sequence

    def get(self, idx: SupportsIndex, offset: int = 0, length: int | None = None) -> Array:
        """`length` elements of sequence `idx` from `offset` on, 1-D; None for all that are left."""
        return self[idx][offset:][:length]

    def get_doc_idx(self) -> npt.NDArray[np.int64]:
        """`doc_idx` under its older name."""
        return self.doc_idx

    @staticmethod
    def exists(path: str) -> bool:
        """Whether there are token data `path`.bin and `path`.idx."""
        return all(map(os.path.exists, (format.idx_path(path), format.bin_path(path))))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self._index.dtype

    @property
    def sizes(self) -> Array:
        """(len,), elements of each sequence."""
        return self._index.sizes

    @property
    def doc_idx(self) -> npt.NDArray[np.int64]:
        """(documents + 1,): the number of sequences before each document, and at last of all."""
        return self._index.documents

    @property
    def tokens(self) -> Array:
        """All elements of the file, 1-D: the sequences back to back."""
        return self._tokens


class IndexedCachedDataset(MMapIndexedDataset):
    """The same, which can keep chosen sequences in memory."""

    def __init__(self, path: str, skip_warmup: bool = True) -> None:
        super().__init__(path, skip_warmup)
        self._kept: dict[int, Array] = {}

    def prefetch(self, indices: Iterable[SupportsIndex]) -> None:
        """Read these sequences now and keep them, instead of those kept before."""
        self._kept = {
            number: self[number].copy()
            for number in sorted({operator.index(index) for index in indices})
        }

    def _sequence(self, number: int) -> Array:
        kept = self._kept.get(number)
        return kept if kept is not None else super()._sequence(number)


IMPLEMENTATIONS: dict[str, type[MMapIndexedDataset]] = {
    "mmap": MMapIndexedDataset,
    "lazy": MMapIndexedDataset,
    "cached": IndexedCachedDataset,
}


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> MMapIndexedDataset:
    """Open the token data `path`.bin and `path`.idx.

    Args:
        path: without ending.
        impl: "mmap" for our kind of index, "lazy" or "cached" for the older one ("cached" can keep
            sequences in memory: `prefetch`), "infer" to look.
        skip_warmup: accepted for old programs.

    Raises:
        DataError: for another `impl`, one that does not fit the file, or a broken file.
    """
    if impl not in (*IMPLEMENTATIONS, "infer"):
        raise DataError(
            f"unknown dataset implementation {impl!r}: expected infer, "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    kind = format.kind_of(path)
    if impl == "infer":
        impl = kind
    if (impl == "mmap") != (kind == "mmap"):
        raise DataError(
            f"{format.idx_path(path)} is an index of kind {kind!r}, not {impl!r}: use impl='infer'."
        )
    return IMPLEMENTATIONS[impl](path, skip_warmup)


class Joined(Sequence[Array]):
    """Several datasets one after the other, by one number."""

    def __init__(self, parts: Sequence[MMapIndexedDataset]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        """Sequence number `index`, which is in range."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]

    @property
    def sizes(self) -> Array:
        """(len,), elements of each sequence."""
        return np.concatenate([part.sizes for part in self._parts])
