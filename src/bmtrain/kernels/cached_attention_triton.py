"""The kernels of attention over a cache of fixed size.

Imported only where there is a GPU: see kernels/cached_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def cached_attention_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    reach: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_place: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    value_place: tl.tensor,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Each program attends over a part of the keys of one row and head, for all its queries.

    With one part `sums` is the result; else it gets the sum of the part, relative to its largest
    score, and `stats` that score and the sum of the weights.
    """
    row, head = tl.program_id(0) // HEADS_KV, tl.program_id(0) % HEADS_KV
    part = tl.program_id(1)
    begin = tl.load(reach + row).to(tl.int32)
    end = tl.load(reach + num_rows + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(end - begin, PARTS), BLOCK_KEYS) * BLOCK_KEYS
    first = begin + part * share
    last = tl.minimum(first + share, end)
    members, dims = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    there = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    heads = tl.program_id(0) * GROUP + members  # of queries, over all rows
    q = tl.load(query + heads[:, None] * DIM + dims[None, :], there, other=0.0)
    keys += row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
    values += row.to(tl.int64) * value_row + head.to(tl.int64) * value_head
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for start in tl.range(first, last, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        inside = places < last
        shown = inside[:, None] & (dims < DIM)[None, :]
        far = places.to(tl.int64)[:, None]
        k = tl.load(keys + far * key_place + dims[None, :], shown, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp(best - higher)
        shares = tl.exp(scores - higher[:, None])
        v = tl.load(values + far * value_place + dims[None, :], shown, other=0.0)
        weight = weight * decay + tl.sum(shares, 1)
        total = total * decay[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    if PARTS == 1:
        result = total / tl.where(weight > 0, weight, 1.0)[:, None]
        out = sums + heads[:, None] * DIM + dims[None, :]
        tl.store(out, result.to(sums.dtype.element_ty), there)
    else:
        i = heads.to(tl.int64) * PARTS + part
        tl.store(sums + i[:, None] * DIM + dims[None, :], total, there)
        tl.store(stats + 2 * i, best, members < GROUP)
        tl.store(stats + 2 * i + 1, weight, members < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def joined_parts_kernel(
    sums: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Each program joins the parts of one query; those without keys have the score -inf."""
    head = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_DIM)
    i = head * PARTS + parts
    best = tl.load(stats + 2 * i, parts < PARTS, other=float("-inf"))
    weight = tl.load(stats + 2 * i + 1, parts < PARTS, other=0.0)
    highest = tl.maximum(
        tl.max(best, 0), -1e30
    )  # -inf, where there are no keys, less itself is NaN
    factor = tl.where(weight > 0, tl.exp(best - highest), 0.0)
    there = (parts < PARTS)[:, None] & (dims < DIM)[None, :]
    total = tl.load(sums + i[:, None] * DIM + dims[None, :], there, other=0.0)
    whole = tl.sum(weight * factor, 0)
    result = tl.sum(total * factor[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + head * DIM + dims, result.to(out.dtype.element_ty), dims < DIM)


@triton.jit  # type: ignore[untyped-decorator]
def store_tokens_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    keys: tl.tensor,
    values: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    place: tl.tensor,
    num_heads: tl.tensor,
    capacity: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_place: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    value_place: tl.tensor,
    new_key_row: tl.tensor,
    new_key_head: tl.tensor,
    new_value_row: tl.tensor,
    new_value_head: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Each program writes the key and the value of one row and head."""
    row = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    where = tl.load(place) + tl.zeros([BLOCK_DIM], tl.int64)
    inside = (dims < DIM) & (where >= 0) & (where < capacity)
    key = tl.load(new_keys + row * new_key_row + head * new_key_head + dims, inside)
    value = tl.load(new_values + row * new_value_row + head * new_value_head + dims, inside)
    tl.store(keys + row * key_row + head * key_head + where * key_place + dims, key, inside)
    tl.store(
        values + row * value_row + head * value_head + where * value_place + dims, value, inside
    )
