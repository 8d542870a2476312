"""Moves inputs of blocks to pinned host memory between forward and backward, beside compute."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from bmtrain.distributed.transport import Streams
from bmtrain.errors import RecomputationError
from bmtrain.recompute.memory import free_host_memory
from bmtrain.runtime.world import World
from bmtrain.shard.unshard import Unpack
from bmtrain.torch_internals import sharing_versions


class Host:
    """The pool of pinned buffers and the stream that copies. One per run: `world.service(Host)`.

    The copy of a tensor to the host overlaps the block that reads it, and its device memory is free
    one block later. Backward unpacks in reverse: each unpack prefetches the tensor that was sent
    before it.
    """

    def __init__(self, world: World) -> None:
        self.device, self._local_size = world.device, world.local_size
        self.streams = Streams(world.device)
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._leaving: list[_Leaving] = []
        self._away: list[weakref.ref[Away]] = []
        self.num_bytes = 0

    def room(self) -> int:
        """Bytes that tensors may take: the pool, and this rank's share of half of what is free."""
        return self.num_bytes + free_host_memory() // (2 * self._local_size)

    @contextlib.contextmanager
    def keeping(
        self, inputs: Sequence[torch.Tensor], keep: Callable[[torch.Tensor], Unpack]
    ) -> Iterator[Callable[[torch.Tensor], Unpack]]:
        """Gives a function that keeps `inputs` on the host, and others by `keep`. After the body it
        is `keep`.
        """
        # The event precedes the block's own kernels: the copies need not wait for those.
        ready = self.streams.mark_compute()
        movable = {x.untyped_storage().data_ptr(): x for x in inputs if is_movable(x)}
        sent: dict[int, Away] = {}

        def keep_input(tensor: torch.Tensor) -> Unpack:
            address = tensor.untyped_storage().data_ptr()
            if address not in movable:
                return keep(tensor)
            if address not in sent:
                sent[address] = self.send(movable[address], ready)
            place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return functools.partial(_fetched, sent[address], *place)

        try:
            yield keep_input
        finally:  # the references would keep inputs on the device
            movable.clear()
            sent.clear()

    def settle(self) -> None:
        """Release the tensors whose copies to the host have been issued.

        Raises:
            RecomputationError: for a tensor that was changed in place during its copy: the host may
                have old or new values.
        """
        leaving, self._leaving = self._leaving, []
        # Compute waits for the copies: without it, later kernels can reuse the memory of a tensor
        # while its copy still reads it.
        for entry in leaving:
            self.streams.compute_waits(entry.left)
        for entry in leaving:
            if entry.tensor._version != entry.version and entry.away() is not None:
                raise RecomputationError(
                    f"the input of a block, of shape {tuple(entry.tensor.shape)}, was "
                    "changed in place before it had been kept for "
                    "backward: clone it first, or give the block use_checkpoint=True or False."
                )

    def seconds(self, x: torch.Tensor) -> float:
        """Seconds that a copy of `x` to the host takes on an idle device."""
        buffer = self._take(x.nbytes)
        for _ in range(2):  # the first run touches the pages of a new buffer
            start = time.perf_counter()
            buffer[: x.nbytes].view(x.dtype).copy_(x.detach().view(-1))
            taken = time.perf_counter() - start
        self.give_back(buffer)
        return taken

    def send(self, x: torch.Tensor, ready: torch.Event | None) -> Away:
        """Start the copy of `x` to the host; its values are complete after `ready`."""
        self.settle()
        # Hooks run below autograd, where `detach` gives a new version counter. `settle` compares
        # the shared one: without it, in-place changes during the copy go unnoticed.
        with sharing_versions():
            x = x.detach()
        num_bytes = x.nbytes
        buffer = self._take(num_bytes)
        with self.streams.gathering(ready), torch.no_grad():
            buffer[:num_bytes].view(x.dtype).copy_(x.view(-1), non_blocking=True)
            left = self.streams.mark_current()
        away = Away(self, buffer, num_bytes, x.dtype, self._previous())
        self._away.append(weakref.ref(away))
        self._leaving.append(_Leaving(x, x._version, left, self._away[-1]))
        return away

    def bring(self, away: Away) -> tuple[torch.Tensor, torch.Event | None]:
        """Start the copy back. Returns a flat tensor, and the event after which it can be read."""
        self.settle()
        with torch.inference_mode(False):
            # Allocated on the compute stream, whose earlier kernels may still use this memory: the
            # copy below waits for them, or it would overwrite what they read.
            x = torch.empty(away.num_bytes, dtype=torch.uint8, device=self.device).view(away.dtype)
        with self.streams.gathering(self.streams.mark_compute()), torch.no_grad():
            x.copy_(away.buffer[: away.num_bytes].view(away.dtype), non_blocking=True)
            return x, self.streams.mark_current()

    def receive(self, event: torch.Event | None) -> None:
        """Make the compute stream wait for a copy back."""
        self.streams.compute_waits(event)

    def _previous(self) -> Away | None:
        while self._away:
            away = self._away[-1]()
            if away is not None:
                return away
            self._away.pop()
        return None

    def _take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of at least `num_bytes`.

        Rounds up to one of eight sizes per power of two, so that inputs of varying length share
        buffers.
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
        """Return a buffer to the pool.

        All copies run on one stream, so the next use of the buffer follows the last one.
        """
        self._free[buffer.numel()].append(buffer)


@dataclasses.dataclass(frozen=True)
class _Leaving:
    """A copy to the host in flight, done after `left`.

    Keeps `tensor` alive until `settle`: freed earlier, its memory could be reused while the copy
    reads it. `version` is that of the tensor at the start of the copy; `away` is dead if the graph
    that needs the copy is gone.
    """

    tensor: torch.Tensor
    version: int
    left: torch.Event | None
    away: weakref.ref[Away]


class Away:
    """One tensor on the host. Dies with the graph that saved it."""

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
        """The tensor (numel,) on the device. Prefetches the one that was sent before it."""
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
        """Start the copy back, unless it has started."""
        if self._coming is None and (self._here is None or self._here() is None):
            self._coming = self._host.bring(self)

    def __del__(self) -> None:
        # A prefetch that was never fetched may still be in flight. Its memory returns to the
        # compute stream: without the wait, the copy would overwrite the next tensor there.
        if self._coming is not None:
            self._host.receive(self._coming[1])
        self._host.give_back(self.buffer)


def _fetched(away: Away, size: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A view of a tensor that is on the host."""
    return away.fetch().as_strided(size, stride, offset)


def is_movable(x: torch.Tensor) -> bool:
    """Whether offloading `x` frees memory: it is an activation that fills its storage."""
    fills = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x.requires_grad and not x.is_leaf and fills and x.numel() > 0
