"""Memory that the GPUs of one host can read and write: copies need no collective and no SMs.

It is symmetric memory, mapped into every process and moved by copy engines.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt
from bmtrain.errors import ConfigurationError, first_line
from bmtrain.runtime.log import print_rank, warn
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.process import this_host
from bmtrain.runtime.world import World
from bmtrain.torch_internals import TORCH_VERSION, store_of, symmetric_memory

# Barriers for gathers and for reductions can be in flight at once, so each has its own channel: on
# a shared one they could match each other.
GATHERS, REDUCTIONS = 0, 1
_PAGE = 2**21  # bytes: granularity at which a GPU's memory is mapped into other processes


@dataclasses.dataclass(frozen=True, eq=False)
class PeerMemory:
    """A flat tensor on every rank of an axis, with all of them mapped into this process.

    Attributes:
        parts: one per rank in rank order, this rank's included, all (numel,) on this rank's device.
        mapping: keeps the other ranks' memory mapped.
        num_bytes: memory that this rank's part occupies on its device.
    """

    parts: Sequence[torch.Tensor]
    mapping: object
    num_bytes: int


class Peers:
    """GPUs of one host with access to each other's memory, one for each rank of an axis."""

    def __init__(self, axis: Axis, device: torch.device, timeout: float) -> None:
        self.axis, self._device = axis, device
        #: to count its bytes; strong references would keep all of it mapped
        self.alive: weakref.WeakSet[PeerMemory] = weakref.WeakSet()
        self._timeout_ms = math.ceil(timeout * 1000)

        def introduce() -> None:
            """Register the process group with symmetric memory, as torch requires up to 2.10."""
            if TORCH_VERSION < (2, 11):
                own_store = dist.PrefixStore("symmetric memory", store_of(axis.group))  # type: ignore[attr-defined]
                symmetric_memory.set_group_info(
                    axis.group.group_name, axis.index, axis.size, own_store
                )

        attempt(introduce, axis, RuntimeError)
        self._flags, self._flags_of_all = self._share(1, torch.int32)

    def _share(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Symmetric memory (numel,) on this rank, and torch's handle to that of all ranks."""

        make = functools.partial(
            symmetric_memory.empty_strided_p2p, (numel,), (1,), dtype, self._device
        )

        def make_or_free() -> torch.Tensor:
            try:
                return make()
            # Symmetric memory comes from the driver; torch's caching allocator may hold all that
            # is free.
            except RuntimeError:
                torch.cuda.empty_cache()
                return make()

        own = attempt(make_or_free, self.axis, torch.OutOfMemoryError)
        return own, symmetric_memory.rendezvous(own, self.axis.group.group_name)

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        """Zeros (numel,) on this rank, and the parts of all ranks. Collective, with the same numel.

        The other ranks' memory stays mapped for as long as the PeerMemory is alive.

        Raises:
            torch.OutOfMemoryError: on all ranks, if the device of any is full.
        """
        own, handle = self._share(numel, dtype)
        own.zero_()
        # torch places its signal pad behind the data, and the driver maps whole pages
        num_bytes = (numel * dtype.itemsize // _PAGE + 1) * _PAGE
        parts = [handle.get_buffer(rank, (numel,), dtype) for rank in range(self.axis.size)]
        memory = PeerMemory(parts, handle, num_bytes)
        self.alive.add(memory)
        return own, memory

    def barrier(self, channel: int) -> None:
        """Make later work on the current stream wait for all ranks' earlier work on theirs.

        `channel` is GATHERS or REDUCTIONS. The barriers of one channel must come in the same order
        on all ranks: otherwise barriers of different operations match each other.
        """
        self._flags_of_all.barrier(channel, self._timeout_ms)


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why ranks cannot access each other's memory, and what users can do about it, if anything."""

    what: str
    remedy: str = ""


class PeerGroups:
    """The peers of each axis. One per run, reached by `world.service(PeerGroups)`."""

    def __init__(self, world: World) -> None:
        self._world, self.device = world, world.device
        self._found: dict[tuple[int, ...], Peers | None] = {}
        self._has_told = False

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's device in peer memory, which torch's allocator does not track."""
        found = [peers for peers in self._found.values() if peers is not None]
        return sum(memory.num_bytes for peers in found for memory in peers.alive)

    def of(self, axis: Axis) -> Peers | None:
        """The peers of an axis, or None if collectives carry everything.

        Collective on the first call for an axis.

        Raises:
            ConfigurationError: if `transport="copy_engine"` was requested but is not possible.
        """
        if axis.ranks not in self._found:
            self._found[axis.ranks] = self._look(axis)
        return self._found[axis.ranks]

    def _look(self, axis: Axis) -> Peers | None:
        wanted = self._world.defaults.transport
        is_asked = wanted == "copy_engine"
        if axis.size == 1 or not (is_asked or (wanted == "auto" and self.device.type != "cpu")):
            return None
        obstacle = _obstacle(axis, self.device)
        peers: Peers | None = None
        if obstacle is None:
            problem: str | None = None
            try:
                peers = Peers(axis, self.device, self._world.timeout)
            # some limits of drivers and containers show only on use
            except RuntimeError as error:
                problem = f"rank {self._world.rank} cannot share memory ({first_line(error)})"
            problems = collectives.gather_objects(problem, axis, "shared memory")
            problem = next(filter(None, problems), None)
            if problem is not None:
                peers = None
                obstacle = Obstacle(problem, "check what the driver or the container forbids")
        if obstacle is not None and is_asked:
            raise ConfigurationError(
                f"transport='copy_engine' is not possible: {obstacle.what}; use 'auto' or "
                "'collective'."
            )
        if obstacle is not None and not self._has_told:  # once per run, on rank 0
            self._has_told = True
            text = (
                f"NCCL carries shards and gradients instead of copies between GPUs: {obstacle.what}"
            )
            if not obstacle.remedy:
                print_rank(f"{text}.")
            elif self._world.rank == 0:
                warn(
                    f"{text}; {obstacle.remedy}, or set transport='collective' if this is intended."
                )
        return peers


def _obstacle(axis: Axis, device: torch.device) -> Obstacle | None:
    """Why ranks cannot access each other's memory, the same on all ranks; None if they can."""
    hosts = set(collectives.gather_objects(this_host(), axis, "hosts"))
    kernels = {kernel for _, kernel in hosts}
    if len(hosts) > 1 and len(kernels) == 1 and "" not in kernels:
        return Obstacle(
            f"{axis.size} ranks are in {len(hosts)} containers of one host",
            "run those of a host in one container",
        )
    if len(hosts) > 1:
        return Obstacle(f"{axis.size} ranks are on {len(hosts)} hosts")
    if device.type == "cpu":
        return Obstacle("the ranks compute on CPUs")
    places = collectives.gather_objects(device.index, axis, "GPUs")
    if len(set(places)) < axis.size:
        return Obstacle(
            "the processes do not see each other's GPUs (CUDA_VISIBLE_DEVICES differs between "
            "them)",
            "let every process see all GPUs of the host",
        )
    missing = [
        place
        for place in places
        if place != device.index and not torch.cuda.can_device_access_peer(device, place)
    ]
    for own, others in collectives.gather_objects((device.index, missing), axis, "access of GPUs"):
        if others:
            return Obstacle(f"GPU {own} has no access to GPU {others[0]}")
    return None
