"""The sum of the squares of many tensors: a gradient norm, and whether all gradients are finite, in
one number.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import Batch, launching_on

BLOCK, NUM_WARPS = 2048, 8
# Programs of one launch. A fixed number, whatever the device: each sums the same chunks in the same
# order, and so the same bits.
NUM_PROGRAMS = 2048


def sum_of_squares(tensors: Batch, device: torch.device) -> torch.Tensor:
    """The sum of the squares of all elements: 0-dim fp64 on `device`, without waiting for it.

    It is finite exactly if all elements are: squares that leave the range of fp32 do not leave that
    of fp64. Squares below that range count as zero. The same tensors give the same bits.

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
    """The same by the formula."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (tensor,) in tensors.rows:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square().to(device)
    return total


def sum_of_squares_triton(tensors: Batch, device: torch.device) -> torch.Tensor:
    """The same, of contiguous tensors on `device`, by one kernel for all of a dtype, and one that
    adds up what it found.
    """
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
    """Triton exists only where CUDA does and takes long to import: it is loaded by the first norm
    on a GPU.
    """
    from bmtrain.kernels.squares_triton import squares_kernel

    return squares_kernel
