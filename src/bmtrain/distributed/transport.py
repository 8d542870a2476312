"""Gathers and reductions of shards in flight beside the compute stream, and the streams they run
on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bmtrain.distributed.exchange import Exchange, rotated
from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.peers import GATHERS, PeerGroups, PeerMemory, Peers
from bmtrain.runtime.mesh import Axis
from bmtrain.torch_internals import all_gather_flat, reduce_scatter_flat

# Smaller shards are left to collectives: mapping each other's memory takes whole pages of 2 MiB,
# and some milliseconds.
SMALLEST_SHARED_BYTES = 2**16


class Streams(ABC):
    """A gather and a reduce stream beside the compute stream of one device.

    Events order work between them.
    """

    @abstractmethod
    def mark_compute(self) -> torch.Event | None:
        """An event after all work so far issued on the compute stream."""

    @abstractmethod
    def compute_waits(self, event: torch.Event | None) -> None:
        """Later work on the compute stream starts after `event`."""

    @abstractmethod
    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        """Issue the body on the gather stream, after `after`."""

    @abstractmethod
    def reducing(self) -> contextlib.AbstractContextManager[object]:
        """Issue the body on the reduce stream, after all work so far issued on the compute
        stream.
        """

    @abstractmethod
    def mark_current(self) -> torch.Event | None:
        """An event after all work so far issued on the stream of the surrounding `gathering` or
        `reducing`.
        """

    @abstractmethod
    def side_by_side(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Issue jobs that may run at the same time: after all work so far on the surrounding
        stream, before all later work.
        """

    @abstractmethod
    def fork(self) -> None:
        """Later work on the side streams starts after all work so far issued on the compute
        stream.
        """

    @abstractmethod
    def join(self) -> None:
        """Later work on the compute stream starts after all work so far issued on the side
        streams.
        """

    @abstractmethod
    def renew(self) -> None:
        """What came before all events so far is done, or was only captured: nobody waits for those
        events any more.
        """


class NullStreams(Streams):
    """The CPU: program order is the only order."""

    def mark_compute(self) -> torch.Event | None:
        return None

    def compute_waits(self, event: torch.Event | None) -> None:
        return None

    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def reducing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark_current(self) -> torch.Event | None:
        return None

    def side_by_side(self, jobs: Sequence[Callable[[], object]]) -> None:
        for job in jobs:
            job()

    def fork(self) -> None:
        return None

    def join(self) -> None:
        return None

    def renew(self) -> None:
        return None


class Mark(torch.cuda.Event):
    """An event of one age of the streams: a capture of a CUDA graph cannot wait for events from
    outside of it, nor they for its.
    """

    age: int


class CudaStreams(Streams):
    """High-priority side streams: a collective that waits behind compute kernels delays every
    rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._gather = torch.cuda.Stream(device, priority=-1)
        self._reduce = torch.cuda.Stream(device, priority=-1)
        self._device = device
        # Each direction has its own. A stream does one thing after the other: on shared ones the
        # copies of a reduction would wait for those of a gather, and links that carry both ways at
        # once would carry one.
        self._sides: defaultdict[torch.cuda.Stream, list[torch.cuda.Stream]] = defaultdict(list)
        self._age = 0

    def mark_compute(self) -> torch.Event | None:
        return self.mark_current()

    def compute_waits(self, event: torch.Event | None) -> None:
        if isinstance(event, Mark) and event.age == self._age:
            torch.cuda.current_stream().wait_event(event)

    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        if isinstance(after, Mark) and after.age == self._age:
            self._gather.wait_event(after)
        return torch.cuda.stream(self._gather)

    def reducing(self) -> contextlib.AbstractContextManager[object]:
        self._reduce.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._reduce)

    def mark_current(self) -> torch.Event | None:
        mark = Mark()
        mark.age = self._age
        torch.cuda.current_stream().record_event(mark)
        return mark

    def fork(self) -> None:
        compute = torch.cuda.current_stream()
        for side in (self._gather, self._reduce):
            side.wait_stream(compute)

    def join(self) -> None:
        compute = torch.cuda.current_stream()
        for side in (self._gather, self._reduce):
            compute.wait_stream(side)

    def renew(self) -> None:
        self._age += 1

    def side_by_side(self, jobs: Sequence[Callable[[], object]]) -> None:
        surrounding = torch.cuda.current_stream()
        sides = self._sides[surrounding]
        while len(sides) < len(jobs) - 1:
            sides.append(torch.cuda.Stream(self._device, priority=-1))
        before = surrounding.record_event()
        used = sides[: max(len(jobs) - 1, 0)]
        for job, side in zip(jobs[1:], used, strict=True):
            side.wait_event(before)
            with torch.cuda.stream(side):
                job()
        for job in jobs[:1]:
            job()
        for side in used:
            surrounding.wait_stream(side)


def make_streams(device: torch.device) -> Streams:
    """The streams of a device."""
    return NullStreams() if device.type == "cpu" else CudaStreams(device)


@dataclasses.dataclass(frozen=True)
class Pending:
    """Communication in flight: what it reads or writes stays alive as long as this does."""

    tensors: Sequence[torch.Tensor]
    event: torch.Event | None


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A full gradient to be sent: `parts` makes flat tensors that are it, one behind the other,
    from what it `reads`.

    dtype: that in which it travels, of the parts too.
    """

    dtype: torch.dtype
    parts: Callable[[], list[torch.Tensor]]
    reads: Sequence[torch.Tensor]


