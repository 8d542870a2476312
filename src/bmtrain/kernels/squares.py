"""Sum of squares of many tensors: gradient norm and finiteness check in a single number."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import Batch, launching_on

BLOCK, NUM_WARPS = 2048, 8
# Programs per launch. The same on every device: each program then sums the same chunks in the same
# order, which gives the same bits.
NUM_PROGRAMS = 2048


def sum_of_squares(tensors: Batch, device: torch.device) -> torch.Tensor:
    """The sum of squares of all elements: 0-dim fp64 on `device`, without synchronising with it.

    Finite if and only if all elements are, since squares that overflow fp32 do not overflow fp64;
    only those of fp64 elements above 1e154 do. Squares that underflow fp32 count as zero. The
    result is bitwise reproducible.

    Args:
        tensors: rows of one tensor of any floating dtype, strides and device; elements of fp64
            tensors are squared in fp64.
    """
    fast, slow = tensors.by_path
    if not fast.rows:
        return sum_of_squares_reference(slow, device)
    total = sum_of_squares_triton(fast, device)
    return total.add_(sum_of_squares_reference(slow, device)) if slow.rows else total


def sum_of_squares_reference(tensors: Batch, device: torch.device) -> torch.Tensor:
    """`sum_of_squares` by the formula."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (tensor,) in tensors.rows:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square().to(device)
    return total


def sum_of_squares_triton(tensors: Batch, device: torch.device) -> torch.Tensor:
    """`sum_of_squares` for contiguous tensors on `device`: one kernel per dtype, then one sum."""
    from bmtrain.kernels.chunks_triton import DTYPES

    launches = tensors.tables(BLOCK)
    found = torch.empty(len(launches), NUM_PROGRAMS, dtype=torch.float64, device=device)
    with launching_on(device):
        for ((dtype,), chunks), partial in zip(launches, found, strict=True):
            _triton_kernel()[(NUM_PROGRAMS,)](
                chunks.rows,
                chunks.row_of,
                partial,
                chunks.count,
                DTYPE=DTYPES[dtype],
                IS_ALIGNED=chunks.is_aligned,
                NUM_PROGRAMS=NUM_PROGRAMS,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return found.sum()


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.squares_triton import squares_kernel

    return squares_kernel
