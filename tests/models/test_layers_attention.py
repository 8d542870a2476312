"""Attention, masks, caches, blocks and stacks against their formulas."""

import itertools
import math

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
from model_center.layer.options import LayerVariant
from model_center.layer.sparse_attention import SparseSelfAttention
from model_center.layer.transformer import Decoder, Encoder

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


@torch.no_grad()
def test_memory_of_a_cache_grows_when_it_must():
    """Room for four tokens, then for twice as many."""
    cache, tokens, places = LayerCache(4), torch.ones(2, 3, 8, 2), []
    for start, stop in ((0, 2), (2, 4), (4, 5), (5, 8)):
        keys, _ = cache.append(tokens[:, :, start:stop], tokens[:, :, start:stop])
        places.append(keys.data_ptr())
    assert places[0] == places[1] != places[2] == places[3] and cache.capacity == 8
    with pytest.raises(IndexError, match="empty"):
        LayerCache()[0]


def test_what_attention_cannot_do_is_refused():
    sizes = SIZES | {"num_heads": 2}
    for window in (0, 3, -2):
        with pytest.raises(ConfigError, match="attention_window"):
            SparseSelfAttention(window, **sizes)
    with pytest.raises(ConfigError, match="'relative'"):
        SparseSelfAttention(4, **sizes, pos_bias_type="relative")
    layer, x = SparseSelfAttention(2, **sizes), torch.randn(1, 5, 6)
    expected = layer(x)
    with pytest.raises(InputError, match="no cache"):
        layer(x, use_cache=True)
    with pytest.raises(InputError, match=r"shape \(1, 4\): expected \(batch, seq\) = \(1, 5\)"):
        layer(x, torch.zeros(1, 4))
    assert torch.equal(layer(x), expected)
    with pytest.raises(InputError, match="neither key_value nor past_key_value"):
        attention()(x, None, None)
    with pytest.raises(ConfigError, match="num_heads_kv is 3"):
        Attention(4, 2, 4, num_heads_kv=3)
    with pytest.raises(ConfigError, match="pos_bias_type is 'absolute'"):
        Attention(4, 2, 4, pos_bias_type="absolute")
    with pytest.raises(ConfigError, match="cross-attention is dense only"):
        CrossAttentionBlock(6, 2, 4, sparse_attention=True)


BLOCK = {"dtype": torch.float32, "norm_bias": True, "norm_eps": 0.1}
BLOCK |= {"att_bias": True, "attn_scale": True, "ffn_bias": True, "ffn_activate_fn": "relu"}


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_parts_that_are_left_out(kind):
    """A layer without a part is one whose part adds zeros. A cache is taken again, has nothing of
    the part, and keeps the encoder's keys, so that its states are not read again.
    """
    decodes, sizes = kind is Decoder, (6, 8, 2, 4)
    parts = 2 + decodes
    masks = [[place == left_out for place in range(parts)] for left_out in (parts, *range(parts))]
    stack, whole = (
        kind(len(masks), *sizes, **BLOCK, mask_modules=masks),
        kind(parts + 1, *sizes, **BLOCK),
    )
    by_hand.drawn(whole, 0.5)
    assert not stack.load_state_dict(whole.state_dict(), strict=False).missing_keys
    for number, layer in enumerate(list(whole.layers)[1:]):
        part = [x for x in (layer.self_att, layer.cross_att, layer.ffn) if x is not None][number]
        for name, param in part.named_parameters():
            if "_out" in name:
                param.requires_grad_(False).zero_()
    x, states, every = noise(2, 5, 6), noise(2, 4, 6), AttentionMask(True)
    valid, bias = torch.tensor([[1, 1, 1, 0], [1] * 4]), noise(2, 5, 4)
    cross = (states, valid, bias) if decodes else ()  # a bias of no effect
    expected = whole(x, every, None, *cross)
    assert_alike(stack(x, every, None, *cross), expected, x, *cross[:1])
    out = stack(x, every, None, *cross, output_attentions=True, return_dict=True)
    for found in (out.attentions, out.cross_attentions) if decodes else (out.attentions,):
        assert len(found) == parts
    with torch.no_grad():
        given = KeyValueCache(len(masks), cross_attention=True) if decodes else None
        first, past = stack(x[:, :3], every, None, *cross, True, given)
        read = (torch.full_like(states, math.nan), *cross[1:]) if decodes else ()
        rest, _ = stack(x[:, 3:], every, None, *read, True, past)
    assert_close(torch.cat([first, rest], 1), expected)


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
