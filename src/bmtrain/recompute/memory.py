"""Device memory as the planner sees it. The CPU does not count; a limit may be given by hand."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

import torch

from bmtrain.distributed.memory import DeviceMemory
from bmtrain.runtime.world import World

MARGIN = 0.03  # of all memory, left for fragmentation and allocations outside of torch


class Memory:
    """Memory of one device: a CPU, which does not count. All figures are bytes.

    Args:
        limit: bounds what blocks keep for backward; None for no limit.

    Attributes:
        limit_is_open: whether there is no limit.
    """

    #: whether it counts what tensors hold
    counts = False

    def __init__(self, limit: int | None) -> None:
        self._limit, self.limit_is_open = limit, limit is None

    def allocated(self) -> int:
        """Bytes that tensors hold now."""
        return 0

    def take_peak(self) -> int:
        """Peak of `allocated` since the last call; restarts the measurement."""
        return 0

    def limit(self) -> int:
        """Most bytes that tensors may hold."""
        return self._limit or 0

    def num_retries(self) -> int:
        """Allocations so far that succeeded only after the allocator had emptied its cache."""
        return 0

    def tidy(self) -> None:
        """Return cached memory to the device, when sizes of allocations are about to change."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""


class CudaMemory(Memory):
    """A GPU. Counts all tensors, including shards in memory that other ranks map.

    Torch's cache grows beyond the peak of what tensors hold: pieces of its segments are too small
    for what is needed, and what one part of a step has freed does not serve the next. How much that
    is depends on the sizes of a step, so it is measured from `tidy` on, and out of the limit.
    """

    counts = True

    def __init__(self, memory: DeviceMemory, device: torch.device, limit: int | None) -> None:
        super().__init__(limit)
        self._memory, self._device, self.limit_is_open = memory, device, False
        self._peak, self._since_tidy = memory.new_peak(), memory.new_peak()

    def allocated(self) -> int:
        return self._memory.held()

    def take_peak(self) -> int:
        return self._peak.take()

    def limit(self) -> int:
        lost = max(self._memory.cached() - self._since_tidy.so_far(), 0)
        usable = self._memory.within_reach() - lost - int(self._memory.total() * MARGIN)
        return usable if self._limit is None else min(usable, self._limit)

    def num_retries(self) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats.get("num_alloc_retries", 0))

    def tidy(self) -> None:
        torch.cuda.empty_cache()
        self._since_tidy.take()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def free_host_memory() -> int:
    """Free bytes of the host or container, shared by all processes; 0 if unknown."""
    found = [
        int(line.split()[1]) * 1024
        for line in _lines(pathlib.Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    ]
    group = pathlib.Path("/sys/fs/cgroup")
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and used and limit[0].isdigit():
        found.append(int(limit[0]) - int(used[0]))
    return min(found, default=0)


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="ascii").splitlines() if path.is_file() else []


def memory_of(world: World) -> Memory:
    """The memory of this rank's device. One per run, from `world.service(memory_of)`."""
    limit = world.defaults.memory_limit
    return (
        Memory(limit)
        if world.device.type == "cpu"
        else CudaMemory(world.service(DeviceMemory), world.device, limit)
    )


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, Any]:
    """Their storages by id. Held, so that no storage made later gets the id of one of them."""
    return {id(s): s for s in (tensor.untyped_storage() for tensor in tensors)}


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd saves in its body: each storage once.

    Attributes:
        num_bytes: so far.

    Args:
        spare: tensors that do not count: parameters, and what others hold anyway.
    """

    def __init__(self, spare: Iterable[torch.Tensor]) -> None:
        super().__init__(self._pack, lambda saved: saved)
        self._seen = storages_of(spare)
        self.num_bytes = 0

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # The state of a random generator lies on the host.
        if id(storage) not in self._seen and tensor.dtype != torch.uint8:
            self._seen[id(storage)] = storage
            self.num_bytes += storage.nbytes()
        return tensor.detach()  # else a node would hold its own result, and so itself
