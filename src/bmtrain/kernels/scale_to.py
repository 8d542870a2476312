"""A tensor times a factor that only the device knows, converted to another dtype in one pass."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import launching_on
from bmtrain.torch_internals import has_no_memory

BLOCK = 4096


def scale_to(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor * factor` in `dtype`, rounded once.

    Args:
        tensor: contiguous, of any shape, fp32 (or fp64, for an fp64 result).
        factor: 0-dim, of the tensor's dtype and device.
    """
    # Dynamo says that it compiles; what is traced behind it, as a backward pass is, has no memory.
    is_traced = torch.compiler.is_compiling() or has_no_memory(tensor)
    if tensor.device.type == "cpu" or is_traced or tensor.dtype == torch.float64:
        return (tensor * factor).to(dtype)
    return scale_to_by_triton(tensor, factor, dtype)


def scale_to_by_triton(
    tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`scale_to` in one kernel, without storing the product in the wider dtype.

    torch's own conversion kernel runs at a third of the speed.
    """
    out = torch.empty_like(tensor, dtype=dtype)
    count = tensor.numel()
    if count:
        with launching_on(tensor.device):
            _triton_kernel()[(-(-count // BLOCK),)](
                out, tensor, factor, count, BLOCK=BLOCK, num_warps=8
            )
    return out


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.scale_to_triton import scale_to_kernel

    return scale_to_kernel
