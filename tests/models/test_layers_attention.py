"""Attention, masks, caches, blocks and stacks against their formulas."""

import itertools
import math
from typing import Any

import pytest
import torch
from tests.models import by_hand
from tests.models.by_hand import assert_alike, noise
from tests.models.parity import assert_close

from model_center.errors import ConfigError, InputError
from model_center.layer.blocks import CrossAttentionBlock, SelfAttentionBlock
from model_center.layer.cache import KeyValueCache, LayerCache
from model_center.layer.dense_attention import Attention
from model_center.layer.mask import AttentionMask, last_queries, mask_from, mask_of_lengths
from model_center.layer.position_embedding.relative import RelativePositionEmbedding
from model_center.layer.position_embedding.rotary import RotaryEmbedding
from model_center.layer.sparse_attention import SparseSelfAttention
from model_center.layer.transformer import Decoder, Encoder
from model_center.layer.variant import LayerVariant

SIZES = {"dim_in": 6, "dim_head": 4, "dtype": torch.float32, "init_std": 0.5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def attention(**options):
    """A layer of 4 heads in fp32."""
    layer = Attention(**SIZES | {"num_heads": 4} | options)
    by_hand.drawn(layer, 0.5)
    return layer


LATER = torch.ones(5, 5).tril().bool()
VALID = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
PAIRS = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.5
PAIRS[1, 2] = False
ROWS = VALID[:, None]
MASKS = [
    (None, LATER | True),
    (AttentionMask(True), LATER),
    (VALID, ROWS),
    (VALID.half(), ROWS),
    (PAIRS, PAIRS),
    (PAIRS.long(), PAIRS),
    (PAIRS[:, None], PAIRS),
    (AttentionMask(True, VALID), ROWS & LATER),
    (AttentionMask(True, VALID, PAIRS[:, None]), PAIRS & ROWS & LATER),
    (AttentionMask(True, window=2), LATER.triu(-1)),
    (AttentionMask(True, VALID, window=3), ROWS & LATER.triu(-2)),
    (AttentionMask(True, window=9), LATER),
    (AttentionMask(pairs=PAIRS[1:, None]), PAIRS[1:]),
]
OPTIONS = [
    {"attn_scale": True, "bias": True},
    {"length_scale": True, "bias": True, "dim_out": 5},
    {"num_heads_kv": 2, "attn_scale": True, "pos_bias_type": "relative"},
    {"num_heads_kv": 1, "bias": True},
    {"bias": True, "variant": LayerVariant(out_bias=False, head_norm_eps=0.1)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_attention(options):
    """Scales, biases, shared heads, norms of heads, under every form of a mask, with and without
    probabilities asked for.

    A query that sees nothing gets nothing where the mask is of pairs, else it is padding.
    """
    layer, x, bias = attention(**options), noise(2, 5, 6), noise(4, 5, 5)
    ways = [None, bias, bias.expand(2, -1, -1, -1)]
    for (mask, seen), given in itertools.product(
        MASKS, ways[: 3 if "pos_bias_type" in options else 1]
    ):
        expected, chances = by_hand.attention(layer, x, x, seen, given)
        if isinstance(mask, torch.Tensor) and mask.dim() > 2:
            shown = seen.any(-1)[:, None, :, None]
            mixed = torch.zeros(4).expand(2, 4, 5, 4)
            empty = by_hand.linear(layer.attention_out, mixed.transpose(1, 2).flatten(2))
            expected, chances = expected.where(shown[:, 0], empty), chances * shown
        leaves = (x, layer) if given is None else (x, layer, bias)
        assert_alike(layer(x, x, mask, given), expected, *leaves)
        out, probabilities = layer(x, x, mask, given, output_attentions=True)
        assert_alike(out, expected, *leaves)
        assert_close(probabilities, chances)


def test_masks():
    assert mask_from(None, causal=True) == AttentionMask(True)
    assert mask_from(VALID, causal=True).causal and not mask_from(PAIRS, causal=True).causal
    assert mask_of_lengths(torch.tensor([2, 0, 3]), 3).int().tolist() == [
        [1, 1, 0],
        [0] * 3,
        [1] * 3,
    ]
    with pytest.raises(InputError, match=r"shape \(5,\)"):
        mask_from(torch.ones(5))
    tail = last_queries(mask_from(PAIRS), 2)
    assert tail.pairs is not None and torch.equal(tail.pairs[:, 0], PAIRS[:, -2:])
    # no tensor where none is needed
    assert AttentionMask(True).visible(1, 7, torch.device("cpu")) is None
    for window, queries, is_plain in (
        (None, 1, 1),
        (None, 7, 1),
        (None, 2, 0),
        (3, 7, 0),
        (7, 7, 1),
    ):
        assert AttentionMask(True, window=window).is_plain(queries, 7) == is_plain


@pytest.mark.parametrize("kind", ["none", "relative", "rotary"])
def test_cache(kind):
    """Tokens in pieces give what they give at once, gradients too where they are wanted."""
    layer, x = attention(pos_bias_type=kind, num_heads_kv=2, attn_scale=True), noise(2, 7, 6)
    relative, rotary = RelativePositionEmbedding(4, dtype=torch.float32), RotaryEmbedding(4)

    def bias(start, stop):
        places = torch.arange(start, stop)
        # the rotary module itself counts from the cached tokens on
        turns = rotary if start else rotary.tables(places)
        return {"none": None, "relative": relative(places, stop), "rotary": turns}[kind]

    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            whole, past, pieces = layer(x, x, AttentionMask(True), bias(0, 7)), None, []
            for start, stop in ((0, 3), (3, 4), (4, 7)):
                given = (x[:, start:stop],) * 2
                out, past = layer(*given, AttentionMask(True), bias(start, stop), True, past)
                pieces.append(out)
        joined = torch.cat(pieces, 1)
        assert_close(joined, whole)
        if grad:
            assert_alike(joined, whole, x, layer)
        assert past and [part.shape for part in past] == [(2, 2, 7, 4)] * 2
        if kind == "none":
            found = layer(x[:, :1], None, past_key_value=tuple(past))
            assert_close(found, by_hand.attention(layer, x[:, :1], x)[0])
    with pytest.raises(InputError, match="neither key_value nor past_key_value"):
        layer(x, None, None, bias(0, 7))


@torch.no_grad()
def test_layer_cache():
    """Memory is allocated once, grows when it must, and is chosen from, put in order and cut."""
    cache, places = LayerCache(4), []
    with pytest.raises(IndexError, match="empty"):
        cache[0]
    tokens = torch.arange(2 * 3 * 9 * 2.0).view(2, 3, 9, 2)
    for start, stop in ((0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8)):
        keys, values = cache.append(tokens[:, :, start:stop], -tokens[:, :, start:stop])
        assert torch.equal(keys, tokens[:, :, :stop]) and torch.equal(values, -keys)
        places.append(keys.data_ptr())
    # room for four, then for twice as many
    assert places[0] == places[1] != places[2] == places[-1] and cache.capacity == 8
    for length in (3, 7):
        cache.truncate(length)
        assert cache.length == 3 and torch.equal(cache[1], -tokens[:, :, :3])
    cache.append(tokens[:, :, 7:], tokens[:, :, 7:])
    cache.select(torch.tensor([1, 1, 0]))
    expected = tokens[[1, 1, 0]][:, :, [0, 1, 2, 7, 8]]
    assert torch.equal(cache[0], expected)
    cache.reorder(torch.tensor([2, 0, 0]), 3)
    expected[:, :, 3:] = expected[[2, 0, 0], :, 3:]
    assert torch.equal(cache[0], expected) and len([*cache]) == len(cache) == 2


def test_what_attention_cannot_do_is_refused():
    sizes = SIZES | {"num_heads": 2}
    for window in (0, 3, -2):
        with pytest.raises(ConfigError, match="attention_window"):
            SparseSelfAttention(window, **sizes)
    with pytest.raises(ConfigError, match="'relative'"):
        SparseSelfAttention(4, **sizes, pos_bias_type="relative")
    layer, x = SparseSelfAttention(4, **sizes), torch.randn(1, 5, 6)
    expected = layer(x)
    with pytest.raises(InputError, match="no cache"):
        layer(x, use_cache=True)
    with pytest.raises(InputError, match=r"shape \(1, 4\): expected \(batch, seq\) = \(1, 5\)"):
        layer(x, torch.zeros(1, 4))
    assert torch.equal(layer(x), expected)
    with pytest.raises(ConfigError, match="num_heads_kv is 3"):
        Attention(4, 2, 4, num_heads_kv=3)
    with pytest.raises(ConfigError, match="pos_bias_type is 'absolute'"):
        Attention(4, 2, 4, pos_bias_type="absolute")
    with pytest.raises(ConfigError, match="cross-attention is dense only"):
        CrossAttentionBlock(6, 2, 4, sparse_attention=True)


BLOCK: dict[str, Any] = {"dtype": torch.float32, "norm_bias": True, "norm_eps": 0.1}
BLOCK |= {"att_bias": True, "attn_scale": True, "ffn_bias": True, "ffn_activate_fn": "relu"}


def of_layer(layer, x, states, valid, post=False):
    """What a layer gives, causal in itself, and what its self-attention reads."""
    hidden = entered = x
    if layer.self_att is not None:
        entered = by_hand.layer_norm(layer.self_att.layernorm_before_attention, x)
        found, _ = by_hand.attention(layer.self_att.self_attention, entered, entered, LATER)
        hidden = (entered if post else x) + found
    if layer.cross_att is not None:
        normed = by_hand.layer_norm(layer.cross_att.layernorm_before_attention, hidden)
        of_cross = layer.cross_att.self_attention
        hidden = hidden + by_hand.attention(of_cross, normed, states, valid[:, None].bool())[0]
    if layer.ffn is not None:
        normed = by_hand.layer_norm(
            layer.ffn.layernorm_before_ffn, x if layer.parallel_ffn else hidden
        )
        inner = by_hand.linear(layer.ffn.ffn.w_in.w, normed).relu()
        base = normed if post and not layer.parallel_ffn else hidden
        hidden = base + by_hand.linear(layer.ffn.ffn.w_out, inner)
    return hidden, entered


@pytest.mark.parametrize(
    "kind", ["encoder", "norms behind", "parallel", "decoder", "parallel decoder"]
)
def test_stacks(kind):
    """Layers in order, some parts left out, and the last norm; hidden states are what enters each
    layer; a cache is taken again, also as a list of pairs, and keeps the encoder's keys, so that
    its states are not read again.
    """
    post, decodes = kind == "norms behind", "decoder" in kind
    parts = 2 + decodes
    masks = [[place == left_out for place in range(parts)] for left_out in (parts, *range(parts))]
    more: dict[str, Any] = {"parallel_ffn": "parallel" in kind}
    more |= {} if decodes else {"post_layer_norm": post, "num_heads_kv": 1}
    stack: Any = Decoder if decodes else Encoder
    stack = stack(len(masks), 6, 8, 2, 4, **BLOCK, **more, mask_modules=masks)
    by_hand.drawn(stack, 0.5)
    x, states, valid = noise(2, 5, 6), noise(2, 4, 6), torch.tensor([[1, 1, 1, 0], [1] * 4])
    hidden, every, entering = x, AttentionMask(True), []
    for layer in stack.layers:
        before = hidden
        hidden, entered = of_layer(layer, hidden, states, valid, post)
        entering.append(entered if post else before)
    expected = by_hand.layer_norm(stack.output_layernorm, hidden)
    bias = noise(2, 5, 4)  # of no effect without relative positions
    cross: tuple[Any, ...] = (states, valid, bias) if decodes else ()
    assert_alike(stack(x, every, None, *cross), expected, x, states, stack)
    wanted = {"output_attentions": True, "output_hidden_states": True, "return_dict": True}
    for wanted["use_cache"] in (False, True):
        out = stack(x, every, None, *cross, **wanted)
        for one, other in zip(out.hidden_states, [*entering, expected], strict=True):
            assert_close(one, other)
        assert_close(out.last_hidden_state, expected)
        for part in out.attentions:
            assert part.shape == (2, 2, 5, 5) and not part.triu(1).any()
        assert (out.cross_attentions is not None) == decodes
        for part in out.cross_attentions or ():
            assert part.shape == (2, 2, 5, 4) and not part[0, :, :, 3].any()
        # of each kind, one layer has none
        assert {len(x) for x in (out.attentions, out.cross_attentions) if x} == {len(masks) - 1}
        assert (out.past_key_values is not None) == wanted["use_cache"]
    with pytest.raises(ValueError, match="has 1 layers: expected"):
        stack(x, past_key_values=[None])
    with torch.no_grad():
        given = KeyValueCache(len(masks), cross_attention=True) if decodes else None
        first, past = stack(x[:, :3], every, None, *cross, True, given)
        pairs = past.pairs if decodes else past
        copied = [pair and tuple(part.clone() for part in pair) for pair in pairs]
        read = (torch.full_like(states, math.nan), *cross[1:]) if decodes else ()
        rest, _ = stack(x[:, 3:], every, None, *read, True, past)
        again = stack(x[:, 3:], every, None, *cross, past_key_values=copied)
    assert_close(torch.cat([first, rest], 1), expected)
    assert_close(again, rest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_masks(dtype):
    """Hidden keys and rows without any make no NaN, forward or backward, however large the
    scores.
    """
    layer = Attention(8, 4, 2, dtype=dtype, init_std=3.0, pos_bias_type="relative")
    x = (torch.randn(2, 5, 8) * 3).to(dtype).requires_grad_()
    for mask, seen in itertools.product((AttentionMask(True, VALID), PAIRS, VALID), (False, True)):
        out = layer(x, x, mask, torch.randn(2, 5, 5), output_attentions=seen)
        out = out[0] if seen else out
        (grad,) = torch.autograd.grad(out.float().sum(), [x])
        assert out.dtype == dtype and out.isfinite().all() and grad.isfinite().all()


def test_compiled_blocks_make_no_mask_of_pairs():
    """Causal attention stays the kernel's own in compiled code, where a mask would cost its speed."""
    kernel, found = torch.nn.functional.scaled_dot_product_attention, []

    def backend(graph, _):
        found.extend(node.kwargs for node in graph.graph.nodes if node.target is kernel)
        return graph.forward

    sizes = {"dim_model": 8, "num_heads": 2, "dim_head": 4, "dtype": torch.float32}
    block, x = SelfAttentionBlock(**sizes), torch.randn(2, 5, 8)
    by_hand.drawn(block, 0.5)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    assert_close(compiled(x, AttentionMask(True)), block(x, AttentionMask(True)))
    (options,) = found
    assert options["is_causal"] and options.get("attn_mask") is None
