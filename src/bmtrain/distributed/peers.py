"""Memory that all ranks of an axis can read and write: copies between them need no collective, and
no processor of the device.

On GPUs of one host it is symmetric memory, mapped into every process and moved by copy engines; on
CPUs files that every process maps, so that whatever is built on it runs and is tested there too.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import platform
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt
from bmtrain.errors import ConfigurationError
from bmtrain.runtime.log import print_rank, warn
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.torch_internals import store_of, symmetric_memory, torch_version

# Barriers of the two directions are under way at the same time, each on a channel of its own.
GATHERS, REDUCTIONS = 0, 1
_PAGE = 2**21  # bytes: memory that processes map into each other comes in whole pages of a GPU


class PeerMemory:
    """A flat tensor on every rank of an axis, as the others see it.

    Args:
        parts: that of each rank in rank order, all (numel,) on this rank's device; that of this
            rank among them.
        mapping: what keeps the others' memory mapped.
        num_bytes: what this rank's part takes of its device.
    """

    def __init__(self, parts: Sequence[torch.Tensor], mapping: object, num_bytes: int) -> None:
        self.parts, self._mapping, self.num_bytes = tuple(parts), mapping, num_bytes


class Peers(ABC):
    """The ranks of an axis, if each can read the memory of all others."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self._alive: weakref.WeakSet[PeerMemory] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """What this rank's parts of all memory that is alive take of its device."""
        return sum(memory.num_bytes for memory in self._alive)

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        """Zeros (numel,) of this rank, and those of all ranks. Collective, as many elements
        everywhere.

        The others' memory outlives what this rank does with it for as long as the second result is
        alive.

        Raises:
            torch.OutOfMemoryError, OSError: on all ranks, if the device (on a CPU the disk) of any
                has no room for it.
        """
        own, memory = self._allocate(numel, dtype)
        self._alive.add(memory)
        return own, memory

    @abstractmethod
    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        """As `allocate`, which keeps the account."""

    @abstractmethod
    def barrier(self, channel: int) -> None:
        """What all ranks have put on their current streams up to here comes before what this rank
        puts there next.

        `channel` is GATHERS or REDUCTIONS; barriers of one channel come in the same order on all
        ranks.
        """


