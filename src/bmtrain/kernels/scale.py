"""Scaling many tensors by a factor that only the device knows; no memory traffic if it is 1."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import Batch, launching_on

BLOCK, NUM_WARPS = 2048, 4
NUM_PROGRAMS = 4096  # few enough that a launch with a factor of 1 ends at once


def scale_(tensors: Batch, factor: torch.Tensor) -> None:
    """Multiply tensors in place, without synchronising with the device.

    Args:
        tensors: rows of one tensor of any floating dtype, strides and device.
        factor: 0-dim fp32 or fp64. The product is computed in fp32 (fp64 for fp64 tensors) and
            rounded once; if the factor is 1, the kernel reads and writes nothing.
    """
    fast, slow = tensors.by_path
    scale_reference_(slow, factor)
    if fast.rows:
        scale_triton_(fast, factor.float())


def scale_reference_(tensors: Batch, factor: torch.Tensor) -> None:
    """`scale_` in plain torch."""
    for (tensor,) in tensors.rows:  # `mul_` would round the factor to the tensor's dtype first
        tensor.copy_(
            tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor.to(tensor.device)
        )


def scale_triton_(tensors: Batch, factor: torch.Tensor) -> None:
    """`scale_` for contiguous tensors on the device of `factor`, with one kernel per dtype."""
    from bmtrain.kernels.chunks_triton import DTYPES

    with launching_on(factor.device):
        for (dtype,), chunks in tensors.tables(BLOCK):
            _triton_kernel()[(min(chunks.count, NUM_PROGRAMS),)](
                chunks.rows,
                chunks.row_of,
                factor,
                chunks.count,
                DTYPE=DTYPES[dtype],
                IS_ALIGNED=chunks.is_aligned,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    torch.autograd.graph.increment_version(tensor for (tensor,) in tensors.rows)


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.scale_triton import scale_kernel

    return scale_kernel
