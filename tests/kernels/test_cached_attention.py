"""Attention over a cache of fixed size: kernel against twin, twin against torch's attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from bmtrain.kernels import cached_attention as room
from bmtrain.kernels.cached_attention import (
    NewToken,
    cached_attention,
    cached_attention_by_triton,
    extended_attention,
    keys_at_once,
    num_parts,
    store_tokens,
    store_tokens_by_triton,
)

CPU = torch.device("cpu")
# rows, heads, key heads, capacity, dim
SIZES = [(1, 4, 4, 20, 16), (3, 6, 2, 90, 24), (2, 20, 1, 130, 64), (2, 3, 3, 33, 8)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def case(
    size: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, heads, heads_kv, capacity, dim = size
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, heads, dim, generator=generator)
    # keys as a cache has them: a part of a larger memory
    memory = torch.randn(2, rows, heads_kv, capacity + 3, dim, generator=generator)
    keys, values = memory.to(dtype)[:, :, :, 3:]
    begin = torch.randint(0, capacity // 2, (rows,), generator=generator)
    end = torch.randint(capacity // 2 + 1, capacity + 1, (rows,), generator=generator)
    return query.to(dtype), keys, values, torch.stack([begin, end])


@pytest.mark.parametrize("size", SIZES)
def test_the_twin_is_attention(size: tuple[int, int, int, int, int]) -> None:
    query, keys, values, reach = case(size)
    places = torch.arange(size[3])
    seen = (places >= reach[0, :, None]) & (places < reach[1, :, None])
    expected = F.scaled_dot_product_attention(
        query[:, :, None], keys, values, seen[:, None, None], scale=0.3, enable_gqa=True
    )[:, :, 0]
    torch.testing.assert_close(cached_attention(query, keys, values, reach, 0.3), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_kernel_equals_twin(
    size: tuple[int, int, int, int, int],
    parts: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole and in parts, of which some have no keys."""
    monkeypatch.setattr(room, "num_parts", lambda *_: parts)
    monkeypatch.setattr(room, "keys_at_once", lambda *_: 16)
    arguments = (*case(size, dtype), size[4] ** -0.5)
    found, expected = cached_attention_by_triton(*arguments), cached_attention(*arguments)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("parts", [1, 3])
def test_a_row_that_sees_nothing_gets_zeros(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "num_parts", lambda *_: parts)
    query, keys, values, reach = case(SIZES[1])
    reach[1, 1] = reach[0, 1]
    for attention in (cached_attention, cached_attention_by_triton):
        out = attention(query, keys, values, reach, 1.0)
        assert out[1].eq(0).all() and out.isfinite().all() and out[0].ne(0).any()


def test_no_more_is_read_than_is_seen() -> None:
    """What is behind the reach is nobody's memory yet."""
    query, keys, values, reach = case(SIZES[1])
    expected = cached_attention_by_triton(query, keys, values, reach, 1.0)
    for row, (begin, end) in enumerate(reach.T.tolist()):
        for memory in (keys, values):
            memory[row, :, :begin], memory[row, :, end:] = float("nan"), float("nan")
    assert torch.equal(cached_attention_by_triton(query, keys, values, reach, 1.0), expected)


def test_keys_are_cut_where_there_are_many() -> None:
    """Few rows and a long cache make parts; a short cache, or many rows, none."""
    assert num_parts(8, 384, CPU) == 1
    assert num_parts(8, 4096, CPU) == 8
    assert num_parts(1, 10**6, CPU) == room.MOST_PARTS
    assert num_parts(10**4, 4096, CPU) == 1 and num_parts(0, 4096, CPU) == 1


def test_keys_are_read_in_larger_blocks_where_there_are_few() -> None:
    """As far as blocks of the width fit into a multiprocessor."""
    assert keys_at_once(8, 64, CPU) == keys_at_once(64, 128, CPU) == 128
    assert (
        keys_at_once(65, 128, CPU) == keys_at_once(8, 256, CPU) == keys_at_once(8, 512, CPU) == 64
    )
    assert keys_at_once(8, 1024, CPU) == keys_at_once(65, 1024, CPU) == 32


@pytest.mark.parametrize("place", [0, 7, 19, 20])
def test_tokens_are_stored_at_their_place(place: int) -> None:
    """And nowhere else; at no place of the cache nowhere at all."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(2, 3, 2, 20, 24, generator=generator)
    # as a linear layer leaves them: heads beside each other in each row
    new = torch.randn(2, 3, 1, 2, 24, generator=generator).transpose(2, 3)
    expected = memory.clone()
    expected[:, :, :, place : place + 1] = new[..., : max(0, min(1, 20 - place)), :]
    for store in (store_tokens, store_tokens_by_triton):
        found = memory.clone()
        store(found[0], found[1], new[0], new[1], torch.tensor([place]))
        assert torch.equal(found, expected)


def new_token(
    size: tuple[int, int, int, int, int], dtype: torch.dtype, place: int, tables: str
) -> NewToken:
    """As a product leaves it: keys and values of a row beside each other."""
    rows, _, heads_kv, _, dim = size
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(rows, 2 * heads_kv, dim, generator=generator).to(dtype)
    key, value = both.split(heads_kv, 1)
    token = NewToken(key=key, value=value, place=torch.tensor([place]))
    if tables == "none":
        return token
    pairs = dim // 2 if tables != "some" else dim // 2 - 2
    angles = torch.randn(1 if tables == "shared" else rows, pairs, generator=generator)
    return dataclasses.replace(
        token, cos=angles.cos(), sin=angles.sin(), interleaved=tables == "interleaved"
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tables", ["none", "whole", "some", "shared", "interleaved"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("size", [SIZES[1], SIZES[3]])
def test_a_token_is_added_and_seen(
    size: tuple[int, int, int, int, int],
    parts: int,
    tables: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of what its row sees, in the midst, before it, and at no place of the cache."""
    monkeypatch.setattr(room, "num_parts", lambda *_: parts)
    monkeypatch.setattr(room, "keys_at_once", lambda *_: 16)
    query, keys, values, reach = case(size, dtype)
    scale = size[4] ** -0.5
    end = int(reach[1, 0])
    for place in (end - 1, end - 3, 0, size[3]):
        new = new_token(size, dtype, place, tables)
        memory, twin = ((keys.clone(), values.clone()) for _ in range(2))
        if place < size[3]:  # whatever is at the place, nobody reads it
            memory[0][:, :, place] = memory[1][:, :, place] = float("nan")
        found = cached_attention_by_triton(query, *memory, reach, scale, new)
        expected = extended_attention(query, *twin, reach, scale, new)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for one, other in zip(memory, twin, strict=True):
            torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_cache_of_one_token() -> None:
    """The new one alone is seen."""
    query, keys, values, _ = case(SIZES[1])
    new = new_token(SIZES[1], torch.float32, 0, "whole")
    reach = torch.tensor([[0, 0, 0], [1, 1, 1]])
    out = cached_attention_by_triton(query, keys, values, reach, 1.0, new)
    torch.testing.assert_close(out, new.value.repeat_interleave(3, 1))