class DevicePeers(Peers):
    """GPUs of one host that reach each other's memory."""

    def __init__(self, axis: Axis, device: torch.device, timeout: float) -> None:
        super().__init__(axis, device)
        self._timeout_ms = math.ceil(timeout * 1000)
        attempt(self._introduce, axis, RuntimeError)
        self._flags, self._flags_of_all = self._share(1, torch.int32)

    def _introduce(self) -> None:
        """Up to torch 2.10 symmetric memory knows a process group only if it is told; from 2.11 on
        it finds its store by itself.
        """
        if torch_version() < (2, 11):
            group = self.axis.group
            own_store = dist.PrefixStore("symmetric memory", store_of(group))  # type: ignore[attr-defined]
            symmetric_memory().set_group_info(
                group.group_name, self.axis.index, self.axis.size, own_store
            )

    def _share(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Memory (numel,) of this rank, and torch's handle of that of all ranks."""
        own = attempt(lambda: self._make(numel, dtype), self.axis, torch.OutOfMemoryError)
        return own, symmetric_memory().rendezvous(own, self.axis.group.group_name)

    def _make(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return symmetric_memory().empty_strided_p2p((numel,), (1,), dtype, self.device)
        # this memory comes from the driver, past torch's cache, which may have all that is left
        except RuntimeError:
            torch.cuda.empty_cache()
            return symmetric_memory().empty_strided_p2p((numel,), (1,), dtype, self.device)

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        own, handle = self._share(numel, dtype)
        own.zero_()
        # whole pages, in which torch's own flags follow
        num_bytes = (numel * dtype.itemsize // _PAGE + 1) * _PAGE
        return own, PeerMemory(
            [handle.get_buffer(rank, (numel,), dtype) for rank in range(self.axis.size)],
            handle,
            num_bytes,
        )

    def barrier(self, channel: int) -> None:
        self._flags_of_all.barrier(channel, self._timeout_ms)


class FilePeers(Peers):
    """Processes of one host: files that all of them map."""

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        num_bytes = numel * dtype.itemsize
        with attempt(
            lambda: tempfile.TemporaryDirectory(prefix="bmtrain-"), self.axis, OSError
        ) as folder:
            path = attempt(
                lambda: _make_file(pathlib.Path(folder, "memory"), num_bytes), self.axis, OSError
            )
            paths = collectives.gather_objects(path, self.axis)
            # When all have mapped all of them the names are needed no more.
            parts = attempt(
                lambda: [self._map(path, numel, dtype) for path in paths], self.axis, OSError
            )
        own = parts[self.axis.index]
        return own, PeerMemory(
            [own.detach() if part is own else part for part in parts], None, num_bytes
        )

    def barrier(self, channel: int) -> None:
        # what it is for has been entered already
        dist.all_reduce(torch.zeros(1, device="cpu"), group=self.axis.group)

    def _map(self, path: pathlib.Path, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype, device=self.device)


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why ranks cannot read each other's memory, and what users can do about it, if anything."""

    what: str
    remedy: str = ""


class PeerGroups:
    """Which axes have peers. One per run, reached by `world.service(PeerGroups)`."""

    def __init__(self, world: World) -> None:
        self._world, self.device = world, world.device
        self._found: dict[tuple[int, ...], Peers | None] = {}
        self._has_told = False

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's device that ranks map. Torch's allocator knows nothing of it."""
        return sum(peers.num_bytes for peers in self._found.values() if peers is not None)

    def of(self, axis: Axis) -> Peers | None:
        """The peers of an axis, or None where collectives carry everything. Collective when an axis
        is asked for first.

        Raises:
            ConfigurationError: if `transport="copy_engine"` was asked for and cannot be had.
        """
        if axis.ranks not in self._found:
            self._found[axis.ranks] = self._look(axis)
        return self._found[axis.ranks]

    def _look(self, axis: Axis) -> Peers | None:
        wanted = self._world.defaults.transport
        on_cpu = self.device.type == "cpu"
        if axis.size == 1 or wanted == "collective" or (on_cpu and wanted == "auto"):
            return None
        obstacle = _obstacle(axis, self.device)
        peers = None
        if obstacle is None:
            peers, obstacle = self._meet(axis)
        if obstacle is not None and wanted == "copy_engine":
            raise ConfigurationError(
                f"transport='copy_engine' cannot be had: {obstacle.what}; use 'auto' or "
                "'collective'."
            )
        if obstacle is not None:
            self._tell(obstacle)
        return peers

    def _meet(self, axis: Axis) -> tuple[Peers | None, Obstacle | None]:
        """The peers, or why there are none: drivers and containers have ways of refusing that show
        only when it is tried.
        """
        peers: Peers | None = None
        problem: str | None = None
        try:
            if self.device.type == "cpu":
                peers = FilePeers(axis, self.device)
            else:
                peers = DevicePeers(axis, self.device, self._world.timeout)
        except RuntimeError as error:
            problem = (
                f"rank {self._world.rank} cannot share memory "
                f"({str(error).strip().splitlines()[0]})"
            )
        problem = next(filter(None, collectives.gather_objects(problem, axis)), None)
        return (
            (peers, None)
            if problem is None
            else (None, Obstacle(problem, "see what the driver or the container forbids"))
        )

    def _tell(self, obstacle: Obstacle) -> None:
        """Say on rank 0, once in a run, that copies were possible in principle: a warning only if
        there is something to be done.
        """
        if self._has_told:
            return
        self._has_told = True
        text = (
            f"NCCL carries shards and gradients where copies between GPUs cannot: {obstacle.what}"
        )
        if not obstacle.remedy:
            print_rank(f"{text}.")
        elif self._world.rank == 0:
            warn(
                f"{text}; {obstacle.remedy}, or set transport='collective' if this is as "
                "it should be."
            )


def _make_file(path: pathlib.Path, num_bytes: int) -> pathlib.Path:
    """A file of zeros that really has its space: touching a hole on a full disk would kill the
    process.
    """
    with open(path, "wb") as file:
        if sys.platform == "linux":
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        file.truncate(num_bytes)
    return path


def _obstacle(axis: Axis, device: torch.device) -> Obstacle | None:
    """Why the ranks of an axis cannot read each other's memory, the same on all of them; None if
    they can.
    """
    hosts = set(collectives.gather_objects(_host(), axis))
    kernels = {kernel for _, kernel in hosts}
    if len(hosts) > 1 and len(kernels) == 1 and "" not in kernels:
        return Obstacle(
            f"{axis.size} ranks are in {len(hosts)} containers of one host",
            "run those of a host in one container",
        )
    if len(hosts) > 1:
        return Obstacle(f"{axis.size} ranks are on {len(hosts)} hosts")
    return None if device.type == "cpu" else _obstacle_between_gpus(axis, device)


def _obstacle_between_gpus(axis: Axis, device: torch.device) -> Obstacle | None:
    places = collectives.gather_objects(device.index, axis)
    if len(set(places)) < axis.size:
        return Obstacle(
            "the processes do not see each other's GPUs (CUDA_VISIBLE_DEVICES differs "
            "between them)",
            "let every process see all GPUs of the host",
        )
    missing = [
        place
        for place in places
        if place != device.index and not torch.cuda.can_device_access_peer(device, place)
    ]
    told = collectives.gather_objects((device.index, missing), axis)
    return next(
        (Obstacle(f"GPU {own} has no access to GPU {others[0]}") for own, others in told if others),
        None,
    )


def _host() -> tuple[str, str]:
    """Container of this process, and the start of its kernel ("" if unknown): equal where processes
    can map each other's memory.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""
