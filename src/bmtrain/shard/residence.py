"""Where the full values of a storage are resident: one class per ZeRO stage, and ZeRO-3's ring."""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from bmtrain.distributed.transport import Gather, ShardSource, Transport
from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.label import Label, Phase
from bmtrain.torch_internals import num_users, version_of

# Returns a number that changes when a parameter is written in place on this rank.
Version = Callable[[], int]


class RingBuffer:
    """One full buffer of a ring.

    Attributes:
        owner: token of the storage whose values it holds; None when it holds none.
        free: event after the last read; None for new memory.
        held: whether a gather fills it or a holder reads it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self.owner: object | None = None
        self.held = False
        self._allocate(numel)

    def _allocate(self, numel: int) -> None:
        # The buffer outlives this call: an inference tensor could not be used in training.
        with torch.inference_mode(False):
            self.tensor = torch.empty(numel, dtype=self._dtype, device=self._device)
        self._num_own = num_references(self.tensor)
        # An old event says nothing about new memory: without None, the gather could fill it while
        # kernels that used it before still run.
        self.free: torch.Event | None = None

    @property
    def has_memory(self) -> bool:
        """False from `let_go` on."""
        return self.tensor.numel() == self._numel

    def let_go(self) -> None:
        """Free the memory. The buffer stays in the ring, and its owner with it."""
        self._allocate(0)

    def prepare(self) -> None:
        """Before a refill: replace the memory if there is none, or if others refer to it.

        A custom function may have kept a weight, a program may hold what a block returned, a graph
        made with create_graph=True holds what backward read: filling the buffer again would change
        their values in silence. The replacement is invisible to other ranks: it changes no
        collective.
        """
        if not self.has_memory or num_references(self.tensor) > self._num_own:
            self._allocate(self._numel)

    def alias(self) -> torch.Tensor:
        """The same memory with its own version counter: to autograd a refill changes nothing."""
        return alias(self.tensor)


def num_references(tensor: torch.Tensor) -> int:
    """Tensors and other objects that share the memory of this one."""
    count: int = num_users(tensor.untyped_storage())
    return count


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of the contiguous `tensor`, apart from its version and graph."""
    out = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    out.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return out


class Ring:
    """Up to `capacity` buffers of one size, reused least recently released first.

    When all are held, by nested blocks for example, `take` allocates one more, and `give_back`
    drops it. A size that only one storage has ever had keeps no buffer between uses: no other block
    could use the memory.

    Storages join at the same places of the program on all ranks, but Python collects garbage at
    different times on each. A storage that is gone therefore still counts: which buffers are kept,
    and so which gathers are skipped, must be the same on all ranks, or they hang.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, capacity: int) -> None:
        self.capacity = capacity
        self._num_joined = self._num_present = 0
        self._numel, self._dtype, self._device = numel, dtype, device
        self._buffers: list[RingBuffer] = []  # least recently released first

    @property
    def num_buffers(self) -> int:
        """Buffers allocated now."""
        return len(self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory of the buffers."""
        return [buffer.tensor for buffer in self._buffers if buffer.has_memory]

    @property
    def num_kept(self) -> int:
        """Buffers that stay allocated while they are not held."""
        return min(self.capacity, self._num_joined) if self._num_joined > 1 else 0

    def join(self) -> None:
        """A storage of this size was made."""
        self._num_joined += 1
        self._num_present += 1

    def leave(self) -> None:
        """A storage of this size is gone; with the last, the memory that is not held is freed.

        The buffers stay in the ring: residences of storages that are gone still take their turns,
        and which buffer is whose must be the same on all ranks.
        """
        self._num_present -= 1
        if self._num_present == 0:
            for buffer in self._buffers:
                if not buffer.held:
                    buffer.let_go()

    def take(self, owner: object) -> RingBuffer:
        """A buffer for `owner`, to be filled after its `free` event; held until given back."""
        free = [b for b in self._buffers if not b.held]
        if free and (len(self._buffers) >= self.num_kept):
            buffer = free[0]
        else:
            buffer = RingBuffer(self._numel, self._dtype, self._device)
            self._buffers.append(buffer)
        buffer.owner, buffer.held = owner, True
        buffer.prepare()
        return buffer

    def give_back(self, buffer: RingBuffer, last_read: torch.Event | None) -> None:
        """The holder has issued its last read, before the event `last_read`.

        The values stay until the buffer is taken again.
        """
        buffer.held, buffer.free = False, last_read
        self._buffers.remove(buffer)
        if len(self._buffers) < self.num_kept:
            self._buffers.append(buffer)
        else:
            buffer.owner = None


