"""Device memory held by tensors, including the shards that torch's allocator does not track."""

from __future__ import annotations

import torch

from bmtrain.distributed.peers import PeerGroups
from bmtrain.runtime.world import World


class Peak:
    """Peak of the memory held by tensors since the last `take`.

    Torch keeps one peak per device; this gives each user a peak of its own.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.highest = 0  # as far as torch's peak was read

    def so_far(self) -> int:
        """The peak in bytes."""
        self._memory.read_peak()
        return self.highest

    def take(self) -> int:
        """The peak in bytes; restarts it from what tensors hold now."""
        highest, self.highest = self.so_far(), 0
        return highest


class DeviceMemory:
    """Memory of this rank's GPU, in bytes.

    One per run with GPUs, reached by `world.service(DeviceMemory)`. Shards that other ranks map are
    allocated by the driver, past torch's caching allocator, whose statistics miss them: here they
    count.
    """

    def __init__(self, world: World) -> None:
        self._device, self._peers = world.device, world.service(PeerGroups)
        self._peaks: list[Peak] = []
        self._highest = 0  # peak before torch's statistics were last reset
        self.shown = self.new_peak()  # the one that `see_memory` prints

    def held(self) -> int:
        """Bytes that tensors hold now."""
        return torch.cuda.memory_allocated(self._device) + self._peers.num_bytes

    def cached(self) -> int:
        """Bytes that this process has for tensors now, free ones in torch's cache included."""
        return torch.cuda.memory_reserved(self._device) + self._peers.num_bytes

    def within_reach(self) -> int:
        """Bytes that this process has for tensors, or could get from the device."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + self.cached()

    def total(self) -> int:
        """Bytes of the device's memory."""
        _, total = torch.cuda.mem_get_info(self._device)
        return total

    def new_peak(self) -> Peak:
        """A peak that starts from torch's own last reset."""
        peak = Peak(self)
        self._peaks.append(peak)
        return peak

    def read_peak(self) -> None:
        """Pass torch's peak on to all peaks, and reset torch's."""
        counted = torch.cuda.max_memory_allocated(self._device) + self._peers.num_bytes
        self._highest = max(self._highest, counted)
        torch.cuda.reset_peak_memory_stats(self._device)
        for peak in self._peaks:
            peak.highest = max(peak.highest, counted)

    def highest(self) -> int:
        """Peak of the bytes that tensors held in this run."""
        counted = torch.cuda.max_memory_allocated(self._device) + self._peers.num_bytes
        return max(self._highest, counted)
