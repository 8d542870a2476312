"""Preallocated full buffers that storages of one size take turns in."""

from __future__ import annotations

import torch

from bmtrain.torch_internals import num_users


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
