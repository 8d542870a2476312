"""Multiplying many tensors by a number that only the device knows, and leaving them alone where it
is 1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import Batch, launching_on

BLOCK, NUM_WARPS = 2048, 4
NUM_PROGRAMS = 4096  # few enough that a launch with nothing to do is over at once


def scale_(tensors: Batch, factor: torch.Tensor) -> None:
    """Multiply tensors in place, without waiting for the device.

    Args:
        tensors: rows of one tensor of any floating dtype, strides and device.
        factor: 0-dim fp32 or fp64. The product is taken in fp32 (of fp64 tensors in fp64) and
            rounded once; where it is 1, the kernel reads and writes nothing.
    """
    fast, slow = tensors.by_path
    scale_reference_(slow, factor)
    if fast.rows:
        scale_triton_(fast, factor.float())


def scale_reference_(tensors: Batch, factor: torch.Tensor) -> None:
    """The same by torch."""
    for (tensor,) in tensors.rows:  # torch would round the factor first, to the dtype of the tensor
        tensor.copy_(
            tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor.to(tensor.device)
        )


def scale_triton_(tensors: Batch, factor: torch.Tensor) -> None:
    """The same, of contiguous tensors on the device of `factor`, by one kernel for all of a
    dtype.
    """
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
    """Triton exists only where CUDA does and takes long to import: it is loaded by the first
    clipping on a GPU.
    """
    from bmtrain.kernels.scale_triton import scale_kernel

    return scale_kernel
