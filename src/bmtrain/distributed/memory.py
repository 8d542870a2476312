"""What tensors hold of this rank's GPU, shards included."""

from __future__ import annotations

import torch

from bmtrain.distributed.peers import PeerGroups
from bmtrain.runtime.world import World


class Peak:
    """The most that tensors have held since it was last taken.

    Torch counts one peak for all who ask; here each has its own.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self._highest = memory, 0

    def raise_to(self, num_bytes: int) -> None:
        """Tensors have held so much."""
        self._highest = max(self._highest, num_bytes)

    def take(self) -> int:
        """Bytes. Starts counting anew, from what tensors hold now."""
        self._memory.read_peak()
        highest, self._highest = self._highest, 0
        return highest


class DeviceMemory:
    """Bytes of this rank's GPU. One per run with GPUs, reached by `world.service(DeviceMemory)`.

    Shards that other ranks map come from the driver, past torch's allocator, whose statistics leave
    them out: here they count.
    """

    def __init__(self, world: World) -> None:
        self._device, self._peers = world.device, world.service(PeerGroups)
        self._peaks: list[Peak] = []
        self._highest = 0  # of all that torch has counted before it started anew
        self.shown = self.new_peak()  # to users

    def held(self) -> int:
        """What tensors hold now."""
        return torch.cuda.memory_allocated(self._device) + self._peers.num_bytes

    def within_reach(self) -> int:
        """What they hold, and what else they could: not what torch has left over of pieces of which
        tensors hold the rest.
        """
        free, _ = torch.cuda.mem_get_info(self._device)
        left_over = torch.cuda.memory_stats(self._device).get("inactive_split_bytes.all.current", 0)
        return free + torch.cuda.memory_reserved(self._device) - left_over + self._peers.num_bytes

    def total(self) -> int:
        """What the device has."""
        _, total = torch.cuda.mem_get_info(self._device)
        return total

    def new_peak(self) -> Peak:
        """A peak that counts from where torch's own has begun."""
        peak = Peak(self)
        self._peaks.append(peak)
        return peak

    def read_peak(self) -> None:
        """Tell all peaks what torch has counted, which starts anew."""
        counted = self._counted()
        self._highest = max(self._highest, counted)
        torch.cuda.reset_peak_memory_stats(self._device)
        for peak in self._peaks:
            peak.raise_to(counted)

    def highest(self) -> int:
        """The most that tensors have held in this run."""
        return max(self._highest, self._counted())

    def _counted(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) + self._peers.num_bytes