class ShardSource:
    """The shard that is gathered, without keeping it alive.

    A residence is part of the order of gathers that all ranks share, and so may outlive its storage
    on the ranks that drop a model first. There it still takes its turn in a gather that others have
    begun, with zeros that nobody will read.

    Args:
        shard: (numel,), this rank's.
        peers, memory: where the other ranks' shards can be read; None if a collective gathers.
    """

    def __init__(
        self, shard: torch.Tensor, peers: Peers | None = None, memory: PeerMemory | None = None
    ) -> None:
        self._shard = weakref.ref(shard)
        self.numel, self._dtype, self._device = shard.numel(), shard.dtype, shard.device
        self.peers, self._memory = peers, memory
        self.name = f"{shard.numel()} elements of every rank"
        if memory is not None:  # it maps the shard too
            self.when_gone(self._unmap)

    def get(self) -> torch.Tensor:
        """The shard (numel,), or zeros once it is gone."""
        shard = self._shard()
        return (
            torch.zeros(self.numel, dtype=self._dtype, device=self._device)
            if shard is None
            else shard
        )

    @property
    def memory(self) -> PeerMemory | None:
        """All ranks' shards, to be copied; None once this rank's is gone.

        Mapped for as long as the caller keeps it.
        """
        return self._memory

    def new_full(self, num_shards: int) -> torch.Tensor:
        """Memory for the full buffer, usable in training even if made under inference mode."""
        with torch.inference_mode(False):
            return torch.empty(self.numel * num_shards, dtype=self._dtype, device=self._device)

    def when_gone(self, do: Callable[[], None]) -> None:
        """Call `do` when the shard is gone."""
        shard = self._shard()
        if shard is not None:
            weakref.finalize(shard, do)

    def _unmap(self) -> None:
        self._memory = None


