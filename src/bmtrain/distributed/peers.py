"""Memory that all ranks of an axis can read: copies between them need no collective, and no processor of the device.

On GPUs of one host it is symmetric memory, mapped into every process and moved by copy engines; on CPUs files that every
process maps, so that whatever is built on it runs and is tested there too.
"""

from __future__ import annotations

import math
import os
import pathlib
import platform
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World

# Barriers of the two directions are under way at the same time, each on a channel of its own.
GATHERS, REDUCTIONS = 0, 1


class PeerMemory:
    """A flat tensor on every rank of an axis, as the others see it.

    Args:
        parts: that of each rank in rank order, all (numel,) on this rank's device; that of this rank among them.
        mapping: what keeps the others' memory mapped.
    """

    def __init__(self, parts: Sequence[torch.Tensor], mapping: object) -> None:
        self.parts, self._mapping = tuple(parts), mapping


class Peers(ABC):
    """The ranks of an axis, if each can read the memory of all others."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        """Zeros (numel,) of this rank, and those of all ranks. Collective, as many elements everywhere.

        The others' memory outlives what this rank does with it for as long as the second result is alive.
        """

    @abstractmethod
    def barrier(self, channel: int) -> None:
        """What all ranks have put on their current streams up to here comes before what this rank puts there next.

        `channel` is GATHERS or REDUCTIONS; barriers of one channel come in the same order on all ranks.
        """


class DevicePeers(Peers):
    """GPUs of one host that reach each other's memory."""

    def __init__(self, axis: Axis, device: torch.device, timeout: float) -> None:
        super().__init__(axis, device)
        self._timeout_ms = math.ceil(timeout * 1000)
        self._flags, self._flags_of_all = self._share(1, torch.int32)

    def _share(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Memory (numel,) of this rank, and torch's handle of that of all ranks."""
        # The class itself: the module of functions around it imports much more, which every program would pay for.
        symmetric = torch._C._distributed_c10d._SymmetricMemory
        own = symmetric.empty_strided_p2p((numel,), (1,), dtype, self.device)
        return own, symmetric.rendezvous(own, self.axis.group.group_name)

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        own, handle = self._share(numel, dtype)
        own.zero_()
        return own, PeerMemory([handle.get_buffer(rank, (numel,), dtype) for rank in range(self.axis.size)], handle)

    def barrier(self, channel: int) -> None:
        self._flags_of_all.barrier(channel, self._timeout_ms)


class FilePeers(Peers):
    """Processes of one host: files that all of them map."""

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
        made = self._make_file(numel * dtype.itemsize)
        all_made = collectives.gather_objects(made, self.axis)
        problem = next((found for found in all_made if isinstance(found, OSError)), None)
        paths = [found for found in all_made if isinstance(found, pathlib.Path)]
        if problem is None:
            parts = [torch.from_file(str(path), shared=True, size=numel, dtype=dtype, device=self.device) for path in paths]
            collectives.barrier(self.axis)  # all have mapped it: the name is needed no more
        if isinstance(made, pathlib.Path):
            shutil.rmtree(made.parent)
        if problem is not None:
            raise problem
        own = parts[self.axis.index]
        return own, PeerMemory([own.detach() if part is own else part for part in parts], None)

    def barrier(self, channel: int) -> None:
        collectives.barrier(self.axis)

    @staticmethod
    def _make_file(num_bytes: int) -> pathlib.Path | OSError:
        """A file of zeros that really has its space: touching a hole on a full disk would kill the process."""
        folder = pathlib.Path(tempfile.mkdtemp(prefix="bmtrain-"))
        path = folder / "memory"
        try:
            with open(path, "wb") as file:
                if sys.platform == "linux":
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                file.truncate(num_bytes)
        except OSError as error:
            shutil.rmtree(folder)
            return error
        return path


class PeerGroups:
    """Which axes have peers. One per run, reached by `world.service(PeerGroups)`."""

    def __init__(self, world: World) -> None:
        self._world, self.device = world, world.device
        self._found: dict[tuple[int, ...], Peers | None] = {}

    def of(self, axis: Axis) -> Peers | None:
        """The peers of an axis, or None where collectives carry everything. Collective when an axis is asked for first.

        Raises:
            ConfigurationError: if `transport="copy_engine"` was asked for and cannot be had.
        """
        if axis.ranks not in self._found:
            self._found[axis.ranks] = self._look(axis)
        return self._found[axis.ranks]

    def _look(self, axis: Axis) -> Peers | None:
        world, wanted = self._world, self._world.defaults.transport
        on_cpu = self.device.type == "cpu"
        if axis.size == 1 or wanted == "collective" or (on_cpu and wanted == "auto"):
            return None
        obstacle = _obstacle(axis, world.device)
        peers = None
        if obstacle is None:
            peers, obstacle = self._meet(axis)
        if obstacle is not None and wanted == "copy_engine":
            raise ConfigurationError(f"transport='copy_engine' cannot be had: {obstacle}; use 'auto' or 'collective'.")
        return peers

    def _meet(self, axis: Axis) -> tuple[Peers | None, str | None]:
        """The peers, or why there are none: drivers and containers have ways of refusing that show only when it is tried."""
        peers: Peers | None = None
        problem: str | None = None
        try:
            if self.device.type == "cpu":
                peers = FilePeers(axis, self.device)
            else:
                peers = DevicePeers(axis, self.device, self._world.timeout)
        except RuntimeError as error:
            problem = f"rank {self._world.rank} cannot share memory ({str(error).strip().splitlines()[0]})"
        problem = next(filter(None, collectives.gather_objects(problem, axis)), None)
        return (None, problem) if problem else (peers, None)


def _obstacle(axis: Axis, device: torch.device) -> str | None:
    """Why the ranks of an axis cannot read each other's memory, the same on all of them; None if they can."""
    hosts = collectives.gather_objects(_host(), axis)
    if len(set(hosts)) > 1:
        return f"the ranks {list(axis.ranks)} are on {len(set(hosts))} hosts"
    if device.type == "cpu":
        return None
    places = collectives.gather_objects(device.index, axis)
    if len(set(places)) < axis.size:
        return "the processes do not see each other's GPUs (CUDA_VISIBLE_DEVICES differs between them)"
    missing = [place for place in places if place != device.index and not torch.cuda.can_device_access_peer(device, place)]
    told = collectives.gather_objects((device.index, missing), axis)
    return next((f"GPU {own} has no access to GPU {others[0]}" for own, others in told if others), None)


def _host() -> tuple[str, str]:
    """Equal for processes that can map each other's memory: same kernel, same container."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""
