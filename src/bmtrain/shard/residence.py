"""Where the full values of a storage are while somebody needs them: one class per ZeRO stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.label import Label
from bmtrain.shard.ring import Ring, RingBuffer, alias
from bmtrain.shard.schedule import Phase
from bmtrain.shard.transport import Source, Transport

# Changes when a parameter is written in place on this rank.
Version = Callable[[], int]


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

    def __init__(self, source: Source) -> None:
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

    def __init__(self, source: Source, transport: Transport, axis: Axis, version: Version) -> None:
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
        self, source: Source, transport: Transport, axis: Axis, version: Version, ring: Ring
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