def _nothing() -> None:
    """No update is ever under way."""


class Residence(ABC):
    """Gathers one shard on demand.

    Every `acquire` is matched by a `release`; several holders share one full buffer.
    """

    #: whether the full buffer stays from forward to backward; if not, saved views are packed and
    #: looked up after another gather
    survives_forward: bool = True
    #: whether only the ranks of one pipeline stage have the storage
    is_pipelined: bool = False
    #: what the storage is called in messages
    label: Label | None = None
    #: version of the parameters when the last gather was started; None where nothing is gathered
    version: int | None = None
    #: place in the last pass that gathered it
    turn: int = 0
    #: whether an update may still be under way: prefetching would make the host wait too early. The
    #: same on all ranks, whichever of them has waited already.
    is_late: bool = False
    #: waits for updates that are under way
    settle: Callable[[], None] = staticmethod(_nothing)

    def rename(self, label: Label) -> None:
        """Set the name in messages."""
        self.label = label

    def place(self, phase: Phase) -> str:
        """What is gathered where, for messages: the same on all ranks."""
        return "" if self.label is None else self.label.places[phase]

    @abstractmethod
    def prefetch(self, phase: Phase) -> None:
        """Start the gather, unless the values are resident or in flight."""

    def is_coming(self) -> bool:
        """Whether the values are resident or in flight."""
        return True

    @abstractmethod
    def acquire(self, phase: Phase) -> torch.Tensor:
        """The full buffer (layout.numel,), readable on the compute stream."""

    @abstractmethod
    def release(self, full: torch.Tensor) -> None:
        """The holder of `full` has issued its last read."""

    def fixed(self) -> Residence:
        """One of the same values whose full buffer never moves: a CUDA graph reads its address."""
        return self

    @abstractmethod
    def forget(self) -> None:
        """Parameters may change now: drop values that have no holder.

        Called at the same places of the program on every rank. Whether to gather must never depend
        on what can differ between ranks: versions of parameters (a rank whose slice is empty sees
        no change), or which old graphs are still alive. Ranks that decide differently hang.
        """


