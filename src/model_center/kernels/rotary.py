"""Rotary positions of queries and keys in one pass, for computing without gradients.

As a dozen element-wise operations per tensor they take longer to launch than to run.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

from __future__ import annotations

import torch

from bmtrain.kernels.launch import kernel, tl


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
    return _rotated(query, tables, interleaved), _rotated(key, tables, interleaved)


def _rotated(x: torch.Tensor, tables: list[torch.Tensor], interleaved: bool) -> torch.Tensor:
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
    rotate_kernel(
        (programs,),
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


@kernel
def rotate_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    query: tl.tensor,
    key: tl.tensor,
    query_out: tl.tensor,
    key_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    table_batch: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_position: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_position: tl.tensor,
    num_heads: tl.tensor,
    num_heads_kv: tl.tensor,
    num_positions: tl.tensor,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Each program turns one head at one position, first those of queries, then those of keys.

    `table_batch` is the number of rows of the tables from one sequence to the next, 0 if they share
    the rows.
    """
    heads = num_heads + num_heads_kv
    head = tl.program_id(0) % heads
    position = (tl.program_id(0) // heads) % num_positions
    batch = (tl.program_id(0) // (heads * num_positions)).to(tl.int64)
    if head < num_heads:
        x = query + batch * query_batch + head * query_head + position * query_position
        y = query_out + ((batch * num_heads + head) * num_positions + position) * (2 * PAIRS + REST)
    else:
        head -= num_heads
        x = key + batch * key_batch + head * key_head + position * key_position
        y = key_out + ((batch * num_heads_kv + head) * num_positions + position) * (
            2 * PAIRS + REST
        )
    pairs = tl.arange(0, BLOCK)
    inside = pairs < PAIRS
    one = pairs
    other = pairs + PAIRS
    if INTERLEAVED:
        one = 2 * pairs
        other = 2 * pairs + 1
    angle = (batch * table_batch + position) * PAIRS + pairs
    c, s = tl.load(cos + angle, inside, other=0.0), tl.load(sin + angle, inside, other=0.0)
    a = tl.load(x + one, inside, other=0.0).to(tl.float32)
    b = tl.load(x + other, inside, other=0.0).to(tl.float32)
    tl.store(y + one, (a * c - b * s).to(y.dtype.element_ty), inside)
    tl.store(y + other, (b * c + a * s).to(y.dtype.element_ty), inside)
    if REST > 0:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        left = tl.arange(0, BLOCK_REST) < REST
        tl.store(y + rest, tl.load(x + rest, left), left)
