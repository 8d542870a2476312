"""Moving shards: gathers and reductions in flight beside the compute stream."""

from __future__ import annotations

import collections
import dataclasses

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.streams import Streams
from bmtrain.runtime.mesh import Axis


@dataclasses.dataclass(frozen=True)
class Pending:
    """Communication in flight: what it reads or writes stays alive as long as this does."""

    tensor: torch.Tensor
    event: torch.Event | None


class Transport:
    """Gathers and reductions of a run, over any axis. At most two full gradients are alive at a time."""

    MAX_REDUCTIONS = 2

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._reductions: collections.deque[Pending] = collections.deque()
        self._fence = True

    def fence(self) -> None:
        """Shards may have been written on the compute stream: the next gather, and so all after it, waits for those writes."""
        self._fence = True

    def gather(self, full: torch.Tensor, shard: torch.Tensor, axis: Axis, free: torch.Event | None) -> torch.Event | None:
        """Start filling `full` (n * ranks,) with the `shard` (n,) of every rank of the axis, once the event `free` of the last
        reader has passed.

        Memory just allocated has no such event: its last reader may be anything issued so far on the compute stream.
        """
        streams = self.streams
        after = streams.mark_compute() if self._fence or free is None else free
        self._fence = False
        with streams.gathering(after):
            collectives.gather_shards(full, shard, axis)
            return streams.mark_current()

    def reduce(self, total: torch.Tensor, full: torch.Tensor, axis: Axis, *, accumulate: bool) -> None:
        """Start `total` (n,) = (total if accumulate else 0) + this rank's part of the sum over ranks of `full` (n * ranks,)."""
        streams = self.streams
        while len(self._reductions) >= self.MAX_REDUCTIONS:
            # The caching allocator may hand the memory of a finished reduction to compute kernels: they wait for it here.
            streams.compute_waits(self._reductions.popleft().event)
        with streams.reducing():
            if axis.size == 1:
                part = full
            elif not accumulate and full.dtype == total.dtype:
                collectives.reduce_shards(total, full, axis)
                part = None
            else:
                part = torch.empty(total.numel(), dtype=full.dtype, device=full.device)
                collectives.reduce_shards(part, full, axis)
            if part is not None:
                _ = total.add_(part) if accumulate else total.copy_(part)
            self._reductions.append(Pending(full, streams.mark_current()))

    def wait_for_reductions(self) -> None:
        """Later compute work starts after every reduction so far."""
        while self._reductions:
            self.streams.compute_waits(self._reductions.popleft().event)
