"""Where the full values of a storage are while somebody needs them: one class per ZeRO stage."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from bmtrain.shard.ring import Ring, RingBuffer, alias
from bmtrain.shard.schedule import Phase
from bmtrain.shard.transport import Transport


class Residence(ABC):
    """Gathers one shard on demand. `acquire` and `release` come in pairs; several holders share one full buffer."""

    #: whether the full buffer stays from forward to backward; otherwise saved tensors must be packed and gathered again
    survives_forward: bool = True

    @abstractmethod
    def prefetch(self, phase: Phase) -> None:
        """Start the gather, if the values are not here."""

    @abstractmethod
    def acquire(self, phase: Phase) -> torch.Tensor:
        """The full buffer (layout.numel,), readable on the compute stream."""

    @abstractmethod
    def release(self) -> None:
        """One holder has issued its last read."""

    @abstractmethod
    def forget_prefetched(self) -> None:
        """Drop values that were gathered ahead and not used: the parameters may change now."""


class Alias(Residence):
    """One rank: the shard is the full buffer."""

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard

    def prefetch(self, phase: Phase) -> None:
        return None

    def acquire(self, phase: Phase) -> torch.Tensor:
        return alias(self._shard)

    def release(self) -> None:
        return None

    def forget_prefetched(self) -> None:
        return None


class Kept(Residence):
    """ZeRO-2: a buffer of its own, alive as long as any holder, usually the autograd graph, refers to it."""

    def __init__(self, shard: torch.Tensor, transport: Transport, version: Callable[[], int]) -> None:
        self._shard, self._transport, self._version = shard, transport, version
        self._current: weakref.ref[torch.Tensor] | None = None
        self._ahead: torch.Tensor | None = None  # a prefetched buffer has no holder yet
        self._ready: torch.Event | None = None
        self._loaded = -1

    def prefetch(self, phase: Phase) -> None:
        if self._resident() is None:
            self._ahead = self._gather()

    def acquire(self, phase: Phase) -> torch.Tensor:
        full = self._resident()
        if full is None:
            full = self._gather()
        self._ahead = None
        self._transport.streams.compute_waits(self._ready)
        return full

    def release(self) -> None:
        return None  # the last reference frees it

    def forget_prefetched(self) -> None:
        if self._ahead is not None:
            self._transport.streams.compute_waits(self._ready)  # its memory must not be reused while it is being filled
            self._ahead = None

    def _resident(self) -> torch.Tensor | None:
        full = self._current() if self._current is not None else None
        return full if self._loaded == self._version() else None

    def _gather(self) -> torch.Tensor:
        with torch.inference_mode(False):
            full = self._shard.new_empty(self._shard.numel() * self._transport.axis.size)
        self._ready = self._transport.gather(full, self._shard, None)
        self._current, self._loaded = weakref.ref(full), self._version()
        return full


class Ringed(Residence):
    """ZeRO-3: a turn in a ring of buffers. After release the values stay until another storage takes the buffer."""

    survives_forward = False

    def __init__(self, shard: torch.Tensor, transport: Transport, version: Callable[[], int], ring: Ring) -> None:
        self._shard, self._transport, self._version, self._ring = shard, transport, version, ring
        self._buffer: RingBuffer | None = None
        self._ready: torch.Event | None = None
        self._loaded = -1
        self._num_holders = 0
        ring.num_members += 1
        weakref.finalize(self, _leave, ring)

    def prefetch(self, phase: Phase) -> None:
        if self._num_holders:
            return
        buffer = self._buffer if self._buffer is not None and self._buffer.owner is self else None
        fresh = buffer is not None and self._loaded == self._version()
        if fresh and buffer is not None and (buffer.held or phase is Phase.BACKWARD):
            # Only backward may take back what forward left: between two forwards, values can change unseen through `.data`.
            buffer.held = True
            return
        if buffer is not None and buffer.held:
            self._ring.give_back(buffer, self._transport.streams.mark_compute())
        self._buffer = self._ring.take(self)
        self._ready = self._transport.gather(self._buffer.tensor, self._shard, self._buffer.free)
        self._loaded = self._version()

    def acquire(self, phase: Phase) -> torch.Tensor:
        if self._num_holders == 0 or self._buffer is None:
            self.prefetch(phase)
        self._num_holders += 1
        self._transport.streams.compute_waits(self._ready)
        if self._buffer is None:
            raise RuntimeError("a gather left no buffer")
        return self._buffer.alias()

    def release(self) -> None:
        self._num_holders = max(self._num_holders - 1, 0)
        if self._num_holders == 0 and self._buffer is not None and self._buffer.owner is self and self._buffer.held:
            self._ring.give_back(self._buffer, self._transport.streams.mark_compute())

    def forget_prefetched(self) -> None:
        if self._num_holders == 0:
            self.release()
            self._loaded = -1


def _leave(ring: Ring) -> None:
    ring.num_members -= 1
