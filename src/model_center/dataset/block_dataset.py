"""Reading a block dataset: in order, or one rank's blocks by epochs, with a place to resume."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

import bmtrain as bmt
from model_center.dataset import block_meta, blocks
from model_center.dataset.block_meta import FileInfo
from model_center.errors import DataError


class BlockFiles:
    """The blocks of a dataset by number.

    Its meta data are read anew when they have changed; files may be added to it.
    """

    def __init__(self, path: str, block_size: int | None, allow_pickle: bool) -> None:
        self.path, self.allow_pickle = str(path), allow_pickle
        self._signature = block_meta.signature(path) if block_meta.exists(path) else (0, 0, 0)
        self.meta = block_meta.read_meta(path, block_size, allow_pickle)
        self.live = self._live()

    def refresh(self) -> bool:
        """Look for changes of the meta data; whether there were any.

        Raises:
            DataError: when files have gone or moved, so that block numbers mean something else now.
        """
        now = block_meta.signature(self.path)
        if now == self._signature:
            return False
        meta = block_meta.read_meta(self.path, self.meta.block_size, self.allow_pickle)
        before, after = (
            [(file.file_name, file.block_begin, file.block_end) for file in one.files]
            for one in (self.meta, meta)
        )
        if after[: len(before)] != before:
            raise DataError(
                f"the files of {self.path} have been renumbered (compact_dataset): open "
                "the dataset again."
            )
        self._signature, self.meta = now, meta
        self.live = self._live()
        return True

    def _live(self) -> npt.NDArray[np.bool_]:
        """(num_blocks,): neither masked nor in a file that is gone."""
        live = np.zeros(self.meta.num_blocks, np.bool_)
        for file in self.files():
            live[file.block_begin : file.block_end] = True
        return live

    def files(self) -> list[FileInfo]:
        """The files to read: those that are not masked and there."""
        shown = [file for file in self.meta.files if not file.mask]
        there = [file for file in shown if Path(self.path, file.file_name).exists()]
        if len(there) < len(shown):
            gone = sorted({file.file_name for file in shown} - {file.file_name for file in there})
            warnings.warn(
                f"{self.path} has lost {', '.join(gone)}: left out; compact_dataset forgets them.",
                stacklevel=2,
            )
        return there

    def read(self, number: int) -> bytes:
        """A block.

        Raises:
            DataError: when its file does not have the size that the meta data say, or no record
                starts the block.
        """
        size = self.meta.block_size
        file = next(file for file in self.meta.files if file.block_begin <= number < file.block_end)
        path = Path(self.path, file.file_name)
        if -(-path.stat().st_size // size) != file.block_end - file.block_begin:
            raise DataError(
                f"{path} has {path.stat().st_size} bytes: expected "
                f"{file.block_end - file.block_begin} blocks of {size}; "
                "it is truncated, or the dataset has another block_size."
            )
        with path.open("rb") as opened:
            opened.seek((number - file.block_begin) * size)
            block = opened.read(size)
        if blocks.is_end(block, 0):
            raise DataError(
                f"block {number - file.block_begin} of {path} is damaged: no record starts it."
            )
        return block

    def records(self, number: int) -> Iterator[Any]:
        """The records of a block."""
        block, at = self.read(number), 0
        while not blocks.is_end(block, at):
            value, at = blocks.read(block, at, self.allow_pickle)
            yield value


class SimpleDataset(IterableDataset[Any]):
    """All records of a block dataset, once each, in order; worker processes share the blocks.

    Args:
        path: the folder.
        block_size: as `build_dataset` got it; None for what the dataset says.
        allow_pickle: read datasets of ModelCenter, whose records and meta data are pickles. They
            can run code.

    Raises:
        DataError: when there is no dataset, it is damaged, or holds pickles that are not allowed.
    """

    def __init__(
        self, path: str, block_size: int | None = None, allow_pickle: bool = False
    ) -> None:
        self._files = BlockFiles(path, block_size, allow_pickle)

    def __len__(self) -> int:
        """Records of the files that are not masked."""
        return sum(file.nlines for file in self._files.files())

    @property
    def nbytes(self) -> int:
        """Bytes of these records."""
        return sum(file.nbytes for file in self._files.files())

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = slice(worker.id, None, worker.num_workers) if worker else slice(None)
        for number in np.flatnonzero(self._files.live)[mine].tolist():
            yield from self._files.records(number)


class DistributedDataset(IterableDataset[Any]):
    """The records of one rank's blocks: of rank r of W, those numbered r, r + W, r + 2W, ...

    `read()` returns one record after the other and never ends: it goes on with the blocks that were
    read least often. Iterating reads what is left of one epoch of this rank and ends; `epoch`
    counts. Blocks hold different numbers of records, so ranks do not end an epoch together: a loop
    whose body communicates uses `read()` and a fixed number of steps, or ends when the first rank
    does.

    Files may be added while it is read: their blocks join the epoch at hand. Masked files are left
    out, and files that are gone too, with a warning. In worker processes of a DataLoader, each
    worker iterates over a share of the rank's part.

    Args:
        path: the folder.
        rank: which part to read.
        world_size: into how many parts the blocks are divided.
        block_size: as `build_dataset` got it; None for what the dataset says.
        allow_pickle: read datasets of ModelCenter, whose records and meta data are pickles. They
            can run code.

    Raises:
        DataError: when there is no dataset, it is damaged, or holds pickles that are not allowed.
    """

    def __init__(
        self,
        path: str,
        rank: int = 0,
        world_size: int = 1,
        block_size: int | None = None,
        allow_pickle: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise DataError(
                f"rank {rank} of {world_size} is out of range: expected 0 <= rank < world_size."
            )
        self._rank, self._world_size = rank, world_size
        self._files = BlockFiles(path, block_size, allow_pickle)
        # how often each block has been read to its end
        self._reads = np.zeros(self._files.meta.num_blocks, np.int64)
        self._offsets: dict[int, int] = {}  # where to go on in blocks that have been read in part
        self._epoch = 0
        self._open: tuple[int, bytes] | None = None  # the block at hand, and its number

    @property
    def nbytes(self) -> int:
        """Bytes of the records of all ranks."""
        return sum(file.nbytes for file in self._files.files())

    @property
    def epoch(self) -> int:
        """How often this rank's part has been read to its end."""
        return self._epoch

    def _mine(self) -> npt.NDArray[np.int64]:
        """The blocks to read.

        Raises:
            DataError: on every rank, when one has none.
        """
        live = np.flatnonzero(self._files.live)
        if len(set((live % self._world_size).tolist())) < self._world_size:
            raise DataError(
                f"{self._files.path} has {len(live)} blocks to read, too few for each of "
                f"{self._world_size} ranks to have one: write it with a smaller block_size (now "
                f"{self._files.meta.block_size}), by shuffle_dataset for example."
            )
        return live[live % self._world_size == self._rank]

    def read(self) -> Any:
        """The next record."""
        number, block = self._open or self._next_block()
        value, at = blocks.read(block, self._offsets.get(number, 0), self._files.allow_pickle)
        self._offsets[number] = at
        self._open = number, block
        if blocks.is_end(block, at):
            self._open = None
            del self._offsets[number]
            self._reads[number] += 1
            self._epoch = max(self._epoch, int(self._reads[self._mine()].min()))
        return value

    def _next_block(self) -> tuple[int, bytes]:
        """Of the blocks read least often, one that has been read in part, else the first."""
        self._refresh()
        number = min(
            self._mine().tolist(),
            key=lambda block: (self._reads[block], block not in self._offsets, block),
        )
        return number, self._files.read(number)

    def _refresh(self) -> None:
        """Blocks that have come (back) join the epoch at hand as unread."""
        before = self._files.live
        if self._files.refresh():
            new = self._files.live.copy()
            new[: len(before)] &= ~before
            self._reads = np.concatenate(
                [self._reads, np.zeros(len(new) - len(self._reads), np.int64)]
            )
            self._reads[new] = np.maximum(self._reads[new], self._epoch)

    def __iter__(self) -> Iterator[Any]:
        """The rest of an epoch.

        In a worker process, a whole epoch of the worker's share of this rank's blocks.
        """
        worker = get_worker_info()
        if worker:
            for number in self._mine()[worker.id :: worker.num_workers].tolist():
                yield from self._files.records(number)
            return
        wanted = self._epoch + 1
        while self._reads[self._mine()].min() < wanted:
            yield self.read()
            while self._open:
                yield self.read()
            self._refresh()
        self._epoch = max(self._epoch, wanted)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The place of all ranks together, for any number of ranks. Collective.

        states: int64 (blocks of the dataset,), how often each was read to its end.
        block: int64 (n, 2), number and byte of those that were read in part.

        Raises:
            DataError: if the run has another number of ranks than the dataset has parts.
        """
        self._refresh()
        own = [
            [number, int(self._reads[number]), self._offsets.get(number, 0)]
            for number in self._mine().tolist()
        ]
        places = torch.tensor(own)
        if self._world_size > 1:
            if bmt.world_size() != self._world_size:
                raise DataError(
                    f"the position of {self._world_size} ranks cannot be gathered from "
                    f"{bmt.world_size()}: call state_dict in a run of as many ranks as the dataset "
                    "has parts."
                )
            places = bmt.gather_result(places)
        states = torch.zeros(max(len(self._reads), int(places[:, 0].max()) + 1), dtype=torch.int64)
        states[: len(self._reads)] = torch.from_numpy(self._reads)
        states[places[:, 0]] = places[:, 1]
        return {"states": states, "block": places[places[:, 2] > 0][:, [0, 2]]}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Resume from `state`, on any number of ranks; blocks read in part come first.

        The epoch is that of the block read least often by any rank: a rank whose blocks have all
        been read in it has nothing left in it.

        Args:
            state: what `state_dict` has returned.
            strict: the dataset must have the blocks that it had; otherwise it may have more.

        Raises:
            DataError: when it has other blocks.
        """
        states = torch.as_tensor(state["states"]).numpy()
        if len(states) > len(self._reads) or (strict and len(states) != len(self._reads)):
            raise DataError(
                f"the saved position is of {len(states)} blocks, but {self._files.path} has "
                f"{len(self._reads)}: pass strict=False if files have been added since."
            )
        known = self._files.live[: len(states)]
        self._epoch = int(states[known].min()) if known.any() else 0
        self._reads[:] = self._epoch
        self._reads[: len(states)] = states
        places = torch.as_tensor(state["block"]).reshape(-1, 2).tolist()
        mine = set(self._mine().tolist())
        self._open, self._offsets = None, {number: at for number, at in places if number in mine}
