"""All-gathers and reduce-scatters of shards, overlapped with compute, and their streams."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bmtrain.distributed.exchange import Exchange, rotated
from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.peers import GATHERS, REDUCTIONS, PeerGroups, PeerMemory, Peers
from bmtrain.runtime.mesh import Axis
from bmtrain.torch_internals import (
    add_each_,
    all_gather_flat,
    copy_each_,
    current_stream_number,
    reduce_scatter_flat,
)

# Bytes. Smaller shards use collectives: mapping memory into other processes takes whole 2 MiB pages
# and a few milliseconds.
SMALLEST_SHARED_BYTES = 2**16


class Mark(torch.cuda.Event):
    """An event that knows the stream that has waited for it last, by its number."""

    waited: int | None = None


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Issue the body on a stream of the current device.

    `torch.cuda.stream` looks for the device, and so does `current_stream` without an index: 50 us
    of the host at each use.
    """
    before = torch.cuda.current_stream(stream.device_index)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


class Streams:
    """A gather stream and a reduce stream beside the compute stream of one device.

    Events order work between them. The side streams have high priority: a collective queued behind
    compute kernels would delay every rank. On a CPU operations run in program order, so nothing has
    to wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gather: torch.cuda.Stream | None = None
        self._reduce: torch.cuda.Stream | None = None
        if device.type != "cpu":
            self._gather = torch.cuda.Stream(device, priority=-1)
            self._reduce = torch.cuda.Stream(device, priority=-1)
        # Streams for `side_by_side`, by surrounding stream. The two directions share none: work on
        # one stream is serialised, so the copies of a reduction would wait for those of a gather,
        # and links that carry both directions at once would carry only one.
        self._sides: defaultdict[torch.cuda.Stream, list[torch.cuda.Stream]] = defaultdict(list)

    def mark_current(self) -> torch.Event | None:
        """An event after all work issued so far on the current stream; None on a CPU."""
        if self._gather is None:
            return None
        mark = Mark()
        torch.cuda.current_stream(self._device.index).record_event(mark)
        return mark

    mark_compute = mark_current  # where the current stream is the compute stream

    def compute_waits(self, event: torch.Event | None) -> None:
        """Make later work on the compute stream wait for `event`."""
        if isinstance(event, Mark):
            stream = current_stream_number(self._device)
            # Storages that were gathered together share an event.
            if event.waited != stream:
                torch.cuda.current_stream(self._device.index).wait_event(event)
                event.waited = stream

    def gathering(self, after: torch.Event | None) -> contextlib.AbstractContextManager[object]:
        """Issue the body on the gather stream, after the event `after`."""
        if self._gather is None:
            return contextlib.nullcontext()
        if after is not None:
            # Without this wait, the gather could read a shard that is still being written, or
            # overwrite memory that is still being read.
            self._gather.wait_event(after)
        return _on(self._gather)

    def reducing(self) -> contextlib.AbstractContextManager[object]:
        """Issue the body on the reduce stream, after all work issued on the compute stream."""
        if self._reduce is None:
            return contextlib.nullcontext()
        # Without this wait, the reduction could read gradients that are still being computed.
        self._reduce.wait_stream(torch.cuda.current_stream(self._device.index))
        return _on(self._reduce)

    def join(self) -> None:
        """Make the compute stream wait for all work issued so far on the side streams."""
        for side in (self._gather, self._reduce):
            if side is not None:
                torch.cuda.current_stream(self._device.index).wait_stream(side)

    def side_by_side(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Issue jobs that may run concurrently.

        They start after all earlier work on the current stream; later work there waits for all of
        them.
        """
        used: list[torch.cuda.Stream] = []
        if self._gather is not None:
            surrounding = torch.cuda.current_stream(self._device.index)
            sides = self._sides[surrounding]
            while len(sides) < len(jobs) - 1:
                sides.append(torch.cuda.Stream(self._device, priority=-1))
            before = surrounding.record_event()
            used = sides[: max(len(jobs) - 1, 0)]
        for job, side in zip(jobs[1:], used, strict=False):
            # Without this wait, a copy could run before the barrier that makes its source readable.
            side.wait_event(before)
            with _on(side):
                job()
        for job in jobs[:1] if used else jobs:
            job()
        # Without this wait, later work could read what the copies have not yet written, or reuse
        # the memory they still read.
        for side in used:
            surrounding.wait_stream(side)


