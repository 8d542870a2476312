"""Inputs of blocks in pinned memory of the host between forward and backward, moved while the
device computes.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from bmtrain.distributed.transport import make_streams
from bmtrain.errors import RecomputationError
from bmtrain.recompute.memory import free_host_memory
from bmtrain.runtime.world import World
from bmtrain.torch_internals import sharing_versions


class Host:
    """Pinned buffers, reused from step to step, and the stream that copies. One per run, reached by
    `world.service(Host)`.

    A tensor leaves while the block that reads it runs, and its memory is free one block later.
    Backward meets the tensors in reverse: with each that it asks for, the one before starts on its
    way back.
    """

    def __init__(self, world: World) -> None:
        self.device, self._local_size = world.device, world.local_size
        self._streams = make_streams(world.device)
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._leaving: list[_Leaving] = []
        self._away: list[weakref.ref[Away]] = []
        self.num_bytes = 0

    def room(self) -> int:
        """Bytes that tensors may take on the host: those that are pinned, and this rank's part of
        half of what is free.
        """
        return self.num_bytes + free_host_memory() // (2 * self._local_size)

    def saving(self, inputs: Sequence[torch.Tensor], inner: object) -> saved_tensors_hooks:
        """Hooks under which autograd saves `inputs` on the host, and anything else as the hooks
        `inner` would.
        """
        return _Saving(
            _Moves(self, inputs, inner if isinstance(inner, saved_tensors_hooks) else None)
        )

    def mark(self) -> torch.Event | None:
        """An event after all work on the compute stream."""
        return self._streams.mark_compute()

    def settle(self) -> None:
        """Give up what has left: later work on the compute stream may overwrite it.

        Raises:
            RecomputationError: for a tensor that was overwritten on its way. What is on the host
                may be of before or after.
        """
        leaving, self._leaving = self._leaving, []
        for entry in leaving:
            self._streams.compute_waits(entry.left)
        for entry in leaving:
            if entry.tensor._version != entry.version and entry.away() is not None:
                raise RecomputationError(
                    f"the input of a block, of shape {tuple(entry.tensor.shape)}, was "
                    "changed in place before it had been kept for "
                    "backward: clone it first, or give the block use_checkpoint=True or False."
                )

    def seconds(self, x: torch.Tensor) -> float:
        """How long `x` takes one way, with nothing else to do."""
        buffer = self._take(x.nbytes)
        for _ in range(2):  # the first touches the memory
            start = time.perf_counter()
            buffer[: x.nbytes].view(x.dtype).copy_(x.detach().view(-1))
            taken = time.perf_counter() - start
        self.give_back(buffer)
        return taken

    def send(self, x: torch.Tensor, ready: torch.Event | None) -> Away:
        """Start the way of `x`, which is there after the event."""
        self.settle()
        # Autograd is saving: detached tensors would not share their version counters there.
        with sharing_versions():
            x = x.detach()
        num_bytes = x.nbytes
        buffer = self._take(num_bytes)
        with self._streams.gathering(ready), torch.no_grad():
            buffer[:num_bytes].view(x.dtype).copy_(x.view(-1), non_blocking=True)
            left = self._streams.mark_current()
        away = Away(self, buffer, num_bytes, x.dtype, self._previous())
        self._away.append(weakref.ref(away))
        self._leaving.append(_Leaving(x, x._version, left, self._away[-1]))
        return away

    def bring(self, away: Away) -> tuple[torch.Tensor, torch.Event | None]:
        """Start the way back: a flat tensor, readable after the event."""
        self.settle()
        with torch.inference_mode(False):
            # Made on the compute stream: what it used the memory for before comes first.
            x = torch.empty(away.num_bytes, dtype=torch.uint8, device=self.device).view(away.dtype)
        with self._streams.gathering(self._streams.mark_compute()), torch.no_grad():
            x.copy_(away.buffer[: away.num_bytes].view(away.dtype), non_blocking=True)
            return x, self._streams.mark_current()

    def receive(self, event: torch.Event | None) -> None:
        """Compute waits for what is on its way back."""
        self._streams.compute_waits(event)

    def _previous(self) -> Away | None:
        while self._away:
            away = self._away[-1]()
            if away is not None:
                return away
            self._away.pop()
        return None

    def _take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of at least so many bytes.

        There are few sizes: inputs of ever other lengths use the same buffers again.
        """
        step = 2 ** max(num_bytes.bit_length() - 4, 0)
        num_bytes = -(-num_bytes // step) * step
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        self.num_bytes += num_bytes
        return torch.empty(
            num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type != "cpu"
        )

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody needs what is in the buffer.

        Its next use comes after its last on the same stream.
        """
        self._free[buffer.numel()].append(buffer)


@dataclasses.dataclass(frozen=True)
class _Leaving:
    """A tensor on its way to the host, complete there after `left`, the version in which it set
    out, and what waits for it.
    """

    tensor: torch.Tensor
    version: int
    left: torch.Event | None
    away: weakref.ref[Away]


class Away:
    """One tensor on the host. Goes with the graph that saved it."""

    def __init__(
        self,
        host: Host,
        buffer: torch.Tensor,
        num_bytes: int,
        dtype: torch.dtype,
        previous: Away | None,
    ) -> None:
        self._host, self.buffer, self.num_bytes, self.dtype = host, buffer, num_bytes, dtype
        self._previous = None if previous is None else weakref.ref(previous)
        self._coming: tuple[torch.Tensor, torch.Event | None] | None = None
        self._here: weakref.ref[torch.Tensor] | None = None

    def fetch(self) -> torch.Tensor:
        """The tensor (numel,) on the device; the one that left before it starts back."""
        here = None if self._here is None else self._here()
        if here is not None:
            return here
        self.start()
        x, arrived = self._coming or self._host.bring(self)
        self._coming = None
        self._host.receive(arrived)
        self._here = weakref.ref(x)
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.start()
        return x

    def start(self) -> None:
        """Start the way back, unless it has begun."""
        if self._coming is None and (self._here is None or self._here() is None):
            self._coming = self._host.bring(self)

    def __del__(self) -> None:
        # nobody has waited for the copy, and its memory goes back to the compute stream
        if self._coming is not None:
            self._host.receive(self._coming[1])
        self._host.give_back(self.buffer)


class _Saving(saved_tensors_hooks):
    """For the body of one call of a block."""

    def __init__(self, moves: _Moves) -> None:
        super().__init__(moves.pack, moves.unpack)
        self._moves = moves

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._moves.close()


class _Moves:
    """What hooks do. They live as long as the graph: once the forward pass is over, they must not
    keep the inputs alive.
    """

    def __init__(
        self, host: Host, inputs: Sequence[torch.Tensor], inner: saved_tensors_hooks | None
    ) -> None:
        self._host, self._inner, self._ready = host, inner, host.mark()
        self._movable = {x.untyped_storage().data_ptr(): x for x in inputs if is_movable(x)}
        self._away: dict[int, Away] = {}

    def close(self) -> None:
        """Everything has been saved."""
        self._movable.clear()
        self._away.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        """What is saved in place of `tensor`."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._movable:
            return tensor if self._inner is None else self._inner.pack_hook(tensor)
        if address not in self._away:
            self._away[address] = self._host.send(self._movable[address], self._ready)
        return Saved(
            self._away[address], tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(self, saved: Any) -> Any:
        """The tensor again."""
        if isinstance(saved, Saved):
            return saved.away.fetch().as_strided(saved.size, saved.stride, saved.offset)
        return saved if self._inner is None else self._inner.unpack_hook(saved)


class Saved:
    """A view of a tensor that is away."""

    def __init__(self, away: Away, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self.away, self.size, self.stride, self.offset = away, size, stride, offset


def is_movable(x: torch.Tensor) -> bool:
    """Whether moving `x` frees memory: an activation that fills its storage."""
    fills = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x.requires_grad and not x.is_leaf and fills and x.numel() > 0