class Transport:
    """Gathers and reductions of a run, over any axis.

    At most two full gradients are alive at a time.
    """

    MAX_REDUCTIONS = 2

    def __init__(self, streams: Streams, peer_groups: PeerGroups, ledger: Ledger) -> None:
        self.streams, self._peer_groups, self.ledger = streams, peer_groups, ledger
        self._reductions: collections.deque[Pending] = collections.deque()
        self._filling: Pending | None = None
        self._fence = True
        # by axis and full size
        self._num_joined: collections.Counter[tuple[tuple[int, ...], int]] = collections.Counter()
        self._exchanges: dict[tuple[tuple[int, ...], int, torch.dtype], Exchange] = {}

    def fence(self) -> None:
        """Shards may have been written on the compute stream: the next gather, and so all after it,
        waits for those writes.
        """
        self._fence = True

    def new_shard(
        self, numel: int, dtype: torch.dtype, axis: Axis, *, shared: bool
    ) -> tuple[torch.Tensor, ShardSource]:
        """Zeros (numel,) for a shard, and what gathers it; in memory that the other ranks can read
        if `shared`. Collective.
        """
        big = shared and numel * dtype.itemsize >= SMALLEST_SHARED_BYTES
        peers = self._peer_groups.of(axis) if big else None
        if peers is None:
            shard, memory = torch.zeros(numel, dtype=dtype, device=self._peer_groups.device), None
        else:
            shard, memory = peers.allocate(numel, dtype)
            self._num_joined[axis.ranks, numel * axis.size] += 1
        return shard, ShardSource(shard, peers, memory)

    def gather(
        self,
        full: torch.Tensor,
        source: ShardSource,
        axis: Axis,
        free: torch.Event | None,
        place: str = "",
    ) -> torch.Event | None:
        """Start filling `full` (n * ranks,) with the shard (n,) of every rank of the axis, once the
        event `free` of the last reader has passed.

        Memory just allocated has no such event: its last reader may be anything issued so far on
        the compute stream.

        Args:
            place: what is gathered and where in the program, for messages.

        Raises:
            RanksPartedError: on all ranks, if they are known to do different things.
        """
        self.ledger.enter(axis, f"gather of {place or source.name}", is_on_host=False)
        streams = self.streams
        after = streams.mark_compute() if self._fence or free is None else free
        self._fence = False
        with streams.gathering(after):
            if source.peers is None:
                gather_shards(full, source.get(), axis)
            else:
                self._copy_shards(full, source.memory, source.peers)
            return streams.mark_current()

    def _copy_shards(self, full: torch.Tensor, memory: PeerMemory | None, peers: Peers) -> None:
        axis = peers.axis
        parts = () if memory is None else memory.parts
        peers.barrier(GATHERS)  # what all ranks have written to their shards comes first
        pieces = full.chunk(axis.size)
        self.streams.side_by_side(
            [functools.partial(pieces[rank].copy_, parts[rank]) for rank in rotated(axis) if parts]
        )
        peers.barrier(GATHERS)  # as after a collective, nobody reads this rank's shard any more

    def expect(self, numel: int, dtype: torch.dtype, axis: Axis) -> None:
        """Full gradients (numel,) of this dtype will be reduced: what sums them by copies is made
        now, if it is not there.

        Collective, and so before any backward pass, where one rank that runs out of memory would
        leave the others waiting. Only sizes that several storages share have it, as it keeps its
        memory: to the end of the run, for ranks drop their models at different times.
        """
        key = (axis.ranks, numel, dtype)
        peers = (
            self._peer_groups.of(axis)
            if self._num_joined[axis.ranks, numel] > 1 and key not in self._exchanges
            else None
        )
        if peers is not None:
            exchange = Exchange(peers, numel, dtype, self.streams.side_by_side)
            with self.streams.reducing():
                exchange.meet()
            self._exchanges[key] = exchange

    def reduce(
        self, total: torch.Tensor, gradient: Outgoing, axis: Axis, *, accumulate: bool
    ) -> None:
        """Start `total` (n,) = (total if accumulate else 0) + this rank's part of the sum over
        ranks of `gradient` (n * ranks,).

        Raises:
            RanksPartedError: on all ranks, if they are known to do different things. What is
                reduced has been noted before.
        """
        if axis.size == 1:
            self._keep(total, gradient, accumulate)
            return
        self.ledger.enter(
            axis, f"reduction of {total.numel()} elements for every rank", is_on_host=False
        )
        self._make_room()
        exchange = self._exchanges.get((axis.ranks, total.numel() * axis.size, gradient.dtype))
        if exchange is None:
            self._reduce_by_collective(total, gradient, axis, accumulate)
            return
        with self.streams.reducing():
            exchange.send(gradient.parts())
            self._filling = Pending(gradient.reads, self.streams.mark_current())
            exchange.sum(total, accumulate)
            self._reductions.append(Pending([], self.streams.mark_current()))

    def _reduce_by_collective(
        self, total: torch.Tensor, gradient: Outgoing, axis: Axis, accumulate: bool
    ) -> None:
        # Made here, where memory belongs to the compute stream; filled beside it, where memory is
        # the bottleneck and not products.
        full = torch.empty(total.numel() * axis.size, dtype=gradient.dtype, device=total.device)
        with self.streams.reducing():
            torch.cat(gradient.parts(), out=full)
            self._filling = Pending(gradient.reads, self.streams.mark_current())
            if not accumulate and full.dtype == total.dtype:
                reduce_shards(total, full, axis)
            else:
                part = torch.empty(total.numel(), dtype=full.dtype, device=full.device)
                reduce_shards(part, full, axis)
                _add(total, part, accumulate)
            self._reductions.append(Pending([full], self.streams.mark_current()))

    def wait_for_reductions(self) -> None:
        """Later compute work starts after every reduction so far."""
        self._filling = None  # comes before its reduction
        while self._reductions:
            self.streams.compute_waits(self._reductions.popleft().event)

    def _make_room(self) -> None:
        """The caching allocator may hand memory that has been let go to compute kernels: they wait
        for its last use here.
        """
        if self._filling is not None:
            self.streams.compute_waits(self._filling.event)
            self._filling = None
        while len(self._reductions) >= self.MAX_REDUCTIONS:
            self.streams.compute_waits(self._reductions.popleft().event)

    def _keep(self, total: torch.Tensor, gradient: Outgoing, accumulate: bool) -> None:
        """One rank: its gradient is the sum, written where it belongs."""
        if gradient.dtype == total.dtype and not accumulate:
            torch.cat(gradient.parts(), out=total)
            return
        _add(total, torch.cat(gradient.parts()), accumulate)


def _add(total: torch.Tensor, part: torch.Tensor, accumulate: bool) -> None:
    _ = total.add_(part) if accumulate else total.copy_(part)


def gather_shards(full: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
    """Fill `full` (axis.size * n,) with every rank's `shard` (n,) in rank order, on the axis's
    gather communicator.
    """
    all_gather_flat(full, shard, group=axis.communicators.gather)


def reduce_shards(shard: torch.Tensor, full: torch.Tensor, axis: Axis) -> None:
    """Fill `shard` (n,) with this rank's part of the sum over ranks of `full` (axis.size * n,), on
    the reduce communicator.
    """
    reduce_scatter_flat(shard, full, op=dist.ReduceOp.SUM, group=axis.communicators.reduce)
