"""Memory of states outside of a GPU: host memory that it copies by itself, and files."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import torch

# Makes zeros (numel,) of a dtype.
Make = Callable[[int, torch.dtype], torch.Tensor]


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros (numel,) in memory that `device` copies into and from, page-locked if it is a GPU.

    torch's own pinned allocations are rounded up to powers of two, which would waste up to half.
    """
    if device.type == "cpu" or numel == 0:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    # Pages of its own: one that two buffers share could be locked for the first of them only.
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
        pages.madvise(mmap.MADV_HUGEPAGE)
    # Written before they are locked: the driver would fetch page after page, at 2.6 GB/s.
    buffer = torch.frombuffer(pages, dtype=dtype).zero_()
    address = buffer.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, 0)) == 0:
        weakref.finalize(buffer, _unpin, address)
    return buffer


def file_zeros(numel: int, dtype: torch.dtype, folder: str) -> torch.Tensor:
    """Zeros (numel,) in a file without a name, which goes with the process.

    Raises:
        OSError: if the folder cannot be written to, or has no room.
    """
    if numel == 0:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    with tempfile.TemporaryFile(dir=folder) as file:
        # All of it now: of a disk that is full later, a write to the pages would know by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
        pages = mmap.mmap(file.fileno(), numel * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype)


def _unpin(address: int) -> None:
    """Unregister pinned memory, after the copies of the last step, which may still use it."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