@dataclasses.dataclass(frozen=True)
class Pending:
    """Communication in flight. Holds the tensors it accesses until the event is waited for."""

    tensors: Sequence[torch.Tensor]
    event: torch.Event | None


@dataclasses.dataclass(frozen=True)
class Reduction:
    """`total = (total if accumulate else 0) + this rank's part of the sum over ranks`.

    Attributes:
        total: this rank's gradient (n,), written.
        dtype: dtype in which the full gradient is communicated; the parts have it too.
        parts: makes flat tensors whose concatenation is the full gradient (n * ranks,).
        reads: the tensors that `parts` reads. They are held until it has been computed.
        accumulate: add to `total` instead of overwriting it.
    """

    total: torch.Tensor
    dtype: torch.dtype
    parts: Callable[[], list[torch.Tensor]]
    reads: Sequence[torch.Tensor]
    accumulate: bool


class ShardSource:
    """A shard to gather, held weakly.

    A residence is part of the gather order that all ranks share, so it may outlive its storage on
    ranks that drop a model first. Those ranks still take part in gathers that others have started,
    with zeros that nobody reads. Leaving would hang the other ranks.

    Args:
        shard: this rank's shard (numel,).
        peers, memory: where the other ranks' shards can be read; None if a collective gathers.
    """

    def __init__(
        self, shard: torch.Tensor, peers: Peers | None = None, memory: PeerMemory | None = None
    ) -> None:
        self._shard = weakref.ref(shard)
        self.numel, self._dtype, self._device = shard.numel(), shard.dtype, shard.device
        self.peers = peers
        #: All ranks' shards, to copy from; None once this rank's has been freed. Whoever issues
        #: copies from it must hold it meanwhile: it keeps the memory mapped.
        self.memory = memory
        if memory is not None:  # it maps this shard too: held on, the memory would never be freed
            weakref.finalize(shard, self._unmap)

    def get(self) -> torch.Tensor:
        """The shard (numel,), or zeros once it has been freed."""
        shard = self._shard()
        if shard is None:
            return torch.zeros(self.numel, dtype=self._dtype, device=self._device)
        return shard

    def new_full(self, num_shards: int) -> torch.Tensor:
        """A full buffer, uninitialised; usable in training even if allocated in inference mode."""
        with torch.inference_mode(False):
            return torch.empty(self.numel * num_shards, dtype=self._dtype, device=self._device)

    def _unmap(self) -> None:
        self.memory = None


@dataclasses.dataclass(frozen=True)
class Gather:
    """A gather to be started.

    Attributes:
        full: what is filled, (n * ranks,).
        source: the shard (n,) of this rank, and where those of the others are.
        axis: the ranks.
        place: what is gathered, and where in the program, for messages.
    """

    full: torch.Tensor
    source: ShardSource
    axis: Axis
    place: str


