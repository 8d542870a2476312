"""Sum of the ranks' parts, always in rank order: bitwise reproducible whatever arrives first."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import launching_on

BLOCK = 4096


def sum_parts(total: torch.Tensor, parts: torch.Tensor, *, accumulate: bool) -> None:
    """`total = (total if accumulate else 0) + parts[0] + parts[1] + ...`.

    Added in fp32 (fp64 if either is fp64) and rounded once.

    Args:
        total: (n,) of any floating dtype, written.
        parts: (ranks, n) of any floating dtype, contiguous.
        accumulate: whether to add the old `total`, as the last term.
    """
    if total.numel() == 0:
        return
    if total.device.type == "cpu" or torch.float64 in (total.dtype, parts.dtype):
        sum_parts_reference(total, parts, accumulate=accumulate)
    else:
        sum_parts_triton(total, parts, accumulate=accumulate)


def sum_parts_reference(total: torch.Tensor, parts: torch.Tensor, *, accumulate: bool) -> None:
    """`sum_parts` by the formula."""
    dtype = torch.float64 if torch.float64 in (total.dtype, parts.dtype) else torch.float32
    result = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        result += part
    total.copy_(result.add_(total) if accumulate else result)


def sum_parts_triton(total: torch.Tensor, parts: torch.Tensor, *, accumulate: bool) -> None:
    """`sum_parts` in one kernel that reads and writes each element once."""
    num_ranks, numel = parts.shape
    grid = (-(-numel // BLOCK),)
    with launching_on(total.device):
        _triton_kernel()[grid](
            total, parts, numel, ACCUMULATE=accumulate, NUM_RANKS=num_ranks, BLOCK=BLOCK
        )
    torch.autograd.graph.increment_version(total)


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.sum_parts_triton import sum_parts_kernel

    return sum_parts_kernel
