"""`DistributedDataLoader`: torch's DataLoader with rows divided among ranks, and resumable."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import bmtrain as bmt
from bmtrain.distributed.ledger import Ledger
from bmtrain.runtime import world
from bmtrain.torch_internals import tree_map_only
from model_center.dataset.protocols import (
    HasEpochs,
    Stateful,
    begin_epoch,
    collate_of,
    may_be_empty,
    shards_of,
)
from model_center.dataset.sampler import BatchSplit, RankBatches, bits, check_rows
from model_center.errors import DataError


@dataclasses.dataclass
class _Position:
    """The place in a pass: the epoch, and the rows handed out on all ranks together."""

    epoch: int = 0
    row: int = 0
    fresh: bool = True  # no batch has been handed out from here yet


class DistributedDataLoader:
    """Batches for this rank: every row on exactly one rank, equally many batches on every rank.

    The rows of one step, `batch_size` times the number of ranks, are a contiguous run of the
    epoch's order, and rank 0 reads the first of them. The rows of the last step are spread evenly
    over the ranks, so its batches are smaller, and may differ by one row between ranks, but none is
    empty and no row is read twice: collectives in the loop (every forward pass of a sharded model
    is one) find all ranks, and `bmtrain.gather_result`, which takes different numbers of rows,
    returns each row's result once. If the last step would have fewer rows than ranks, it shares the
    rows of the step before; with `batch_size=1` it is joined with that step, whose batches then may
    have two rows. Layers split by tensor or pipeline parallelism want equal numbers of rows on all
    ranks: use `drop_last=True` there, or a number of rows that the global batch divides.

    In a process group, tensors of a batch come on the rank's device; from pinned memory
    (`pin_memory=True`) they come while the device still computes.

    Nothing here communicates: the ranks agree because they have the same dataset and arguments.
    Where number of rows, order or place differ, the next collective of the run says so on all
    ranks; a pass that one rank alone begins is such a difference.
    Without a process group the loader is that of one rank. Rank and number of ranks are looked up
    when a pass begins.

    A pass over the loader is one epoch, and each has an order of its own when `shuffle`. A pass
    that begins after one was left early begins the next epoch. `state_dict` and `load_state_dict`
    go on in the middle of one, exactly: what counts is what the loop has been handed, not what
    workers have fetched ahead, and the state is a number of rows, so the number of ranks and the
    batch size may change. (At another number of ranks, an epoch of which fewer rows are left than
    ranks ends there.) Random numbers drawn in worker processes start anew in each pass, from
    `seed`, epoch and rank (with `persistent_workers` in the first pass alone); a dataset that must
    give the same row after a resume derives its randomness from the row number, as ours do.

    A dataset may have `collate(rows)`, used when no `collate_fn` is given, and `set_epoch(epoch)`,
    called when a pass begins. An `IterableDataset` is passed through: it divides itself among ranks
    and workers (`shuffle` is an error), its ranks may end after different numbers of batches, and
    its place can be kept if it has a `state_dict` of its own and `num_workers` is 0.

    Args:
        dataset: rows by number, with a length; the same one on every rank.
        shuffle: a new random order in every epoch, the same on all ranks.
        seed: of that order.
        dataloader_kwargs: torch's arguments. `sampler` and `batch_sampler` are an error: the loader
            is one. With `drop_last` the rows that do not fill a step are left out, others in every
            epoch.

    Raises:
        DataError: when the dataset is empty, has fewer rows than ranks, or is divided among ranks
            already.
    """

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 0, **dataloader_kwargs: Any
    ) -> None:
        taken = sorted({"sampler", "batch_sampler"} & dataloader_kwargs.keys())
        if taken:
            raise DataError(
                f"DistributedDataLoader got {' and '.join(taken)}: it divides and "
                "orders the rows itself; use shuffle and seed, "
                "a torch.utils.data.Subset to choose rows, or torch's DataLoader."
            )
        self.dataset, self.shuffle, self.seed = dataset, bool(shuffle), operator.index(seed)
        self._position = _Position()
        self._generator = torch.Generator()
        pin = bmt.is_initialized() and bmt.device().type != "cpu"
        kwargs = {"generator": self._generator, "pin_memory": pin, **dataloader_kwargs}
        if kwargs.get("collate_fn") is None:
            kwargs["collate_fn"] = collate_of(dataset)
        if isinstance(dataset, IterableDataset):
            self._source: _Rows | _Stream = _Stream(dataset, self.shuffle, kwargs)
        else:
            self._source = _Rows(dataset, self.shuffle, self.seed, kwargs)

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0, that is being read or that the next pass will read."""
        return self._position.epoch

    @property
    def batch_size(self) -> int | None:
        """Rows of a full batch on one rank; None for a stream that is not batched here."""
        return self._source.batch_size

    def set_epoch(self, epoch: int) -> None:
        """The next pass reads `epoch` (0, 1, ...) from its start.

        Not needed: passes count by themselves.

        Raises:
            DataError: for a negative number.
        """
        if operator.index(epoch) < 0:
            raise DataError(f"set_epoch got {epoch}: expected a number from 0 on.")
        self._position = _Position(epoch=operator.index(epoch))

    def __len__(self) -> int:
        """Batches of a whole epoch, equal on every rank."""
        return self._source.num_batches()

    def __iter__(self) -> Iterator[Any]:
        """One pass: the rest of a resumed epoch, else a whole one."""
        if not self._position.fresh:
            self._position = _Position(epoch=self._position.epoch + 1)
        place = self._position = dataclasses.replace(self._position)
        sizes = self._source.begin(place)
        _note(self._source.described(place))
        self._generator.manual_seed(int(bits(1, self.seed, place.epoch, bmt.rank())[0]) >> 1)
        begin_epoch(self.dataset, place.epoch)
        return self._hand_out(iter(self._source.loader), place, sizes)

    def _hand_out(
        self, batches: Iterator[Any], place: _Position, sizes: Iterator[int]
    ) -> Iterator[Any]:
        """The batches, counted when they leave: `sizes` are the rows of all ranks in each."""
        for batch in batches:
            place.row, place.fresh = place.row + next(sizes), False
            yield on_device(batch, bmt.device()) if bmt.is_initialized() else batch
        place.epoch, place.row, place.fresh = place.epoch + 1, 0, True

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch: plain numbers, equal on all ranks, for any number.

        Of a stream: its epoch and its own state.
        """
        return {"epoch": self._position.epoch, **self._source.state(self._position)}

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the rows of it that were handed out on all ranks together."""
        return self._position.epoch, self._position.row

    def rows_since(self, place: tuple[int, int]) -> list[list[int]] | None:
        """Row numbers of this rank's batches between an earlier `place` and now.

        Returns:
            A list for each batch; None for a stream, or where that was another epoch.
        """
        epoch, row = self.position
        if (epoch, row) == (place[0] + 1, 0):  # the batch was the last one
            return self._source.rows_between(place, None)
        return self._source.rows_between(place, row) if epoch == place[0] else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on from that place.

        Raises:
            DataError: when the state is that of another number of rows, seed or kind of order.
        """
        self._position = _Position(epoch=int(state["epoch"]), row=self._source.load_state(state))


def _note(what: str | None) -> None:
    """Enter a pass in the ledger of collectives, which the next collective compares.

    Not in other threads, whose passes may begin before or after a collective.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if what is not None and is_main and bmt.is_initialized():
        current = world.current()
        current.service(Ledger).note(current.mesh.world, f"a pass over rows ({what})")


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors, in containers of any depth, on `device`.

    Copies of pinned memory are not waited for.
    """
    return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), batch)


class _Rows:
    """Rows by number, divided among the ranks by RankBatches."""

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool, seed: int, kwargs: dict[str, Any]
    ) -> None:
        if shards_of(dataset) > 1:
            raise DataError(
                f"{type(dataset).__name__} holds one of {shards_of(dataset)} parts of "
                "the rows, and DistributedDataLoader would "
                "divide them again: build it as rank 0 of 1, or use torch's DataLoader."
            )
        if not isinstance(dataset, Sized):
            raise DataError(
                f"{type(dataset).__name__} has no length: give it __len__ and "
                "__getitem__, or make it an IterableDataset."
            )
        self.batch_size: int = kwargs.pop("batch_size", 1)
        if (
            isinstance(self.batch_size, bool)
            or not isinstance(self.batch_size, int)
            or self.batch_size < 1
        ):
            raise DataError(
                f"batch_size is {self.batch_size!r}: expected a whole number from 1 on, "
                "the rows of one rank's batch."
            )
        self._drop_last = bool(kwargs.pop("drop_last", False))
        self._facts = {
            "num_rows": len(dataset),
            "shuffle": shuffle,
            "seed": seed if shuffle else None,
        }
        self._num_rows, self._may_be_empty = len(dataset), may_be_empty(dataset)
        self._check_rows()
        self._batches = RankBatches(self._num_rows, shuffle=shuffle, seed=seed)
        self.loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **kwargs)

    def _cut(self) -> BatchSplit:
        return BatchSplit(
            batch_size=self.batch_size, world_size=bmt.world_size(), drop_last=self._drop_last
        )

    def _check_rows(self) -> None:
        if self._num_rows or not self._may_be_empty:
            check_rows(self._num_rows, self._cut())

    def num_batches(self) -> int:
        return self._cut().count(self._num_rows)

    def begin(self, place: _Position) -> Iterator[int]:
        """Make `loader` read from `place` on.

        Returns the rows of each step, on all ranks together.
        """
        cut = self._cut()
        self._check_rows()
        self._batches.start(cut, bmt.rank(), place.epoch, place.row)
        return (stop - start for start, stop in cut.starts(place.row, self._num_rows))

    def described(self, place: _Position) -> str:
        """What must be the same on all ranks: of other orders they would take some rows twice."""
        return f"{self._facts}, {self._cut()}, {place}"

    def state(self, place: _Position) -> dict[str, Any]:
        return {"row": place.row, **self._facts}

    def rows_between(self, place: tuple[int, int], end: int | None) -> list[list[int]] | None:
        """The rows of an epoch from a place on, up to `end` or the last one."""
        end = self._num_rows if end is None else end
        return self._batches.between(self._cut(), bmt.rank(), *place, end)

    def load_state(self, state: Mapping[str, Any]) -> int:
        """The row to go on from."""
        wrong = [
            f"{name} {state.get(name)!r} (here {here!r})"
            for name, here in self._facts.items()
            if state.get(name) != here
        ]
        if wrong:
            raise DataError(
                "the saved position is in another order of rows: it was saved with "
                f"{', '.join(wrong)}; use the same."
            )
        return int(state["row"])


class _Stream:
    """An IterableDataset, which divides itself."""

    def __init__(
        self, dataset: IterableDataset[Any], shuffle: bool, kwargs: dict[str, Any]
    ) -> None:
        if shuffle:
            raise DataError(
                f"{type(dataset).__name__} is an IterableDataset, whose order is its own: "
                "leave shuffle=False."
            )
        if kwargs.get("persistent_workers") and isinstance(dataset, HasEpochs):
            raise DataError(
                f"{type(dataset).__name__} is an IterableDataset with set_epoch, which does "
                "not reach its copies in persistent workers: leave persistent_workers=False."
            )
        self._dataset = dataset
        self.loader: DataLoader[Any] = DataLoader(dataset, **kwargs)
        self.batch_size = self.loader.batch_size

    def num_batches(self) -> int:
        return len(self.loader)

    def begin(self, place: _Position) -> Iterator[int]:
        """As for rows; what a stream hands out is not counted in rows."""
        return iter(lambda: 0, None)

    def described(self, place: _Position) -> None:
        """None: ranks may read it as they like."""

    def state(self, place: _Position) -> dict[str, Any]:
        return {"dataset": self._stateful().state_dict()}

    def rows_between(self, place: tuple[int, int], end: int | None) -> list[list[int]] | None:
        """None: only the dataset knows what its rows are."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> int:
        self._stateful().load_state_dict(state["dataset"])
        return 0

    def _stateful(self) -> Stateful:
        if not isinstance(self._dataset, Stateful) or self.loader.num_workers:
            raise DataError(
                f"the position in {type(self._dataset).__name__} cannot be saved: it is an "
                "IterableDataset, which must have state_dict and load_state_dict of its own and "
                f"num_workers=0 (here {self.loader.num_workers})."
            )
        return self._dataset
