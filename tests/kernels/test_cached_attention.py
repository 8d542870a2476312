"""Attention over a cache of fixed size: kernel against twin, twin against torch's attention."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from model_center.kernels import cached_attention as room
from model_center.kernels.cached_attention import (
    NewToken,
    cached_attention,
    cached_attention_by_triton,
    extended_attention,
    keys_at_once,
    num_parts,
    store_tokens,
    store_tokens_by_triton,
)

# rows, heads, key heads, capacity, dim
SIZES = [(2, 3, 3, 33, 8), (2, 6, 2, 50, 24), (1, 20, 1, 70, 64)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
CPU, NAN = torch.device("cpu"), float("nan")


def in_parts(monkeypatch, parts):
    """Of the keys of a row, of which 16 are read at once."""
    monkeypatch.setattr(room, "num_parts", lambda *_: parts)
    monkeypatch.setattr(room, "keys_at_once", lambda *_: 16)


def case(size, dtype=torch.float32):
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
def test_kernel_equals_twin(size, monkeypatch):
    """Whole and in parts, of which some have no keys. The twin is torch's attention."""
    for parts, dtype in itertools.product((1, 2, 5), TOLERANCE):
        in_parts(monkeypatch, parts)
        query, keys, values, reach = case(size, dtype)
        expected = cached_attention(query, keys, values, reach, 0.3)
        found = cached_attention_by_triton(query, keys, values, reach, 0.3)
        assert found.dtype == expected.dtype == dtype
        tolerance = TOLERANCE[dtype]
        assert_close(found, expected, rtol=tolerance, atol=tolerance)
        if dtype == torch.float32:
            places = torch.arange(size[3])
            seen = (places >= reach[0, :, None]) & (places < reach[1, :, None])
            plain = F.scaled_dot_product_attention
            whole = query[:, :, None], keys, values, seen[:, None, None]
            by_torch = plain(*whole, scale=0.3, enable_gqa=True)[:, :, 0]
            assert_close(expected, by_torch)


@pytest.mark.parametrize("parts", [1, 3])
def test_no_more_is_read_than_is_seen(parts, monkeypatch):
    """What is behind the reach is nobody's memory yet; a row that sees nothing gets zeros."""
    in_parts(monkeypatch, parts)
    query, keys, values, reach = case(SIZES[1])
    reach[1, 1] = reach[0, 1]
    expected = cached_attention_by_triton(query, keys, values, reach, 1.0)
    twin = cached_attention(query, keys, values, reach, 1.0)
    for out in (expected, twin):
        assert out[1].eq(0).all() and out.isfinite().all() and out[0].ne(0).any()
    for row, (begin, end) in enumerate(reach.T.tolist()):
        for memory in (keys, values):
            memory[row, :, :begin], memory[row, :, end:] = NAN, NAN
    assert torch.equal(cached_attention_by_triton(query, keys, values, reach, 1.0), expected)


def test_keys_are_cut_and_read_as_the_device_can():
    """Few rows and a long cache make parts; a short cache, or many rows, none. Keys are read in larger
    blocks where there are few, as far as blocks of the width fit into a multiprocessor.
    """
    for programs, capacity, parts in (
        (8, 384, 1),
        (8, 4096, 8),
        (1, 10**6, room.MOST_PARTS),
        (10**4, 4096, 1),
        (0, 4096, 1),
    ):
        assert num_parts(programs, capacity, CPU) == parts
    for programs, width, keys in (
        *((8, 64, 128), (64, 128, 128), (65, 128, 64), (8, 256, 64)),
        *((8, 512, 64), (8, 1024, 32), (65, 1024, 32)),
    ):
        assert keys_at_once(programs, width, CPU) == keys


def test_tokens_are_stored_at_their_place():
    """And nowhere else; at no place of the cache nowhere at all."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(2, 3, 2, 20, 24, generator=generator)
    # as a linear layer leaves them: heads beside each other in each row
    new = torch.randn(2, 3, 1, 2, 24, generator=generator).transpose(2, 3)
    for place, store in itertools.product((0, 7, 19, 20), (store_tokens, store_tokens_by_triton)):
        found, expected = memory.clone(), memory.clone()
        expected[:, :, :, place : place + 1] = new[..., : max(0, min(1, 20 - place)), :]
        store(found[0], found[1], new[0], new[1], torch.tensor([place]))
        assert torch.equal(found, expected)


def new_token(size, dtype, place, tables):
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
    turns = {"cos": angles.cos(), "sin": angles.sin()}
    return dataclasses.replace(token, **turns, interleaved=tables == "interleaved")


@pytest.mark.parametrize(
    ("tables", "parts", "dtype"),
    [
        ("none", 3, torch.float32),
        ("whole", 1, torch.float32),
        ("some", 3, torch.float16),
        ("shared", 1, torch.float16),
        ("interleaved", 3, torch.float32),
    ],
)
def test_a_token_is_added_and_seen(tables, parts, dtype, monkeypatch):
    """At the end of what its row sees, in the midst, before it, and at no place of the cache."""
    in_parts(monkeypatch, parts)
    size = SIZES[1] if tables in ("some", "interleaved") else SIZES[0]
    query, keys, values, reach = case(size, dtype)
    end, tolerance = int(reach[1, 0]), TOLERANCE[dtype]
    for place in (end - 1, end - 3, 0, size[3]):
        new = new_token(size, dtype, place, tables)
        memory, twin = ((keys.clone(), values.clone()) for _ in range(2))
        if place < size[3]:  # whatever is at the place, nobody reads it
            memory[0][:, :, place] = memory[1][:, :, place] = NAN
        found = cached_attention_by_triton(query, *memory, reach, 0.3, new)
        expected = extended_attention(query, *twin, reach, 0.3, new)
        for one, other in zip((found, *memory), (expected, *twin), strict=True):
            assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_cache_of_one_token():
    """The new one alone is seen."""
    query, keys, values, _ = case(SIZES[1])
    new = new_token(SIZES[1], torch.float32, 0, "whole")
    reach = torch.tensor([[0, 0], [1, 1]])
    out = cached_attention_by_triton(query, keys, values, reach, 1.0, new)
    assert_close(out, new.value.repeat_interleave(3, 1))
