"""Host memory that a GPU copies into and from by itself."""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch


def zeros(
    numel: int, dtype: torch.dtype, device: torch.device, beside: torch.device
) -> torch.Tensor:
    """Zeros (numel,) on `device`; those in host memory can be copied to and from `beside`."""
    if device.type == "cpu":
        return host_zeros(numel, dtype, beside)
    return torch.zeros(numel, dtype=dtype, device=device)


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


def _unpin(address: int) -> None:
    """Unregister pinned memory, after the copies of the last step, which may still use it."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