class Alias(Residence):
    """One rank: the shard is the full buffer."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source

    def prefetch(self, phase: Phase) -> None:
        return None

    def acquire(self, phase: Phase) -> torch.Tensor:
        return alias(self._source.get())

    def release(self, full: torch.Tensor) -> None:
        return None

    def forget(self) -> None:
        return None


class Absent(Residence):
    """A block of another pipeline stage: this rank has no values and takes part in no gather."""

    def prefetch(self, phase: Phase) -> None:
        raise RuntimeError("a block of another pipeline stage was scheduled here")

    def acquire(self, phase: Phase) -> torch.Tensor:
        raise ParameterError(
            "this parameter belongs to another stage of the pipeline and has no values "
            "on this rank: use it through the "
            "PipelineTransformerBlockList, or read it with bmtrain.save, state_dict() "
            "or bmtrain.inspect."
        )

    def release(self, full: torch.Tensor) -> None:
        return None

    def forget(self) -> None:
        return None


class Gathered(Residence):
    """Several ranks: what `Kept` and `Ringed` have in common."""

    def __init__(
        self, source: ShardSource, transport: Transport, axis: Axis, version: Version
    ) -> None:
        self._source, self._transport, self._axis, self._version = source, transport, axis, version
        # Weak: the memory lives as long as the graphs that read it.
        self._fixed: weakref.ref[Fixed] | None = None

    def fixed(self) -> Residence:
        found = None if self._fixed is None else self._fixed()
        if found is None:
            found = Fixed(self._source, self._transport, self._axis, self._version)
            found.label = self.label
            self._fixed = weakref.ref(found)
        return found


class Values(enum.Enum):
    """What a fixed buffer holds.

    A gather makes NONE and PAST to CURRENT; `forget` makes CURRENT to PAST, and `keep` takes that
    back; `lose` ends with NONE.
    """

    NONE = enum.auto()
    #: those of the last gather, since which shards may have been written
    PAST = enum.auto()
    CURRENT = enum.auto()


class Fixed(Residence):
    """A buffer whose address never changes, gathered once between two calls of `forget`.

    It stays allocated for as long as this object lives. Each gather waits for all that was issued
    on the compute stream before it: holders need not say when they have read the buffer.
    """

    def __init__(
        self, source: ShardSource, transport: Transport, axis: Axis, version: Version
    ) -> None:
        self._source, self._transport, self._axis, self._version = source, transport, axis, version
        self._full: torch.Tensor | None = None
        # What holders of the last gather's values get, and its version, which counts what they
        # write.
        self._shown: torch.Tensor | None = None
        self._shown_version = 0
        self._ready: torch.Event | None = None
        self._values = Values.NONE

    @property
    def has_memory(self) -> bool:
        """False until the first gather."""
        return self._full is not None

    def is_coming(self) -> bool:
        return self._values is Values.CURRENT

    def prefetch(self, phase: Phase) -> None:
        if self._values is not Values.CURRENT:
            self.arrives(self._transport.gather_together([self.missing(phase)], None))

    def missing(self, phase: Phase) -> Gather:
        """The gather that brings the values; `arrives` says that it was started."""
        if self._full is None:
            self._full = self._source.new_full(self._axis.size)
        self._values, self.version = Values.NONE, self._version()
        return Gather(self._full, self._source, self._axis, self.place(phase))

    def arrives(self, ready: torch.Event | None) -> None:
        """The values are there after `ready`."""
        if self._full is None:
            raise RuntimeError("a gather left no buffer")
        with torch.inference_mode(False):  # which counts no writes
            self._shown = alias(self._full)
        self._shown_version = version_of(self._shown)
        self._ready, self._values = ready, Values.CURRENT

    def acquire(self, phase: Phase) -> torch.Tensor:
        self.prefetch(phase)
        # Without this wait, the module would read the buffer before the gather has filled it.
        self._transport.streams.compute_waits(self._ready)
        if self._shown is None:
            raise RuntimeError("a gather left no buffer")
        return self._shown

    def release(self, full: torch.Tensor) -> None:
        return None

    def forget(self) -> None:
        # Nobody may have waited for the gather: without this wait, what follows on the compute
        # stream could write the shard while a peer still copies from it.
        self._transport.streams.compute_waits(self._ready)
        if self._values is Values.CURRENT:
            self._values = Values.PAST

    def differs(self) -> torch.Tensor:
        """Whether this rank's part of the buffer is other than its shard; bool (), on the device.

        The bits are compared: versions do not count what is written past torch, by replays of
        graphs for example. True where there are no values. If it is False on all ranks, the whole
        buffer is on each what another gather would make it.
        """
        shard, shown = self._source.get(), self._shown
        is_intact = shown is not None and version_of(shown) == self._shown_version
        if self._full is None or self._values is Values.NONE or not is_intact:
            return torch.ones((), dtype=torch.bool, device=shard.device)
        own = self._full.chunk(self._axis.size)[self._axis.index]
        return (own.view(torch.int64) != shard.view(torch.int64)).any()

    def keep(self) -> None:
        """After `forget`: the values of the last gather are right. All ranks say so, or none."""
        if self._values is not Values.PAST:
            raise RuntimeError("there are no values of an earlier gather")
        self._values, self.version = Values.CURRENT, self._version()

    def lose(self) -> None:
        """Somebody may have written the buffer: the next gather must come."""
        self._values = Values.NONE


class Kept(Gathered):
    """ZeRO-2: a buffer of its own, kept from its gather until its last holder releases it."""

    def __init__(
        self, source: ShardSource, transport: Transport, axis: Axis, version: Version
    ) -> None:
        super().__init__(source, transport, axis, version)
        self._full: torch.Tensor | None = None
        self._ready: torch.Event | None = None
        self._num_holders = 0

    def is_coming(self) -> bool:
        return self._full is not None

    def prefetch(self, phase: Phase) -> None:
        self._load(phase)

    def acquire(self, phase: Phase) -> torch.Tensor:
        full = self._load(phase)
        self._num_holders += 1
        # Without this wait, the module would read the buffer before the gather has filled it.
        self._transport.streams.compute_waits(self._ready)
        return full

    def release(self, full: torch.Tensor) -> None:
        if full is not self._full:
            return  # a holder from before `forget`
        self._num_holders -= 1
        if self._num_holders == 0:
            self._full = None  # back to the allocator, behind the last read on the compute stream

    def forget(self) -> None:
        # Holders keep the tensor itself; the next `acquire` must gather anew. A prefetched buffer
        # may have no holder at all: without this wait, the allocator could hand its memory to
        # compute kernels while the gather still writes it.
        self._transport.streams.compute_waits(self._ready)
        self._full, self._num_holders = None, 0

    def _load(self, phase: Phase) -> torch.Tensor:
        if self._full is None:
            self._full, self.version = self._source.new_full(self._axis.size), self._version()
            self._ready = self._transport.gather(
                self._full, self._source, self._axis, None, self.place(phase)
            )
        return self._full


class Ringed(Gathered):
    """ZeRO-3: a turn in a ring of buffers.

    After release, the values stay until another storage takes the buffer.
    """

    survives_forward = False

    def __init__(
        self, source: ShardSource, transport: Transport, axis: Axis, version: Version, ring: Ring
    ) -> None:
        super().__init__(source, transport, axis, version)
        self._ring = ring
        self._buffer: RingBuffer | None = None
        self._ready: torch.Event | None = None
        self._num_holders = 0
        ring.join()
        source.when_gone(ring.leave)

    def is_coming(self) -> bool:
        buffer = self._own_buffer()
        return self._num_holders > 0 or (buffer is not None and buffer.held)

    def prefetch(self, phase: Phase) -> None:
        if self._num_holders:
            return
        buffer = self._own_buffer()
        if buffer is not None and (buffer.held or phase is Phase.BACKWARD):
            # Only backward may reuse what forward has left: between two forward passes parameters
            # change.
            buffer.held = True
            return
        self._buffer, self.version = self._ring.take(self), self._version()
        self._ready = self._transport.gather(
            self._buffer.tensor, self._source, self._axis, self._buffer.free, self.place(phase)
        )

    def acquire(self, phase: Phase) -> torch.Tensor:
        self.prefetch(phase)
        self._num_holders += 1
        # Without this wait, the module would read the buffer before the gather has filled it.
        self._transport.streams.compute_waits(self._ready)
        if self._buffer is None:
            raise RuntimeError("a gather left no buffer")
        return self._buffer.alias()

    def release(self, full: torch.Tensor) -> None:
        self._num_holders -= 1
        if self._num_holders == 0:
            self._give_back()

    def forget(self) -> None:
        if self._num_holders == 0:
            # A prefetched buffer may have had no reader, so that nothing has waited for its gather:
            # without this wait, the ring or the allocator could reuse its memory while the gather
            # still writes it.
            self._transport.streams.compute_waits(self._ready)
            self._give_back()
            self._buffer = None

    def _own_buffer(self) -> RingBuffer | None:
        """The buffer, if it still holds this storage's values."""
        return self._buffer if self._buffer is not None and self._buffer.owner is self else None

    def _give_back(self) -> None:
        buffer = self._own_buffer()
        if buffer is not None and buffer.held:
            # The next gather into this buffer waits for this event: without it, the gather would
            # overwrite values that kernels on the compute stream still read.
            self._ring.give_back(buffer, self._transport.streams.mark_compute())
            # Without this, what the ring has dropped would live on here: after a generation, which
            # holds all layers at once, the whole model.
            self._buffer = self._own_buffer()
