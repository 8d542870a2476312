"""Rotary positions of queries and keys in one pass, for computing without gradients.

As a dozen element-wise operations per tensor they take longer to launch than to run.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import launching_on


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with their first channels turned by angles, in fp32, rounded once.

    Args:
        query: (batch, heads, positions, dim) in fp32, fp16 or bf16.
        key: the same, with other heads.
        cos, sin: of the angles, (positions, pairs) or (batch, positions, pairs) in fp32; at most
            dim / 2 pairs. The other channels stay.
        interleaved: whether channels 2i and 2i + 1 are a pair, or i and i + pairs.
    """
    by = rotate_reference if query.device.type == "cpu" else rotate_by_triton
    return by(query, key, cos, sin, interleaved)


def rotate_reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate` by the formula."""
    tables = [table if table.dim() == 2 else table[:, None] for table in (cos, sin)]
    return _turned(query, tables, interleaved), _turned(key, tables, interleaved)


def _turned(x: torch.Tensor, tables: list[torch.Tensor], interleaved: bool) -> torch.Tensor:
    (cos, sin), out = tables, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pairs = cos.shape[-1]
    one, other = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(pairs), slice(pairs, 2 * pairs))
    )
    a, b = x[..., one].float(), x[..., other].float()
    out[..., one], out[..., other] = a * cos - b * sin, b * cos + a * sin
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
    return out


def rotate_by_triton(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate` in one kernel."""
    out = query.new_empty(query.shape), key.new_empty(key.shape)
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, positions, dim = query.shape
    pairs, programs = cos.shape[-1], batch * positions * (heads + key.shape[1])
    if programs:
        with launching_on(query.device):
            _triton_kernel()[(programs,)](
                query,
                key,
                *out,
                cos,
                sin,
                positions if cos.dim() == 3 else 0,
                *query.stride()[:3],
                *key.stride()[:3],
                heads,
                key.shape[1],
                positions,
                PAIRS=pairs,
                REST=dim - 2 * pairs,
                INTERLEAVED=interleaved,
                BLOCK=1 << (pairs - 1).bit_length(),
                BLOCK_REST=1 << max(0, dim - 2 * pairs - 1).bit_length(),
                num_warps=1,
            )
    return out


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.rotary_triton import rotate_kernel

    return rotate_kernel
