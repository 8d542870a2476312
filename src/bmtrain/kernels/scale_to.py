"""The product of a tensor and a number that only the device knows, rounded to another dtype in the
same pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import launching_on

BLOCK = 4096


def scale_to(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor * factor` in `dtype`, rounded once.

    Args:
        tensor: contiguous, of any shape, fp32 (or fp64 for a result in fp64).
        factor: 0-dim, of the tensor's dtype and device.
    """
    if (
        tensor.device.type == "cpu"
        or torch.compiler.is_compiling()
        or tensor.dtype == torch.float64
    ):
        return (tensor * factor).to(dtype)
    return scale_to_by_triton(tensor, factor, dtype)


def scale_to_by_triton(
    tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same in one kernel without a product in the wider dtype in memory; torch's own, that
    converts, is a third as fast.
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
    """Triton exists only where CUDA does and takes long to import: it is loaded by the first
    product on a GPU.
    """
    from bmtrain.kernels.scale_to_triton import scale_to_kernel

    return scale_to_kernel
