"""Attention of packed rows: beside plain attention of each text alone, and as FlexAttention computes it."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from bmtrain.compile import backend, cache
from bmtrain.errors import ConfigurationError
from bmtrain.nn import attention, first_keys, segment_attention
from bmtrain.torch_internals import find_backend
from model_center.dataset.packing import segment_mask
from model_center.layer.mask import AttentionMask
from model_center.layer.scaled_dot_product import attend, attend_visibly

# Tokens of a row, most tokens of a text, window.
CASES = [
    (384, 90, None),
    (300, 290, None),
    (300, 290, 130),
    (130, 500, None),
    (64, 5, 2),
    (513, 400, 1),
]


def packed(batch, length, most, seed=0):
    """Numbers of texts (batch, length); the last of them are padding, 0."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most + 1, (batch, length), generator=draw)
    rows = [torch.arange(1, length + 1).repeat_interleave(row)[:length] for row in lengths]
    rows[0][-3:] = 0
    return torch.stack(rows)


def drawn(batch, length, heads=4, key_heads=2, dim=16):
    shapes = [(batch, n, length, dim) for n in (heads, key_heads, key_heads)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def one_by_one(query, key, value, segments, window):
    """Plain causal attention of each text of each row."""
    rows = []
    for row, numbers in enumerate(segments):
        parts = []
        lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
        for q, k, v in zip(*(x[row].split(lengths, 1) for x in (query, key, value)), strict=True):
            seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
            seen = seen if window is None else seen.triu(1 - window)
            keys, values = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            parts.append(F.scaled_dot_product_attention(q, keys, values, seen))
        rows.append(torch.cat(parts, 1))
    return torch.stack(rows)


def listed(mask, name):
    """The blocks in a table of a mask: int (batch, rows, columns), how often each is named."""
    counts, blocks = (
        getattr(mask, f"{name}_{kind}")[:, 0].long() for kind in ("num_blocks", "indices")
    )
    is_read = torch.arange(blocks.shape[-1]) < counts[..., None]
    return torch.zeros_like(blocks).scatter_add_(-1, blocks, is_read.long())


def results(function, tensors, towards):
    for x in tensors:
        x.grad = None
    out = function(*tensors)
    (out * towards).sum().backward()
    return [out.detach(), *(x.grad for x in tensors)]


@pytest.fixture
def compiled(monkeypatch):
    """`segment_attention` in compiled code as on a GPU, and the graphs; FlexAttention refuses backward on
    CPUs only because its kernels lack it.
    """
    monkeypatch.setattr(attention, "_PLAIN", ())
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    graphs = []

    def lower(graph, inputs, **_):
        graphs.append(graph)
        return find_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    at_once = backend.AtOnce(lower)
    return torch.compile(segment_attention, backend=at_once, fullgraph=True, dynamic=False), graphs


@pytest.mark.parametrize(("length", "most", "window"), CASES)
def test_each_text_is_as_alone(length, most, window):
    """Values and gradients, full, in windows, of grouped heads."""
    segments, tensors = packed(2, length, most), drawn(2, length)
    towards = torch.randn(2, 4, length, 16)
    want = results(lambda q, k, v: one_by_one(q, k, v, segments, window), tensors, towards)
    got = results(
        lambda q, k, v: segment_attention(q, k, v, segments, window=window), tensors, towards
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "most", "window"), CASES)
def test_blocks_are_those_of_torch(length, most, window):
    """As `create_block_mask` finds them by looking at all pairs; seen from the keys they are the same."""
    first, places = first_keys(packed(2, length, most)), torch.arange(length)
    first = first if window is None else torch.maximum(first, places - window + 1)
    found = attention.block_mask(first)
    want = create_block_mask(found.mask_mod, 2, 1, length, length, device="cpu")
    for name in ("", "full_"):
        own, torchs, of_keys = (
            listed(mask, f"{name}{side}")
            for mask, side in ((found, "kv"), (want, "kv"), (found, "q"))
        )
        assert torch.equal(own, torchs)
        assert torch.equal(of_keys.transpose(-1, -2), torchs)


def test_compiled_code_has_one_graph_for_all_rows(compiled):
    function, graphs = compiled
    for seed in range(3):
        options = {"segments": packed(2, 300, 200, seed), "window": 150}
        tensors, towards = drawn(2, 300), torch.randn(2, 4, 300, 16)
        want = results(functools.partial(segment_attention, **options), tensors, towards)
        got = results(functools.partial(function, **options), tensors, towards)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (graph,) = graphs
    assert any("flex_attention" in str(node.target) for node in graph.graph.nodes)
    assert cache.is_told(graph)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_nothing_leaks_into_another_text(is_compiled, request):
    """A token changed in one text changes no bit of another's output or gradients."""
    function = request.getfixturevalue("compiled")[0] if is_compiled else segment_attention
    segments, tensors = packed(1, 300, 120), drawn(1, 300)
    towards = torch.randn(1, 4, 300, 16)
    place = 150
    own = segments[0] == segments[0, place]
    assert 1 < own.sum() < 250
    before = results(lambda q, k, v: function(q, k, v, segments), tensors, towards)
    with torch.no_grad():
        for x in (*tensors, towards):
            x[:, :, place] += 1
    after = results(lambda q, k, v: function(q, k, v, segments), tensors, towards)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:, :, ~own], other[:, :, ~own])
        assert not torch.equal(one[:, :, own], other[:, :, own])


def test_other_shapes_are_refused():
    (q, k, v), segments = drawn(1, 8), torch.zeros(1, 8)
    for wrong, window in ((segments[:, :7], None), (segments[0], None), (segments, 0)):
        with pytest.raises(ConfigurationError, match="segment_attention got segments"):
            segment_attention(q, k, v, wrong, window=window)
    assert segment_attention(q, k, v, segments, window=1).shape == (1, 4, 8, 16)


@pytest.mark.parametrize("window", [None, 20])
def test_masks_of_model_center(window):
    """A mask by segments shows what the mask of all pairs shows, also beside a bias and explicitly."""
    segments, tensors = packed(2, 60, 40), drawn(2, 60)
    mask = AttentionMask(causal=True, segments=segments, window=window)
    pairs = segment_mask(segments)
    pairs = (
        pairs if window is None else pairs & torch.ones(60, 60, dtype=torch.bool).triu(1 - window)
    )
    of_pairs: Any = AttentionMask(pairs=pairs[:, None])
    ways: Any = ((attend, None), (attend, torch.randn(1, 4, 60, 60)), (attend_visibly, None))
    for way, bias in ways:
        got, want = (way(*tensors, each, bias) for each in (mask, of_pairs))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    made: Any = mask.materialized(60, 60, torch.device("cpu"))
    assert torch.equal(made.pairs, of_pairs.pairs)
    assert mask.materialized(60, 60, torch.device("cuda")) is mask
