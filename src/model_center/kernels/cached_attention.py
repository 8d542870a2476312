"""Attention of one query per row over a cache of fixed size, and writing new tokens to it: each by
itself, or in one kernel with the rotary positions of both.

A step of generation adds one token to each row. Where it goes, and how many tokens a row has, are
numbers in device memory: so every step is the same work on the same addresses, and can be repeated
as a CUDA graph.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting the keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from bmtrain.kernels.launch import kernel, tl
from model_center.kernels.rotary import rotate_reference

#: keys at once, and where there are no more programs than multiprocessors
BLOCK_KEYS, BLOCK_KEYS_OF_FEW = 64, 128
#: a block of so many keys takes at most so much: keys and values of some blocks at once share the
#: memory of a multiprocessor
BLOCK_BYTES, BLOCK_BYTES_OF_FEW = 1 << 15, 1 << 14
#: a program reads at least so many keys of the cache, if there are as many
KEYS_OF_PROGRAM = 512
#: most parts of the keys of a row
MOST_PARTS = 64
PROGRAMS_OF_SM = 2
LEAST_DOT = 16  # rows and columns of the smallest product of Triton


def cached_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: torch.Tensor, scale: float
) -> torch.Tensor:
    """`softmax(scale q k^T) v` over the keys that each row sees; sums in fp32.

    Args:
        query: (rows, heads, dim) in fp32, fp16 or bf16.
        keys, values: (rows, key heads, capacity, dim); each head serves heads / key heads queries'
            heads. What is out of reach may hold any finite numbers.
        reach: int64 (2, rows): the first key that a row sees, and the one after the last.

    Returns (rows, heads, dim), zeros for rows that see nothing.
    """
    if query.device.type == "cpu":
        return cached_attention_reference(query, keys, values, reach, scale)
    return cached_attention_by_triton(query, keys, values, reach, scale)


def cached_attention_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: torch.Tensor, scale: float
) -> torch.Tensor:
    """`cached_attention` by the formula."""
    grouped = query.unflatten(1, (keys.shape[1], -1)).float()
    places = torch.arange(keys.shape[2], device=keys.device)
    seen = ((places >= reach[0, :, None]) & (places < reach[1, :, None]))[:, None, None]
    scores = (scale * grouped @ keys.float().mT).masked_fill(~seen, -torch.inf)
    probabilities = scores.softmax(-1).masked_fill(~seen, 0.0)
    return (probabilities @ values.float()).flatten(1, 2).to(query.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewToken:
    """A token of each row that is to be added to a cache.

    Attributes:
        key, value: (rows, key heads, dim), of the cache's dtype; the key not turned yet.
        place: int64 (1,), where it goes; nothing is written outside of the cache.
        cos, sin: of the angles by which query and key are turned, as in kernels/rotary.py: fp32
            (1 or rows, pairs); None for none.
        interleaved: whether channels 2i and 2i + 1 are a pair, or i and i + pairs.
    """

    key: torch.Tensor
    value: torch.Tensor
    place: torch.Tensor
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    interleaved: bool = False


def extended_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    reach: torch.Tensor,
    scale: float,
    new: NewToken,
) -> torch.Tensor:
    """`cached_attention` of a query that is turned first, after a token was added to the cache."""
    if query.device.type == "cpu":
        return extended_attention_reference(query, keys, values, reach, scale, new)
    return cached_attention_by_triton(query, keys, values, reach, scale, new)


def extended_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    reach: torch.Tensor,
    scale: float,
    new: NewToken,
) -> torch.Tensor:
    """`extended_attention` part by part."""
    query, key = query[:, :, None], new.key[:, :, None]
    if new.cos is not None and new.sin is not None:
        cos, sin = new.cos[:, None], new.sin[:, None]
        query, key = rotate_reference(query, key, cos, sin, new.interleaved)
    store_tokens_reference(keys, values, key, new.value[:, :, None], new.place)
    return cached_attention_reference(query[:, :, 0], keys, values, reach, scale)


def cached_attention_by_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    reach: torch.Tensor,
    scale: float,
    new: NewToken | None = None,
) -> torch.Tensor:
    """`cached_attention` or `extended_attention` in one kernel, or two where the keys of a row are
    cut into parts.
    """
    (rows, heads, dim), (_, heads_kv, capacity, _) = query.shape, keys.shape
    query, reach, out = _with_rows(query), reach.contiguous(), query.new_empty(query.shape)
    parts = num_parts(rows * heads_kv, capacity, query.device)
    block_dim = max(LEAST_DOT, 1 << (dim - 1).bit_length())
    group = heads // heads_kv
    sums, stats = out, out
    if parts > 1:
        sums = query.new_empty((rows * heads, parts, dim), dtype=torch.float32)
        stats = query.new_empty((rows * heads, parts, 2), dtype=torch.float32)
    cached_attention_kernel(
        (rows * heads_kv, parts),
        query,
        keys,
        values,
        reach,
        sums,
        stats,
        rows,
        scale,
        *keys.stride()[:3],
        *values.stride()[:3],
        **_arguments_of(new, query, capacity),
        HEADS_KV=heads_kv,
        GROUP=group,
        DIM=dim,
        PARTS=parts,
        BLOCK_GROUP=max(LEAST_DOT, 1 << (group - 1).bit_length()),
        BLOCK_KEYS=keys_at_once(
            rows * heads_kv * parts, block_dim * query.element_size(), query.device
        ),
        BLOCK_DIM=block_dim,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    if parts > 1:
        joined_parts_kernel(
            (rows * heads,),
            sums,
            stats,
            out,
            DIM=dim,
            PARTS=parts,
            BLOCK_PARTS=1 << (parts - 1).bit_length(),
            BLOCK_DIM=block_dim,
            num_warps=4,
        )
    return out


def _arguments_of(new: NewToken | None, query: torch.Tensor, capacity: int) -> dict[str, Any]:
    """Arguments of the kernel that describe the query and a new token."""
    key = value = place = cos = sin = None
    pairs = table_row = 0
    if new is not None:
        key, value, place = _with_rows(new.key), _with_rows(new.value), new.place
        if new.cos is not None and new.sin is not None:
            cos, sin, pairs = new.cos.contiguous(), new.sin.contiguous(), new.cos.shape[1]
            table_row = pairs if new.cos.shape[0] > 1 else 0
    found: dict[str, Any] = {"new_key": key, "new_value": value, "place": place}
    found |= {"cos": cos, "sin": sin, "capacity": capacity, "table_row": table_row, "PAIRS": pairs}
    for name, x in (("query", query), ("new_key", key), ("new_value", value)):
        row, head = (0, 0) if x is None else x.stride()[:2]
        found |= {f"{name}_row": row, f"{name}_head": head}
    return found | {"INTERLEAVED": new is not None and new.interleaved}


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """The same, with channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def num_parts(programs: int, capacity: int, device: torch.device) -> int:
    """Parts into which the keys of a row are cut, so that all of the device has work."""
    if programs == 0:
        return 1
    wanted = -(-PROGRAMS_OF_SM * _num_sms(device) // programs)
    return max(1, min(wanted, capacity // KEYS_OF_PROGRAM, MOST_PARTS))


def keys_at_once(programs: int, key_bytes: int, device: torch.device) -> int:
    """Keys of so many bytes that each of some programs reads at once."""
    usual = min(BLOCK_KEYS, BLOCK_BYTES // key_bytes)
    if programs > _num_sms(device):
        return usual
    return max(usual, min(BLOCK_KEYS_OF_FEW, BLOCK_BYTES_OF_FEW // key_bytes))


def store_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    place: torch.Tensor,
) -> None:
    """Write the keys and values of a new token of each row to the cache.

    Args:
        keys, values: (rows, key heads, capacity, dim).
        new_keys, new_values: (rows, key heads, 1, dim), of their dtype.
        place: int64 (1,), where it goes; nothing is written outside of the cache.
    """
    by = store_tokens_reference if keys.device.type == "cpu" else store_tokens_by_triton
    by(keys, values, new_keys, new_values, place)


def store_tokens_reference(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    place: torch.Tensor,
) -> None:
    """`store_tokens` by the formula."""
    is_there = (torch.arange(keys.shape[2], device=keys.device) == place)[:, None]
    for memory, new in ((keys, new_keys), (values, new_values)):
        memory.copy_(torch.where(is_there, new, memory))


def store_tokens_by_triton(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    place: torch.Tensor,
) -> None:
    """`store_tokens` in one kernel."""
    rows, heads, capacity, dim = keys.shape
    new_keys, new_values = _with_rows(new_keys), _with_rows(new_values)
    store_tokens_kernel(
        (rows * heads,),
        keys,
        values,
        new_keys,
        new_values,
        place,
        heads,
        capacity,
        *keys.stride()[:3],
        *values.stride()[:3],
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        DIM=dim,
        BLOCK_DIM=1 << (dim - 1).bit_length(),
        num_warps=1,
    )


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; on the CPU, for tests, as many as make parts."""
    if device.type == "cpu":
        return MOST_PARTS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@kernel
def _rotated(
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


@kernel
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


@kernel
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


@kernel
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


@kernel
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
    q = _rotated(at, dims[None, :], there, cos, sin, PAIRS, INTERLEAVED)
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
        token_key = _rotated(new_key, dims, dims < DIM, cos, sin, PAIRS, INTERLEAVED)
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


@kernel
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


@kernel
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
