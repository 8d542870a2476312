"""A checker of stream order: programs run on the CPU as if on the streams of a GPU, and operators
that nothing orders are reported.

`watching()` replaces the CPU's streams, which do nothing, by simulated ones with vector clocks, and
follows every operator of its body, those of backward passes too. The engine's own events decide
what comes before what. A race is a pair of accesses to the same bytes, not both reads, on two
streams of which none has waited for the other; or memory that goes back to the allocator of its
stream while another stream has not been waited for. What it does not see: the other ranks' streams,
which barriers and collectives order, and the host, which waits for a device at `.item()`.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections import Counter, defaultdict
from typing import NamedTuple, cast
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmtrain.distributed import overlap
from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.transport import Streams
from bmtrain.recompute import offload
from bmtrain.recompute.offload import Host
from bmtrain.runtime import world
from bmtrain.shard import engine

COMPUTE = "compute"
HOST = "host"  # no stream: nothing is reported of what runs there
EARLY_READ, UNORDERED_WRITES = "read before it is written", "written by two"
EARLY_WRITE, EARLY_FREE = "overwritten while it is read", "freed while in use"
MAKING_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NUM_LINES = 4  # of the engine's code, innermost first, that tell a place of the program


class Clock(dict[str, int]):
    """How many operators of each stream are known to be over: the time of a stream, or what an
    event stands for.
    """

    def wait(self, other):
        """All that `other` knows to be over is known here too."""
        for stream, time in other.items():
            self[stream] = max(self.get(stream, 0), time)


class Access(NamedTuple):
    """The `time`-th operator of a stream, which touches some bytes, and the lines that issued
    it.
    """

    stream: str
    time: int
    lines: tuple[tuple[str, int], ...]

    def __str__(self):
        return f"on {self.stream!r} at " + " < ".join(
            f"{file.split('/src/')[-1]}:{line}" for file, line in self.lines
        )


Span = tuple[str, int, int]  # stream, first byte, end


@dataclasses.dataclass
class Memory:
    """One allocation: the stream that touched it first and so owns it, and the accesses that a
    later one may conflict with.
    """

    reference: StorageWeakRef
    owner: str
    writes: dict[Span, Access] = dataclasses.field(default_factory=dict)
    reads: dict[Span, Access] = dataclasses.field(default_factory=dict)


class Order:
    """The clocks of all streams, what memory is alive, and the races found: (what, one access, the
    other) and how often.
    """

    def __init__(self):
        self.current = COMPUTE
        self.clocks = defaultdict(Clock)
        self.races = Counter()
        self._memory = {}

    @contextlib.contextmanager
    def on(self, stream):
        """Issue the operators of the body on `stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def issue(self, reads, writes, made):
        """One operator on the current stream.

        It writes `made` too, be it empty: the stream may have used that memory before.
        """
        if self.current == HOST:
            return
        self.free()
        clock = self.clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        access = Access(self.current, clock[self.current], _lines())
        for x in reads:
            self._read(self._find(x), _span(x, access), access)
        for x in (*writes, *made):
            self._write(self._find(x), _span(x, access), access)

    def free(self):
        """The current stream's memory that nobody refers to any more: its next operator, which is
        to come now, may get it.
        """
        mine = [
            key
            for key, memory in self._memory.items()
            if memory.owner == self.current and memory.reference.expired()
        ]
        now = Access(
            self.current, self.clocks[self.current].get(self.current, 0), _lines() if mine else ()
        )
        for memory in map(self._memory.pop, mine):
            for access in (*memory.writes.values(), *memory.reads.values()):
                self._expect(EARLY_FREE, access, now)

    def _find(self, x):
        storage = x.untyped_storage()
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = Memory(StorageWeakRef(storage), self.current)
        return self._memory[storage._cdata]

    def _read(self, memory, span, access):
        for written in _overlapping(memory.writes, span):
            self._expect(EARLY_READ, memory.writes[written], access)
        memory.reads[span] = access

    def _write(self, memory, span, access):
        for what, table in ((UNORDERED_WRITES, memory.writes), (EARLY_WRITE, memory.reads)):
            for other in _overlapping(table, span):
                ordered = self._expect(what, table[other], access)
                if ordered and span[1] <= other[1] and other[2] <= span[2]:
                    del table[other]  # what comes after this write comes after that too
        memory.writes[span] = access

    def _expect(self, what, earlier, later):
        ordered = self.clocks[later.stream].get(earlier.stream, 0) >= earlier.time
        if not ordered:
            self.races[what, str(earlier), str(later)] += 1
        return ordered


def _span(x, access):
    """The bytes from the first element of `x` to its last."""
    size, begin = x.element_size(), int(x.storage_offset())
    last = begin + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return access.stream, begin * size, (last + 1) * size


def _overlapping(table, span):
    return [other for other in table if other[1] < span[2] and span[1] < other[2]]


def _lines():
    """The innermost lines of the engine that are running."""
    found = []
    frame = sys._getframe(1)
    while frame.f_back is not None and len(found) < NUM_LINES:
        if "/src/bmtrain/" in frame.f_code.co_filename:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


class SimulatedStreams(Streams):
    """Streams of one user, as a GPU has them; events are clocks."""

    def __init__(self, order, name):
        self._order, self._gather_name, self._reduce_name = (
            order,
            f"{name} gather",
            f"{name} reduce",
        )

    def mark_compute(self):
        return self.mark_current()

    def mark_current(self):
        return cast(torch.Event, Clock(self._order.clocks[self._order.current]))

    def compute_waits(self, event):
        self._wait(self._order.current, event)

    def gathering(self, after):
        self._wait(self._gather_name, after)
        return self._order.on(self._gather_name)

    def reducing(self):
        self._wait(self._reduce_name, self.mark_current())
        return self._order.on(self._reduce_name)

    def side_by_side(self, jobs):
        surrounding, before = self._order.current, self.mark_current()
        sides = [f"{surrounding}, side {number}" for number in range(1, len(jobs))]
        for job, side in zip(jobs[1:], sides, strict=True):
            self._wait(side, before)
            with self._order.on(side):
                job()
        for job in jobs[:1]:
            job()
        for side in sides:
            self._order.clocks[surrounding].wait(self._order.clocks[side])

    def join(self):
        for side in (self._gather_name, self._reduce_name):
            self._order.clocks[self._order.current].wait(self._order.clocks[side])

    def _wait(self, stream, event):
        if event is not None:
            self._order.clocks[stream].wait(cast(Clock, event))


class Watch(TorchDispatchMode):
    """Tells an Order which memory every operator reads and writes, as its schema says."""

    # As a mode of torch: under one of a program's own, blocks keep their activations.
    __module__ = "torch"

    def __init__(self, order):
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in schema.returns
        )
        if is_view or func.overloadpacket is torch.ops.aten.set_:
            return out
        reads = []
        writes = []
        for position, argument in enumerate(schema.arguments):
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(_tensors(value))
        results = [x for x in _tensors(out) if not any(x is written for written in writes)]
        if func.overloadpacket.__name__ in MAKING_MEMORY:
            reads = []  # of `empty_like` its argument only has the shape
        self._order.issue(reads, writes, results)
        return out


def _tensors(value):
    """Those that have memory."""
    return [
        x
        for x in tree_leaves(value)
        if isinstance(x, torch.Tensor) and x.numel() > 0 and not x.is_meta
    ]


@contextlib.contextmanager
def watching():
    """Simulated streams for whatever of the run is made inside, and the order of what runs
    there.
    """
    order, numbers, take = Order(), itertools.count(1), Host._take

    # pinned memory: no stream has used it before
    def take_on_host(host, num_bytes):
        with order.on(HOST):
            return take(host, num_bytes)

    def simulated(_: torch.device) -> SimulatedStreams:
        return SimulatedStreams(order, f"streams {next(numbers)}:")

    with contextlib.ExitStack() as stack:
        # as on a GPU, where reductions have a stream
        if world.is_initialized():
            ledger = world.current().service(Ledger)
            stack.enter_context(mock.patch.object(ledger, "is_immediate", False))
        for module in (engine, overlap, offload):
            stack.enter_context(mock.patch.object(module, "Streams", simulated))
        stack.enter_context(mock.patch.object(Host, "_take", take_on_host))
        stack.enter_context(Watch(order))
        yield order
    order.free()
