"""Where the full values of a storage are resident while they are needed: one class per ZeRO stage,
and the ring of buffers that ZeRO-3 storages of one size take turns in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from bmtrain.distributed.transport import ShardSource, Transport
from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.label import Label, Phase
from bmtrain.torch_internals import num_users

# Changes when a parameter is written in place on this rank.
Version = Callable[[], int]


class RingBuffer:
    """One full buffer. `owner` is the token of the storage whose values it holds; `free` is the
    event of its last reader.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._num_own = num_references(tensor)
        self.owner: object | None = None
        self.free: torch.Event | None = None
        self.held = False

    def part_from_readers(self) -> None:
        """Leave the memory to those who have kept views of the old values, and get other.

        A custom function may have kept a weight, a program may hold what a block returned, a graph
        made with create_graph=True holds what backward read: filling the buffer under them would
        change their values in silence. Which memory a buffer has is nobody's business on other
        ranks.
        """
        if num_references(self.tensor) > self._num_own:
            with torch.inference_mode(False):
                self.tensor = torch.empty_like(self.tensor)
            self.free, self._num_own = None, num_references(self.tensor)

    def alias(self) -> torch.Tensor:
        """The same memory as a tensor with a version counter of its own: refilling it is not an
        in-place change to autograd.
        """
        return alias(self.tensor)


def num_references(tensor: torch.Tensor) -> int:
    """Tensors, and what else, that share the memory of this one."""
    count: int = num_users(tensor.untyped_storage())
    return count


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory as the contiguous `tensor`, unknown to its version counter and
    graph.
    """
    out = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    out.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return out


class Ring:
    """Up to `capacity` buffers of one size, taken least-recently-released first among those nobody
    holds.

    When all are held (nested blocks, say), one more is made and dropped again when given back. A
    size that only one storage has ever had keeps no buffer between uses: it would hold memory that
    no other block can share.

    Storages join at the same places of the program on all ranks, but garbage is collected when each
    rank pleases. So a storage that is gone still counts: which buffers are kept, and with them what
    need not be gathered, must be the same everywhere.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, capacity: int) -> None:
        self.capacity = capacity
        self._num_joined = self._num_present = 0
        self._numel, self._dtype, self._device = numel, dtype, device
        self._buffers: list[RingBuffer] = []  # least recently released first

    @property
    def num_buffers(self) -> int:
        """Buffers allocated now."""
        return len(self._buffers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Their memory."""
        return [buffer.tensor for buffer in self._buffers]

    @property
    def num_kept(self) -> int:
        """Buffers that stay allocated when nobody holds them."""
        return min(self.capacity, self._num_joined) if self._num_joined > 1 else 0

    def join(self) -> None:
        """One more storage has this size."""
        self._num_joined += 1
        self._num_present += 1

    def leave(self) -> None:
        """One storage of this size is gone; the memory goes with the last, when nobody is left
        whose values it could hold.
        """
        self._num_present -= 1
        if self._num_present == 0:
            self._buffers = [buffer for buffer in self._buffers if buffer.held]

    def take(self, owner: object) -> RingBuffer:
        """A buffer for `owner` to fill once its `free` event has passed; held until given back."""
        free = [b for b in self._buffers if not b.held]
        if free and (len(self._buffers) >= self.num_kept):
            buffer = free[0]
        else:
            # memory that outlives this call must be usable in training too
            with torch.inference_mode(False):
                buffer = RingBuffer(
                    torch.empty(self._numel, dtype=self._dtype, device=self._device)
                )
            self._buffers.append(buffer)
        buffer.owner, buffer.held = owner, True
        buffer.part_from_readers()
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


class Residence(ABC):
    """Gathers one shard on demand.

    `acquire` and `release` come in pairs; several holders share one full buffer.
    """

    # : whether the full buffer stays from forward to backward; otherwise saved tensors must be
    # packed and gathered again
    survives_forward: bool = True
    #: whether only the ranks of one pipeline stage have it
    is_pipelined: bool = False
    #: what a gather is called in messages
    label: Label | None = None
    #: the version of the parameters that the last gather has taken; None where nothing is gathered
    version: int | None = None

    def rename(self, label: Label) -> None:
        """Be called this in messages."""
        self.label = label

    def place(self, phase: Phase) -> str:
        """What is gathered where, for messages: the same on all ranks."""
        return "" if self.label is None else self.label.places[phase]

    @abstractmethod
    def prefetch(self, phase: Phase) -> None:
        """Start the gather, if the values are not here."""

    def is_coming(self) -> bool:
        """Whether the values are here, or on their way."""
        return True

    @abstractmethod
    def acquire(self, phase: Phase) -> torch.Tensor:
        """The full buffer (layout.numel,), readable on the compute stream."""

    @abstractmethod
    def release(self, full: torch.Tensor) -> None:
        """The holder that was given `full` has issued its last read."""

    @abstractmethod
    def forget(self) -> None:
        """Parameters may change now: values that nobody holds are worth nothing.

        Called at the same places of the program on every rank. Whether to gather must never depend
        on what can differ between ranks: versions of parameters (a rank whose slice is empty sees
        no change), or which old graphs are still alive.
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
    """A block of another pipeline stage: nothing of it is here, and nothing may ask for it."""

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


class Kept(Residence):
    """ZeRO-2: a buffer of its own, kept from its gather until its last holder releases it."""

    def __init__(
        self, source: ShardSource, transport: Transport, axis: Axis, version: Version
    ) -> None:
        self._source, self._transport, self._axis, self._version = source, transport, axis, version
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
        self._transport.streams.compute_waits(self._ready)
        return full

    def release(self, full: torch.Tensor) -> None:
        if full is not self._full:
            return  # forgotten since
        self._num_holders -= 1
        if self._num_holders == 0:
            self._full = None

    def forget(self) -> None:
        # Holders keep the tensor itself; here it must not be found again. Nobody may have waited
        # for its gather yet.
        self._transport.streams.compute_waits(self._ready)
        self._full, self._num_holders = None, 0

    def _load(self, phase: Phase) -> torch.Tensor:
        if self._full is None:
            self._full, self.version = self._source.new_full(self._axis.size), self._version()
            self._ready = self._transport.gather(
                self._full, self._source, self._axis, None, self.place(phase)
            )
        return self._full


class Ringed(Residence):
    """ZeRO-3: a turn in a ring of buffers.

    After release the values stay until another storage takes the buffer.
    """

    survives_forward = False

    def __init__(
        self, source: ShardSource, transport: Transport, axis: Axis, version: Version, ring: Ring
    ) -> None:
        self._source, self._transport, self._axis, self._version, self._ring = (
            source,
            transport,
            axis,
            version,
            ring,
        )
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
            # Only backward may take back what forward left: between two forwards parameters change.
            buffer.held = True
            return
        self._buffer, self.version = self._ring.take(self), self._version()
        self._ready = self._transport.gather(
            self._buffer.tensor, self._source, self._axis, self._buffer.free, self.place(phase)
        )

    def acquire(self, phase: Phase) -> torch.Tensor:
        self.prefetch(phase)
        self._num_holders += 1
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
            # nobody else may have, and the memory may go
            self._transport.streams.compute_waits(self._ready)
            self._give_back()
            self._buffer = None

    def _own_buffer(self) -> RingBuffer | None:
        """The buffer, if it still holds this storage's values."""
        return self._buffer if self._buffer is not None and self._buffer.owner is self else None

    def _give_back(self) -> None:
        buffer = self._own_buffer()
        if buffer is not None and buffer.held:
            self._ring.give_back(buffer, self._transport.streams.mark_compute())
