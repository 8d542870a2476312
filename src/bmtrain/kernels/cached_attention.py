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

from bmtrain.kernels.chunks import launching_on
from bmtrain.kernels.rotary import rotate_reference

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
    arguments = (query, keys, values, reach, scale)
    return (
        cached_attention_reference(*arguments)
        if query.device.type == "cpu"
        else cached_attention_by_triton(*arguments)
    )


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
    if rows == 0:
        return out
    with launching_on(query.device):
        _triton().cached_attention_kernel[(rows * heads_kv, parts)](
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
            _triton().joined_parts_kernel[(rows * heads,)](
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
    """What the kernel is told of the query and of a new token."""
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
    if rows == 0:
        return
    new_keys, new_values = _with_rows(new_keys), _with_rows(new_values)
    with launching_on(keys.device):
        _triton().store_tokens_kernel[(rows * heads,)](
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


@functools.cache
def _triton() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels import cached_attention_triton

    return cached_attention_triton
