"""Which rows a rank reads in which batch: integers only, no collective, no tensor, no data.

A *global batch* is the rows that all ranks read in one step: a contiguous run of the epoch's order,
`batch_size` rows a rank. Three things hold for any number of rows and ranks:

* every row is read exactly once per epoch (`drop_last` apart),
* every rank reads equally many batches, none of them empty, so collectives inside the loop never
  wait in vain,
* what comes next depends only on how many rows of the epoch have been read, so an epoch can go on
  from any row, with
  another number of ranks too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from model_center.dataset.protocols import begin_epoch
from model_center.errors import DataError


# numpy promises to keep the raw streams of its bit generators, not its shuffles, and a resumed run
# must keep its order after an update.
def bits(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """`count` random 64-bit numbers, a function of the integers `key` alone."""
    return np.random.Philox(np.random.SeedSequence([number % 2**64 for number in key])).random_raw(
        count
    )


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """The numbers below `count`, in an order that is a function of `key`; takes 16 bytes each."""
    return np.argsort(bits(count, *key), kind="stable")


def draw(low: int, high: int, *key: int) -> int:
    """A number in [low, high], a function of `key`; the bias is below (high - low) / 2**64."""
    return low + int(bits(1, *key)[0]) % (high - low + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How runs of rows are cut into global batches. `batch_size` is that of one rank."""

    batch_size: int
    world_size: int
    drop_last: bool = False

    @property
    def global_batch(self) -> int:
        """Rows of a full global batch."""
        return self.batch_size * self.world_size

    def next(self, left: int) -> int:
        """Rows of the next global batch when `left` rows of the epoch are left; 0 ends the epoch.

        A last batch that had fewer rows than ranks shares the rows of the one before: half of both
        each. Where half is still too few, which only happens with a batch size of 1, they are one
        batch.
        """
        full = self.global_batch
        if self.drop_last:
            return full if left >= full else 0
        if left < self.world_size:
            return 0
        if left <= full or left >= full + self.world_size:
            return min(left, full)
        return -(-left // 2) if left >= 2 * self.world_size else left

    def count(self, left: int) -> int:
        """How many global batches `left` rows make."""
        if left < self.world_size:
            return 0
        full, rest = divmod(left, self.global_batch)
        if self.drop_last or rest == 0:
            return full
        return full if self.batch_size == 1 else full + 1

    def starts(self, first: int, num_rows: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of every global batch of the rows [first, num_rows)."""
        while rows := self.next(num_rows - first):
            yield first, first + rows
            first += rows

    def share(self, start: int, stop: int, rank: int) -> tuple[int, int]:
        """`rank`'s rows [start, stop) of a global batch: shares differ by one row at most."""
        rows = stop - start
        return start + rank * rows // self.world_size, start + (rank + 1) * rows // self.world_size


def check_rows(num_rows: int, cut: BatchSplit) -> None:
    """DataError, alike on all ranks, when `num_rows` rows leave a rank without a batch."""
    if num_rows == 0:
        raise DataError(
            "the dataset is empty: expected at least one row per rank; check its path and split."
        )
    if num_rows < cut.world_size:
        raise DataError(
            f"the dataset has {num_rows} rows for {cut.world_size} ranks: every rank "
            "needs at least one in each batch, "
            f"and no row is read twice; run on at most {num_rows} ranks or give more data."
        )
    if cut.drop_last and num_rows < cut.global_batch:
        raise DataError(
            f"drop_last leaves no batch: the dataset has {num_rows} rows, one batch of "
            f"all {cut.world_size} ranks has "
            f"{cut.global_batch}; use a smaller batch_size or drop_last=False."
        )


class EpochRows(list[int]):
    """The rows of a batch, which tell the epoch to the dataset of a worker that they come to.

    A worker has a copy of the dataset. One that outlives the epoch (`persistent_workers`) would
    hand out rows of the first one for ever: nothing but the row numbers reaches it.
    """

    def __init__(self, epoch: int, rows: Iterable[int]) -> None:
        super().__init__(rows)
        self._epoch = epoch

    def __reduce__(self) -> tuple[Callable[..., list[int]], tuple[int, list[int]]]:
        return _unpickled_rows, (self._epoch, list(self))


def _unpickled_rows(epoch: int, rows: list[int]) -> list[int]:
    """The rows in the process that they were sent to."""
    if torch.utils.data.get_worker_info() is not None:
        _set_worker_epoch(epoch)
    return rows


@functools.lru_cache(maxsize=1)  # once an epoch: what a dataset does then may take long
def _set_worker_epoch(epoch: int) -> None:
    info = torch.utils.data.get_worker_info()
    if info is not None:
        begin_epoch(info.dataset, epoch)


class RankBatches:
    """The batches of one rank, as lists of row numbers: the `batch_sampler` of a torch DataLoader.

    It is set to an epoch and a row of it (`start`) before each pass; the pass then does not depend
    on it any more.
    """

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        self._num_rows, self._shuffle, self._seed = num_rows, shuffle, seed
        self._next: tuple[BatchSplit, int, int, int] | None = None

    def start(self, cut: BatchSplit, rank: int, epoch: int, row: int) -> None:
        """The next pass reads `epoch` from row `row` on, as `rank` of `cut.world_size`."""
        self._next = cut, rank, epoch, row

    def __iter__(self) -> Iterator[list[int]]:
        """Row numbers of the dataset, batch by batch."""
        if self._next is None:
            raise DataError(
                "RankBatches has no pass to iterate: iterate over the DistributedDataLoader that "
                "it belongs to."
            )
        cut, rank, epoch, row = self._next
        return self._batches(cut, rank, epoch, row)

    def between(
        self, cut: BatchSplit, rank: int, epoch: int, first: int, end: int
    ) -> list[list[int]]:
        """The batches of `rank` that are made of the rows [first, end) of the epoch's order."""
        count = sum(1 for start, _ in cut.starts(first, self._num_rows) if start < end)
        return list(itertools.islice(self._batches(cut, rank, epoch, first), count))

    def _batches(self, cut: BatchSplit, rank: int, epoch: int, row: int) -> Iterator[list[int]]:
        order = self.order(epoch)
        for start, stop in cut.starts(row, self._num_rows):
            first, last = cut.share(start, stop, rank)
            rows = range(first, last) if order is None else order[first:last].tolist()
            yield EpochRows(epoch, rows)

    def order(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """Row numbers in the order of this epoch; None when it is that of the dataset."""
        return permutation(self._num_rows, self._seed, epoch) if self._shuffle else None
