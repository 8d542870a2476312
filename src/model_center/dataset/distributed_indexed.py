"""Token data in numbered files, divided among ranks."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any, SupportsIndex, overload

from torch.utils.data import Dataset

from model_center.dataset.indexed import Array, Joined, MMapIndexedDataset
from model_center.dataset.indexed_format import CODES as dtypes
from model_center.dataset.indexed_format import bin_path as data_file_path
from model_center.dataset.indexed_format import code_of as code
from model_center.dataset.indexed_format import idx_path as index_file_path
from model_center.errors import DataError

__all__ = ["DistributedMMapIndexedDataset", "code", "data_file_path", "dtypes", "index_file_path"]


class DistributedMMapIndexedDataset(Dataset[Array]):
    """One rank's part of the sequences in `PATH/NAME_0`, `PATH/NAME_1`, ..., by number.

    All files together are one row of sequences, and rank r of W has those numbered r, r + W, r +
    2W, ...: none is left out, and the ranks' lengths differ by one at most. (Programs written for
    ModelCenter got contiguous parts of each file, without the remainders.) Ranks of unequal length
    may not call each other in a loop over their parts; to read all sequences in equally many
    batches, use rank 0 of 1 with DistributedDataLoader, which divides them itself.

    Any order of access works, and it pickles, for worker processes.

    Args:
        path: the folder. A beginning of file names is understood too, as ModelCenter joined `path +
            name + "_0"`.
        name: of the files, before `_0`. Numbers start at 0 or 1 and have no gaps.
        rank_number: which part to read.
        rank_total: into how many parts the sequences are divided.
        cache: accepted for old programs; the operating system keeps pages.

    Raises:
        DataError: when no file, not every file, or a broken file is found; when the part is none.
    """

    def __init__(
        self, path: str, name: str, rank_number: int, rank_total: int, cache: Any = None
    ) -> None:
        if not 0 <= rank_number < rank_total:
            raise DataError(
                f"rank {rank_number} of {rank_total} is out of range: expected 0 <= rank_number < "
                "rank_total."
            )
        self._rank, self._total = operator.index(rank_number), operator.index(rank_total)
        self._all = Joined([MMapIndexedDataset(prefix) for prefix in numbered_files(path, name)])

    @property
    def num_shards(self) -> int:
        """Among how many ranks the sequences are divided."""
        return self._total

    def __len__(self) -> int:
        """Sequences of this part."""
        return len(range(self._rank, len(self._all), self._total))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Array | list[Array]:
        """A sequence of this part, a read-only view of its file; for a slice, a list."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sequence {number} of rank {self._rank}: it has {len(self)}.")
        return self._all[self._rank + number % len(self) * self._total]

    @staticmethod
    def exists(path: str) -> bool:
        """Whether there are token data `path`.bin and `path`.idx."""
        return MMapIndexedDataset.exists(path)

    @property
    def sizes(self) -> Array:
        """(len,), elements of each sequence of this part."""
        return self._all.sizes[self._rank :: self._total]


def numbered_files(path: str, name: str) -> list[str]:
    """The prefixes `.../NAME_0`, `.../NAME_1`, ... in order.

    Raises:
        DataError: when there is none, a number is missing, or both spellings of the path exist.
    """
    spellings = sorted({Path(path, name), Path(str(path) + name)})
    found = {spelling: numbers for spelling in spellings if (numbers := _numbers(spelling))}
    if not found:
        raise DataError(
            f"no token data {Path(path, name)}_0.idx, nor {path}{name}_0.idx: check path and name."
        )
    if len(found) > 1:
        raise DataError(
            f"both {' and '.join(f'{spelling}_*.idx' for spelling in found)} exist: move one away."
        )
    ((spelling, numbers),) = found.items()
    missing = set(range(min(numbers[0], 1), numbers[-1])) - set(numbers)
    if missing:
        raise DataError(
            f"{spelling}_{min(missing)}.idx is missing, while {spelling}_{numbers[-1]}.idx exists."
        )
    return [f"{spelling}_{number}" for number in numbers]


def _numbers(spelling: Path) -> list[int]:
    """k of every file `spelling_k.idx`, ascending."""
    pattern = re.compile(re.escape(spelling.name) + r"_(0|[1-9]\d*)\.idx")
    names = [entry.name for entry in spelling.parent.iterdir()] if spelling.parent.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
