"""The kernels of attention over a cache of fixed size.

Imported only where there is a GPU: see kernels/cached_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _turned(
    at: tl.tensor,
    dims: tl.tensor,
    there: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """Channels `dims` of the vectors that begin `at`, turned as in kernels/rotary.py."""
    x = tl.load(at + dims, there, other=0.0)
    if PAIRS > 0:
        turns = dims < 2 * PAIRS
        if INTERLEAVED:
            is_first, pair = dims % 2 == 0, dims // 2
            distance = 1
        else:
            is_first, pair = dims < PAIRS, dims % PAIRS
            distance = PAIRS
        other = tl.where(is_first, dims + distance, dims - distance)
        y = tl.load(at + other, there & turns, other=0.0).to(tl.float32)
        c = tl.load(cos + pair, turns, other=1.0)
        s = tl.load(sin + pair, turns, other=0.0)
        x = (x.to(tl.float32) * c + y * tl.where(is_first, -s, s)).to(x.dtype)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    memory: tl.tensor,
    vector: tl.tensor,
    place: tl.tensor,
    capacity: tl.tensor,
    stride: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Write a vector to a place of the memory; nothing outside of it."""
    dims = tl.arange(0, BLOCK_DIM)
    where = place + tl.zeros([BLOCK_DIM], tl.int64)
    inside = (dims < DIM) & (where >= 0) & (where < capacity)
    tl.store(memory + where * stride + dims, vector, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _over_keys(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    skipped: tl.tensor,
    best: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    key_place: tl.tensor,
    value_place: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The largest score of each query, the sum of the weights relative to it, and of the weighted
    values, with the keys from `first` to `last` but one.
    """
    dims = tl.arange(0, BLOCK_DIM)
    for start in tl.range(first, last, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        inside = (places < last) & (places != skipped)
        shown = inside[:, None] & (dims < DIM)[None, :]
        far = places.to(tl.int64)[:, None]
        k = tl.load(keys + far * key_place + dims[None, :], shown, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        # where nothing is seen yet: -inf less itself would be NaN
        higher = tl.maximum(tl.maximum(best, tl.max(scores, 1)), -1e30)
        decay = tl.exp(best - higher)
        shares = tl.exp(scores - higher[:, None])
        v = tl.load(values + far * value_place + dims[None, :], shown, other=0.0)
        weight = weight * decay + tl.sum(shares, 1)
        total = total * decay[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    return best, weight, total


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    best: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    heads: tl.tensor,
    part: tl.tensor,
    are_heads: tl.tensor,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Store the result of some heads, or a part of it."""
    dims = tl.arange(0, BLOCK_DIM)
    there = are_heads[:, None] & (dims < DIM)[None, :]
    if PARTS == 1:
        result = total / tl.where(weight > 0, weight, 1.0)[:, None]
        out = sums + heads[:, None] * DIM + dims[None, :]
        tl.store(out, result.to(sums.dtype.element_ty), there)
    else:
        i = heads.to(tl.int64) * PARTS + part
        tl.store(sums + i[:, None] * DIM + dims[None, :], total, there)
        tl.store(stats + 2 * i, best, are_heads)
        tl.store(stats + 2 * i + 1, weight, are_heads)


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
    new_key: tl.tensor,
    new_value: tl.tensor,
    place: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    capacity: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    new_key_row: tl.tensor,
    new_key_head: tl.tensor,
    new_value_row: tl.tensor,
    new_value_head: tl.tensor,
    table_row: tl.tensor,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
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

    A new key is not read from the cache, where another program may be about to write it: the first
    part begins with it, and the others leave its place out.
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
    far_row, far_head = row.to(tl.int64), head.to(tl.int64)
    if PAIRS > 0:
        cos += far_row * table_row
        sin += far_row * table_row
    at = query + far_row * query_row + (far_head * GROUP + members)[:, None] * query_head
    q = _turned(at, dims[None, :], there, cos, sin, PAIRS, INTERLEAVED)
    keys += far_row * key_row + far_head * key_head
    values += far_row * value_row + far_head * value_head
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    fresh = -1
    if new_key is not None:
        fresh = tl.load(place).to(tl.int32)
        new_key += far_row * new_key_row + far_head * new_key_head
        new_value += far_row * new_value_row + far_head * new_value_head
        token_key = _turned(new_key, dims, dims < DIM, cos, sin, PAIRS, INTERLEAVED)
        token_value = tl.load(new_value + dims, dims < DIM, other=0.0)
        if part == 0:
            _store(keys, token_key, fresh, capacity, key_place, DIM, BLOCK_DIM)
            _store(values, token_value, fresh, capacity, value_place, DIM, BLOCK_DIM)
        if (part == 0) & (fresh >= begin) & (fresh < end):
            best = tl.sum(q.to(tl.float32) * token_key.to(tl.float32)[None, :], 1) * scale
            weight += 1.0
            total += token_value.to(tl.float32)[None, :]
    best, weight, total = _over_keys(
        q,
        keys,
        values,
        first,
        last,
        fresh,
        best,
        weight,
        total,
        scale,
        key_place,
        value_place,
        DIM,
        BLOCK_KEYS,
        BLOCK_DIM,
        PRECISION,
    )
    _keep(best, weight, total, sums, stats, heads, part, members < GROUP, DIM, PARTS, BLOCK_DIM)


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