class Transport:
    """All-gathers and reduce-scatters of a run, over any axis.

    At most MAX_REDUCTIONS full gradients are in flight at a time, and what autograd has computed
    for the last of them, which bounds their memory.
    """

    MAX_REDUCTIONS = 2

    def __init__(self, streams: Streams, peer_groups: PeerGroups, ledger: Ledger) -> None:
        self.streams, self._peer_groups, self.ledger = streams, peer_groups, ledger
        self._reductions: collections.deque[Pending] = collections.deque()
        self._filling: Pending | None = None
        # number of shards in peer memory, by ranks of the axis and full size
        self._num_joined: collections.Counter[tuple[tuple[int, ...], int]] = collections.Counter()
        self._exchanges: dict[tuple[tuple[int, ...], int, torch.dtype], Exchange] = {}

    def new_shard(
        self, numel: int, dtype: torch.dtype, axis: Axis, *, shared: bool
    ) -> tuple[torch.Tensor, ShardSource]:
        """Zeros (numel,) for a shard, and its ShardSource. Collective.

        With `shared`, a shard of at least SMALLEST_SHARED_BYTES is in peer memory, if the axis has
        peers.
        """
        big = shared and numel * dtype.itemsize >= SMALLEST_SHARED_BYTES
        peers = self._peer_groups.of(axis) if big else None
        if peers is None:
            shard, memory = torch.zeros(numel, dtype=dtype, device=self._peer_groups.device), None
        else:
            shard, memory = peers.allocate(numel, dtype)
            self._num_joined[axis.ranks, numel * axis.size] += 1
        return shard, ShardSource(shard, peers, memory)

    def gather(self, *gathers: Gather) -> torch.Event | None:
        """Start gathers; several as one, which costs little more than the largest of them.

        They wait for all work issued so far on the compute stream: without that, a gather could
        send a shard that is still being written, or fill memory that the allocator has handed out
        again while a kernel still reads what was there.

        Returns:
            The event after all of them; None on a CPU.

        Raises:
            RanksDivergedError: on all ranks, if they are known to have diverged.
        """
        for gather in gathers:
            self.ledger.enter(gather.axis, f"gather of {gather.place}", compares=False)
        streams = self.streams
        with streams.gathering(streams.mark_compute()):
            if len(gathers) == 1 and (peers := gathers[0].source.peers) is not None:
                # held until the copies are issued: it keeps the memory mapped
                memory = gathers[0].source.memory
                pieces = gathers[0].full.chunk(peers.axis.size)
                copies = [
                    functools.partial(pieces[rank].copy_, memory.parts[rank])
                    for rank in rotated(peers.axis)
                    if memory is not None
                ]
                # Without this barrier, the copies could read a peer's shard before its optimizer
                # has written it.
                peers.barrier(GATHERS)
                streams.side_by_side(copies)
                # Without this barrier, a rank could update its shard while a peer still copies
                # from it.
                peers.barrier(GATHERS)
            elif self.ledger.is_immediate:
                for gather in gathers:
                    rows = gather.full.view(gather.axis.size, gather.source.numel)
                    self.ledger.swap(gather.axis, gather.source.get().expand_as(rows), rows)
            else:
                by_axis: dict[Axis, list[Gather]] = {}
                for gather in gathers:
                    by_axis.setdefault(gather.axis, []).append(gather)
                for axis, members in by_axis.items():
                    gather_shards(
                        [each.full for each in members],
                        [each.source.get() for each in members],
                        axis,
                    )
            return streams.mark_current()

    def allocate_exchange(self, numel: int, dtype: torch.dtype, axis: Axis) -> None:
        """Allocate peer memory for reducing full gradients (numel,) of this dtype, where it pays.

        Collective, and therefore called before any backward pass: if one rank ran out of memory
        inside one, the others would hang. The memory is kept until the end of the run, because
        ranks drop their models at different times; so only sizes that several storages share get
        it.
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
                # Without this barrier, a copy into a peer's memory could arrive before that peer's
                # zero-fill, which would erase it.
                peers.barrier(REDUCTIONS)
            self._exchanges[key] = exchange

    def reduce(self, reductions: Sequence[Reduction], axis: Axis) -> None:
        """Start reductions of one dtype, together: that costs little more than the largest of them.

        Raises:
            RanksDivergedError: on all ranks, if they are known to have diverged. The caller has
                logged whose gradients these are.
        """
        if axis.size == 1:
            for each in reductions:
                _reduce_alone(each)
            return
        numel, reads = 0, list[torch.Tensor]()
        for each in reductions:
            numel += each.total.numel()
            reads += each.reads
        self.ledger.enter(axis, f"reduction of {numel} elements for every rank", compares=False)
        self._make_room()
        first, dtype = reductions[0], reductions[0].dtype
        exchange = self._exchanges.get((axis.ranks, numel * axis.size, dtype))
        if exchange is not None and len(reductions) == 1:
            with self.streams.reducing():
                exchange.send(first.parts())
                self._filling = Pending(reads, self.streams.mark_current())
                exchange.sum(first.total, first.accumulate)
                self._reductions.append(Pending([], self.streams.mark_current()))
            return
        if self.ledger.is_immediate:
            for each in reductions:
                rows = torch.cat(each.parts()).view(axis.size, each.total.numel())
                arrived = torch.empty_like(rows)
                self.ledger.swap(axis, rows, arrived)
                part = arrived.sum(0, dtype=each.total.dtype)  # in rank order
                _ = each.total.add_(part) if each.accumulate else each.total.copy_(part)
            return
        # Allocated outside `reducing`, so that the memory belongs to the compute stream's pool;
        # filled on the reduce stream, beside matrix products that leave memory bandwidth idle.
        full = torch.empty(numel * axis.size, dtype=dtype, device=first.total.device)
        with self.streams.reducing():
            torch.cat([part for each in reductions for part in each.parts()], out=full)
            self._filling = Pending(reads, self.streams.mark_current())
            sums = [
                torch.empty_like(each.total, dtype=dtype)
                if each.accumulate or dtype != each.total.dtype
                else each.total
                for each in reductions
            ]
            fulls = full.split([part.numel() * axis.size for part in sums])
            reduce_shards(sums, fulls, axis)
            for each, part in zip(reductions, sums, strict=True):
                if part is not each.total:
                    _ = each.total.add_(part) if each.accumulate else each.total.copy_(part)
            self._reductions.append(Pending([full], self.streams.mark_current()))

    def wait_for_reductions(self) -> None:
        """Make later work on the compute stream wait for all reductions in flight.

        Without it, an optimizer could read gradients that are still being summed.
        """
        # A fill comes before its reduction on the reduce stream; waiting for the latter suffices.
        self._filling = None
        while self._reductions:
            self.streams.compute_waits(self._reductions.popleft().event)

    def _make_room(self) -> None:
        """Wait until the last reduction has copied its gradients, and less than MAX_REDUCTIONS are
        in flight, then release their tensors.

        The compute stream waits before a tensor is dropped. Without that, the caching allocator
        could hand its memory to a compute kernel while the reduce stream still reads it.
        """
        if self._filling is not None:
            self.streams.compute_waits(self._filling.event)
            self._filling = None
        while len(self._reductions) >= self.MAX_REDUCTIONS:
            self.streams.compute_waits(self._reductions.popleft().event)


def _reduce_alone(reduction: Reduction) -> None:
    """Write the gradient of a single rank, which is the sum, without communication."""
    total, parts = reduction.total, reduction.parts()
    places = total.split([part.numel() for part in parts])
    _ = (add_each_ if reduction.accumulate else copy_each_)(places, parts)


def gather_shards(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], axis: Axis
) -> None:
    """All-gather shards (n,) into `fulls` (axis.size * n,) in rank order, on the gather group."""
    group = axis.communicators.gather
    if len(fulls) == 1:
        all_gather_flat(fulls[0], shards[0], group=group)
    else:
        group.allgather_into_tensor_coalesced(list(fulls), list(shards)).wait()


def reduce_shards(
    shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], axis: Axis
) -> None:
    """Reduce-scatter sums of `fulls` (axis.size * n,) into shards (n,), on the reduce group."""
    group = axis.communicators.reduce
    if len(fulls) == 1:
        reduce_scatter_flat(shards[0], fulls[0], op=dist.ReduceOp.SUM, group=group)
    else:
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM
        group.reduce_scatter_tensor_coalesced(list(shards), list(fulls), options).wait()
