"""Triton kernels of generation, one file per kernel: fast path and plain-torch twin; and
where layers compute with them.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from bmtrain.torch_internals import in_transform, is_tracing, num_dispatch_modes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_fused(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether to compute with a kernel that has no gradient and reads memory itself.

    Args:
        x: what is computed with.
        others: what else: of the same dtype, and no parameters of which this rank has a slice.
    """
    if not x.is_cuda or x.dtype not in DTYPES or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or is_tracing() or in_transform():
        return False
    if num_dispatch_modes() > 0 or torch.is_autocast_enabled(x.device.type):
        return False
    return all(
        other is None
        or (other.dtype == x.dtype and not isinstance(other, bmt.DistributedParameter))
        for other in others
    )
