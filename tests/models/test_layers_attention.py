"""Attention, masks, caches, blocks and stacks against loops over rows, heads and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.parity import assert_close

from model_center.errors import ConfigError, InputError
from model_center.layer.blocks import (
    CrossAttentionBlock,
    FFNBlock,
    SelfAttentionBlock,
    TransformerBlock,
)
from model_center.layer.cache import KeyValueCache, LayerCache
from model_center.layer.dense_attention import Attention
from model_center.layer.feedforward import DenseACT
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask, last_queries, mask_from, mask_of_lengths
from model_center.layer.position_embedding.relative import RelativePositionEmbedding
from model_center.layer.position_embedding.rotary import RotaryEmbedding
from model_center.layer.sparse_attention import SparseSelfAttention, sparse_mask
from model_center.layer.transformer import Decoder, Encoder

Sees = Callable[[int, int, int], bool]  # row, query, key: whether it is seen


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def everything(row: int, query: int, key: int) -> bool:
    return True


def linear(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """What a map does, by hand."""
    out = x @ layer.weight.T / (math.sqrt(layer.dim_in) if layer.length_scale else 1)
    return out if layer.bias is None else out + layer.bias


def by_hand(
    layer: Attention,
    query: torch.Tensor,
    keys: torch.Tensor,
    sees: Sees = everything,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each row, head and query by itself."""
    q, k, v = (
        linear(layer.project_q, query),
        linear(layer.project_k, keys),
        linear(layer.project_v, keys),
    )
    dim, shared = layer.dim_head, layer.num_heads // layer.num_heads_kv
    out = []
    for row in range(query.shape[0]):
        for place in range(query.shape[1]):
            for head in range(layer.num_heads):
                mine, theirs = (
                    slice(head * dim, head * dim + dim),
                    slice(head // shared * dim, head // shared * dim + dim),
                )
                scores = k[row, :, theirs] @ q[row, place, mine] * layer.scale
                scores = scores if bias is None else scores + bias[head, place]
                seen = torch.tensor([sees(row, place, key) for key in range(keys.shape[1])])
                weights = torch.where(seen, scores, -1e9).softmax(0)
                out.append(weights @ v[row, :, theirs])
    mixed = torch.stack(out).view(*query.shape[:2], layer.num_heads * dim)
    return linear(layer.attention_out, mixed)


def assert_alike(
    layer: torch.nn.Module, out: torch.Tensor, expected: torch.Tensor, *leaves: torch.Tensor
) -> None:
    """Values, and gradients of all parameters and of `leaves`, are the same."""
    assert_close(out, expected)
    weight = torch.randn(out.shape)
    of_all = [*leaves, *layer.parameters()]
    found, wanted = (
        torch.autograd.grad(
            (one * weight).sum(),
            of_all,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for one in (out, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance=1e-4)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def attention(**options: Any) -> Attention:
    """A layer of 4 heads in fp32 whose biases are not 0."""
    sizes: dict[str, Any] = {
        "dim_in": 6,
        "dim_head": 4,
        "num_heads": 4,
        "dtype": torch.float32,
        "init_std": 0.5,
    }
    layer = Attention(**{**sizes, **options})
    with torch.no_grad():
        for name, param in layer.named_parameters():
            if name.endswith("bias"):
                param.normal_()
    return layer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_scale": True, "bias": True},
        {"length_scale": True, "bias": True, "dim_out": 5},
        {"num_heads_kv": 2, "attn_scale": True},
        {"num_heads_kv": 1, "bias": True},
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(options: dict[str, Any], causal: bool) -> None:
    """Scales, biases, shared heads; with and without probabilities asked for."""
    layer, x = attention(**options), noise(2, 5, 6)
    mask = AttentionMask(causal)
    expected = by_hand(
        layer, x, x, (lambda row, query, key: key <= query) if causal else everything
    )
    assert_alike(layer, layer(x, x, mask), expected, x)
    out, probabilities = layer(x, x, mask, output_attentions=True)
    assert_alike(layer, out, expected, x)
    assert probabilities.shape == (2, 4, 5, 5)
    assert_close(probabilities.sum(-1), torch.ones(2, 4, 5))
    assert bool(probabilities.triu(1).any()) != causal


def test_attention_over_other_states() -> None:
    layer, query, keys = attention(bias=True, attn_scale=True), noise(2, 3, 6), noise(2, 7, 6)
    hidden = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [1] * 7])
    expected = by_hand(layer, query, keys, lambda row, _, key: bool(hidden[row, key]))
    assert_alike(layer, layer(query, keys, hidden), expected, query, keys)


VALID = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
PAIRS = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.5
BOTH = PAIRS & VALID[:, None]


@pytest.mark.parametrize(
    ("mask", "sees"),
    [
        (VALID, lambda row, query, key: VALID[row, key]),
        (VALID.half(), lambda row, query, key: VALID[row, key]),
        (PAIRS, lambda row, query, key: PAIRS[row, query, key]),
        (PAIRS.long(), lambda row, query, key: PAIRS[row, query, key]),
        (PAIRS[:, None], lambda row, query, key: PAIRS[row, query, key]),
        (AttentionMask(True, VALID), lambda row, query, key: VALID[row, key] and key <= query),
        (
            AttentionMask(True, VALID, PAIRS[:, None]),
            lambda row, query, key: BOTH[row, query, key] and key <= query,
        ),
        (AttentionMask(True, window=2), lambda row, query, key: query - 2 < key <= query),
        (
            AttentionMask(True, VALID, window=3),
            lambda row, query, key: VALID[row, key] and query - 3 < key <= query,
        ),
        (AttentionMask(True, window=9), lambda row, query, key: key <= query),
        (AttentionMask(pairs=PAIRS[:1, None]), lambda row, query, key: PAIRS[0, query, key]),
    ],
)
def test_masks(mask: Any, sees: Sees) -> None:
    """Every form of a mask; queries that see nothing see everything, so that there is no NaN."""
    layer, x = attention(attn_scale=True), noise(2, 5, 6)
    blind = {
        (row, query)
        for row in range(2)
        for query in range(5)
        if not any(sees(row, query, key) for key in range(5))
    }
    expected = by_hand(
        layer, x, x, lambda row, query, key: (row, query) in blind or bool(sees(row, query, key))
    )
    assert_alike(layer, layer(x, x, mask), expected, x)
    assert_alike(layer, layer(x, x, mask, output_attentions=True)[0], expected, x)


def test_masks_from_arguments() -> None:
    assert mask_from(None, causal=True) == AttentionMask(True)
    assert mask_from(VALID, causal=True).causal
    assert not mask_from(PAIRS, causal=True).causal
    given = AttentionMask(True, VALID)
    assert mask_from(given) is given
    assert mask_of_lengths(torch.tensor([2, 0, 3]), 3).tolist() == [
        [True, True, False],
        [False] * 3,
        [True] * 3,
    ]
    with pytest.raises(InputError, match=r"shape \(5,\)"):
        mask_from(torch.ones(5))
    tail = last_queries(mask_from(PAIRS), 2)
    assert tail.pairs is not None
    assert torch.equal(tail.pairs[:, 0], PAIRS[:, -2:])
    assert AttentionMask(True).visible(1, 7, torch.device("cpu")) is None
    assert AttentionMask(True).is_plain(1, 7)
    assert AttentionMask(True).is_plain(7, 7)
    assert not AttentionMask(True).is_plain(2, 7)
    assert not AttentionMask(True, window=3).is_plain(7, 7)


@pytest.mark.parametrize("batch", [False, True])
def test_relative_bias(batch: bool) -> None:
    """Added to the scores of each head, with a mask as well."""
    layer, x = attention(pos_bias_type="relative"), noise(2, 5, 6)
    bias = noise(4, 5, 5)
    given = bias.expand(2, -1, -1, -1) if batch else bias
    expected = by_hand(layer, x, x, lambda row, query, key: key <= query, bias)
    assert_alike(layer, layer(x, x, AttentionMask(True), given), expected, x, bias)
    assert_alike(
        layer, layer(x, x, AttentionMask(True), given, output_attentions=True)[0], expected, x, bias
    )
    ignoring = attention()
    assert torch.equal(ignoring(x, x, None, bias), ignoring(x, x))


def test_dropout_of_probabilities() -> None:
    """None in evaluation; in training on average the same."""
    layer, x = attention(dropout_p=0.5), torch.randn(1, 5, 6)
    layer.eval()
    expected = by_hand(layer, x, x)
    assert_close(layer(x, x), expected)
    layer.train()
    many = x.expand(4000, -1, -1)
    for options in ({}, {"output_attentions": True}):
        out = layer(many, many, **options)
        out = out[0] if options else out
        assert not torch.equal(out[0], out[1])
        assert_close(out.mean(0, keepdim=True), expected, tolerance=0.1)


@pytest.mark.parametrize("kind", ["none", "relative", "rotary"])
@pytest.mark.parametrize("grad", [False, True])
def test_cache(kind: str, grad: bool) -> None:
    """Tokens in pieces give what they give at once, gradients too where they are wanted."""
    layer, x = attention(pos_bias_type=kind, num_heads_kv=2, attn_scale=True), noise(2, 7, 6)
    relative, rotary = RelativePositionEmbedding(4, dtype=torch.float32), RotaryEmbedding(4)

    def bias(start: int, stop: int) -> Any:
        places = torch.arange(start, stop)
        return {"none": None, "relative": relative(places, stop), "rotary": rotary.tables(places)}[
            kind
        ]

    with torch.set_grad_enabled(grad):
        whole = layer(x, x, AttentionMask(True), bias(0, 7))
        past: Any = None
        pieces = []
        for start, stop in ((0, 3), (3, 4), (4, 7)):
            piece = x[:, start:stop]
            out, past = layer(piece, piece, AttentionMask(True), bias(start, stop), True, past)
            pieces.append(out)
        joined = torch.cat(pieces, 1)
        if kind == "rotary":  # the module itself counts from the cached tokens on
            first, kept = layer(x[:, :3], x[:, :3], AttentionMask(True), rotary, True)
            assert_close(
                torch.cat(
                    [first, layer(x[:, 3:], x[:, 3:], AttentionMask(True), rotary, False, kept)], 1
                ),
                whole,
            )
    assert_close(joined, whole)
    assert [part.shape for part in past] == [(2, 2, 7, 4)] * 2
    if grad:
        assert_alike(layer, joined, whole, x)


def test_a_pair_of_tensors_is_a_cache_too() -> None:
    layer, x = attention(), torch.randn(2, 5, 6)
    with torch.no_grad():
        _, cache = layer(x[:, :3], x[:, :3], AttentionMask(True), use_cache=True)
        keys, values = cache
        out = layer(
            x[:, 3:], x[:, 3:], AttentionMask(True), past_key_value=(keys.clone(), values.clone())
        )
        assert_close(out, layer(x, x, AttentionMask(True))[:, 3:])
        assert_close(
            layer(x[:, :1], None, past_key_value=(keys, values)), by_hand(layer, x[:, :1], x[:, :3])
        )
    with pytest.raises(InputError, match="neither key_value nor past_key_value"):
        layer(x, None)


@torch.no_grad()
def test_layer_cache() -> None:
    """Memory is allocated once, grows when it must, and is chosen from, put in order and cut."""
    cache = LayerCache(4)
    with pytest.raises(IndexError, match="empty"):
        cache[0]
    tokens = torch.arange(2 * 3 * 9 * 2.0).view(2, 3, 9, 2)
    cache.append(tokens[:, :, :2], -tokens[:, :, :2])
    memory = cache[0].untyped_storage().data_ptr()
    cache.append(tokens[:, :, 2:4], -tokens[:, :, 2:4])
    assert cache[0].untyped_storage().data_ptr() == memory
    keys, values = cache.append(tokens[:, :, 4:5], -tokens[:, :, 4:5])
    assert torch.equal(keys, tokens[:, :, :5])
    assert torch.equal(values, -tokens[:, :, :5])
    memory = cache[0].untyped_storage().data_ptr()
    for place in range(5, 8):  # room for twice as many was made
        cache.append(tokens[:, :, place : place + 1], -tokens[:, :, place : place + 1])
    assert cache[0].untyped_storage().data_ptr() == memory
    cache.truncate(3)
    assert cache.length == 3
    assert torch.equal(cache[1], -tokens[:, :, :3])
    cache.append(tokens[:, :, 7:], tokens[:, :, 7:])
    cache.select(torch.tensor([1, 1, 0]))
    expected = torch.cat([tokens[:, :, :3], tokens[:, :, 7:]], 2)
    assert torch.equal(cache[0], expected[[1, 1, 0]])
    cache.reorder(torch.tensor([2, 0, 0]), 3)
    assert torch.equal(cache[0][:, :, 3:], expected[[0, 1, 1], :, 3:])
    assert torch.equal(cache[0][:, :, :3], expected[[1, 1, 0], :, :3])
    assert len(cache) == 2
    assert [part.shape[2] for part in cache] == [5, 5]


def test_cache_of_all_layers() -> None:
    cache = KeyValueCache(2, capacity=8, cross_attention=True)
    keys = torch.randn(2, 1, 3, 4)
    for layer in cache:
        layer.append(keys, keys)
        assert layer.cross is not None
        layer.cross.append(keys[:, :, :2], keys[:, :, :2])
    assert (len(cache), cache.length) == (2, 3)
    cache.select(torch.tensor([1]))
    cache.truncate(2)
    assert torch.equal(cache[1][0], keys[1:, :, :2])
    assert cache[0].cross is not None
    assert cache[0].cross[0].shape[0] == 1
    given = KeyValueCache.of([(keys, keys), None], 2)
    assert given.length == 3
    assert given[1].length == 0
    assert KeyValueCache.of(given, 2) is given
    with pytest.raises(ValueError, match="has 2 layers: expected 3"):
        KeyValueCache.of(given, 3)


def dense_sparse(layer: SparseSelfAttention, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Longformer's attention over all pairs of tokens, token by token."""
    reach = layer.attention_window // 2
    local = by_hand(
        layer,
        x,
        x,
        lambda row, query, key: bool(
            kinds[row, key] >= 0 and (abs(query - key) <= reach or kinds[row, key] > 0)
        ),
    )
    twin = Attention(
        x.shape[-1],
        layer.dim_head,
        layer.num_heads,
        dtype=x.dtype,
        bias=layer.project_q.bias is not None,
    )
    twin.scale = layer.scale
    for name in ("project_q", "project_k", "project_v"):
        twin.__dict__["_modules"][name] = layer.get_submodule(name + "_global")
    twin.__dict__["_modules"]["attention_out"] = layer.attention_out
    seen_by_global = by_hand(twin, x, x, lambda row, query, key: bool(kinds[row, key] >= 0))
    return torch.where((kinds > 0)[..., None], seen_by_global, local)


@pytest.mark.parametrize("length", [1, 3, 4, 9, 16])
@pytest.mark.parametrize("scale", [False, True])
def test_sparse_attention(length: int, scale: bool) -> None:
    """Window and global tokens, for lengths of any kind; what padding says makes no difference."""
    layer = SparseSelfAttention(
        4,
        dim_in=6,
        dim_head=4,
        num_heads=2,
        dtype=torch.float32,
        init_std=0.5,
        bias=True,
        attn_scale=scale,
    )
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(std=0.5)
    x, kinds = noise(2, length, 6), torch.zeros(2, length)
    if length > 4:
        kinds[0, :2], kinds[0, 6], kinds[1, [3, 8]] = -10000.0, 1, 1
    valid = kinds >= 0
    expected = dense_sparse(layer, x, kinds)
    assert_alike(layer, layer(x, kinds)[valid], expected[valid], x)
    out, probabilities = layer(x, kinds, output_attentions=True)
    assert_alike(layer, out[valid], expected[valid], x)
    assert probabilities.shape == (2, 2, length, length)
    if length > 4:
        assert_close(layer(x + 5 * ~valid[..., None], kinds)[valid], expected[valid])
    else:
        assert_close(layer(x), expected)
    assert torch.equal(layer(x, sparse_mask(valid, kinds > 0)), layer(x, kinds))


def test_sparse_attention_refuses_what_it_cannot() -> None:
    sizes: dict[str, Any] = {"dim_in": 4, "dim_head": 2, "num_heads": 2, "dtype": torch.float32}
    for window in (0, 3, -2):
        with pytest.raises(ConfigError, match="attention_window"):
            SparseSelfAttention(window, **sizes)
    with pytest.raises(ConfigError, match="'relative'"):
        SparseSelfAttention(4, **sizes, pos_bias_type="relative")
    layer, x = SparseSelfAttention(4, **sizes), torch.randn(1, 5, 4)
    with pytest.raises(InputError, match="no cache"):
        layer(x, use_cache=True)
    with pytest.raises(InputError, match=r"shape \(1, 4\): expected \(batch, seq\) = \(1, 5\)"):
        layer(x, torch.zeros(1, 4))


def test_attention_refuses_what_it_cannot() -> None:
    with pytest.raises(ConfigError, match="num_heads_kv is 3"):
        Attention(4, 2, 4, num_heads_kv=3)
    with pytest.raises(ConfigError, match="pos_bias_type is 'absolute'"):
        Attention(4, 2, 4, pos_bias_type="absolute")


BLOCK: dict[str, Any] = {"dtype": torch.float32, "norm_bias": True, "norm_eps": 0.1}
ATT: dict[str, Any] = {"att_init_std": 0.5, "att_bias": True, "attn_scale": True}
FF: dict[str, Any] = {"ffn_init_std": 0.5, "ffn_bias": True, "ffn_activate_fn": "relu"}


def relu_network(block: FFNBlock, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(block.ffn.w_in, DenseACT)
    return linear(block.ffn.w_out, linear(block.ffn.w_in.w, x).clamp(min=0))


@pytest.mark.parametrize("post", [False, True])
def test_blocks(post: bool) -> None:
    """The residual is the input, or with norms behind each part the normalised input."""
    x, mask = noise(2, 5, 6), AttentionMask(True)
    attends = SelfAttentionBlock(6, 2, 4, **BLOCK, **ATT, post_layer_norm=post)
    normed = attends.layernorm_before_attention(x)
    expected = (normed if post else x) + by_hand(
        attends.self_attention, normed, normed, lambda row, query, key: key <= query
    )
    assert_alike(attends, attends(x, mask), expected, x)
    out, cache, probabilities, entered = attends(x, mask, None, True, None, True, True)
    assert_close(out, expected)
    assert [part.shape for part in cache] == [(2, 2, 5, 4)] * 2
    assert probabilities.shape == (2, 2, 5, 5)
    assert torch.equal(entered, normed)
    feeds = FFNBlock(6, 8, **BLOCK, **FF, post_layer_norm=post)
    normed = feeds.layernorm_before_ffn(x)
    assert_alike(feeds, feeds(x), (normed if post else x) + relu_network(feeds, normed), x)


def test_cross_attention_block() -> None:
    """Keys are not normalised; those that a cache holds are not computed again."""
    x, states = noise(2, 3, 6), noise(2, 5, 6)
    block, valid = (
        CrossAttentionBlock(6, 2, 4, **BLOCK, **ATT),
        torch.tensor([[1, 1, 1, 0, 0], [1] * 5]),
    )
    expected = x + by_hand(
        block.self_attention,
        block.layernorm_before_attention(x),
        states,
        lambda row, query, key: bool(valid[row, key]),
    )
    assert_alike(block, block(x, states, valid), expected, x, states)
    with torch.no_grad():
        cache = LayerCache()
        first = block(x[:, :1], states, valid, past_key_value=cache)
        rest = block(x[:, 1:], torch.full_like(states, math.nan), valid, past_key_value=cache)
    assert_close(torch.cat([first, rest], 1), expected)
    assert cache.length == 5


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_dropout_of_blocks(dropout_p: float) -> None:
    """What a part adds is dropped as a whole number, the residual never; not in evaluation."""
    x, options = torch.randn(2, 5, 6), {**BLOCK, "dropout_p": dropout_p}
    smooth = {**FF, "ffn_activate_fn": "gelu"}
    for block in (
        SelfAttentionBlock(6, 2, 4, **options, **ATT),
        FFNBlock(6, 8, **options, **smooth),
    ):
        trained = block(x)
        assert bool(((trained - x).abs() < 1e-7).any()) == (dropout_p > 0)
        block.eval()
        assert ((block(x) - x).abs() > 1e-7).all()


@pytest.mark.parametrize("left_out", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_layer(parallel: bool, left_out: tuple[bool, bool]) -> None:
    """Attention, then the network on its result, or beside it on the input; parts can be left
    out.
    """
    mask_att, mask_ffn = left_out
    layer = TransformerBlock(
        6,
        8,
        2,
        4,
        **BLOCK,
        **ATT,
        **FF,
        parallel_ffn=parallel,
        mask_att=mask_att,
        mask_ffn=mask_ffn,
    )
    assert (layer.self_att is None, layer.cross_att is None, layer.ffn is None) == (
        mask_att,
        True,
        mask_ffn,
    )
    x = noise(2, 5, 6)
    after = x if layer.self_att is None else layer.self_att(x)
    expected = after
    if layer.ffn is not None:
        expected = after + relu_network(
            layer.ffn, layer.ffn.layernorm_before_ffn(x if parallel else after)
        )
    assert_alike(layer, layer(x), expected, x)


@pytest.mark.parametrize("post", [False, True])
def test_encoder(post: bool) -> None:
    """Layers in order, some parts left out, and the last norm; hidden states are what enters each
    layer.
    """
    masks = [(False, False), (True, False), (False, True)]
    stack = Encoder(3, 6, 8, 2, 4, **BLOCK, **ATT, **FF, post_layer_norm=post, mask_modules=masks)
    x, hidden, entered = noise(2, 5, 6), None, []
    hidden = x
    layer: Any
    for layer in stack.layers:
        entered.append(
            layer.self_att.layernorm_before_attention(hidden)
            if post and layer.self_att is not None
            else hidden
        )
        hidden = layer(hidden, AttentionMask(True))
    expected = stack.output_layernorm(hidden)
    assert_alike(stack, stack(x, AttentionMask(True)), expected, x)
    out = stack(
        x, AttentionMask(True), output_attentions=True, output_hidden_states=True, return_dict=True
    )
    assert_close(out.last_hidden_state, expected)
    assert len(out.hidden_states) == 4
    for one, other in zip(out.hidden_states, [*entered, expected], strict=True):
        assert_close(one, other)
    assert len(out.attentions) == 2  # one layer has none
    with pytest.raises(ValueError, match="has 2 layers: expected 3"):
        stack(x, past_key_values=[None, None])


def test_encoder_cache_and_old_results() -> None:
    """`use_cache` gives a pair, whose second part is taken again, also as a list of pairs."""
    stack, x = Encoder(2, 6, 8, 2, 4, **BLOCK, **ATT, **FF), torch.randn(2, 5, 6)
    with torch.no_grad():
        whole = stack(x, AttentionMask(True))
        first, past = stack(x[:, :3], AttentionMask(True), use_cache=True)
        copied = [tuple(part.clone() for part in layer) for layer in past]
        rest, past = stack(x[:, 3:], AttentionMask(True), None, True, past)
        again = stack(x[:, 3:], AttentionMask(True), past_key_values=copied)
    assert_close(torch.cat([first, rest], 1), whole)
    assert_close(again, rest)
    assert [layer[0].shape for layer in past] == [(2, 2, 5, 4)] * 2


def test_decoder() -> None:
    """Self-attention, cross-attention, network; a cache keeps the encoder's keys."""
    masks = [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    stack = Decoder(4, 6, 8, 2, 4, **BLOCK, **ATT, **FF, mask_modules=masks)
    x, states, valid = noise(2, 5, 6), noise(2, 4, 6), torch.tensor([[1, 1, 1, 0], [1] * 4])
    hidden = x
    layer: Any
    for layer in stack.layers:
        hidden = hidden if layer.self_att is None else layer.self_att(hidden, AttentionMask(True))
        hidden = hidden if layer.cross_att is None else layer.cross_att(hidden, states, valid)
        hidden = hidden if layer.ffn is None else layer.ffn(hidden)
    expected = stack.output_layernorm(hidden)
    assert_alike(stack, stack(x, AttentionMask(True), None, states, valid), expected, x, states)
    out = stack(
        x, AttentionMask(True), None, states, valid, output_attentions=True, return_dict=True
    )
    assert_close(out.last_hidden_state, expected)
    plain = Decoder(2, 6, 8, 2, 4, **BLOCK, **ATT, **FF)
    with torch.no_grad():
        whole = plain(x, AttentionMask(True), None, states, valid)
        first, past = plain(
            x[:, :3],
            *(AttentionMask(True), None, states, valid),
            use_cache=True,
            past_key_values=KeyValueCache(2, cross_attention=True),
        )
        rest, _ = plain(
            x[:, 3:],
            AttentionMask(True),
            None,
            torch.full_like(states, math.nan),
            valid,
            None,
            True,
            past,
        )
    assert_close(torch.cat([first, rest], 1), whole)
    out = plain(
        x,
        AttentionMask(True),
        None,
        states,
        valid,
        output_attentions=True,
        output_hidden_states=True,
        return_dict=True,
    )
    assert [part.shape for part in out.cross_attentions] == [(2, 2, 5, 4)] * 2
    assert [part.shape for part in out.attentions] == [(2, 2, 5, 5)] * 2
    assert not out.cross_attentions[0][0, :, :, 3].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_masks(dtype: torch.dtype) -> None:
    """Hidden keys and rows without any make no NaN, forward or backward, however large the
    scores.
    """
    layer = Attention(8, 4, 2, dtype=dtype, init_std=3.0, pos_bias_type="relative")
    x = (torch.randn(2, 5, 8) * 3).to(dtype).requires_grad_()
    bias = torch.randn(2, 5, 5)
    for mask in (AttentionMask(True, VALID), PAIRS, VALID):
        for options in ({}, {"output_attentions": True}):
            out = layer(x, x, mask, bias, **options)
            out = out[0] if options else out
            assert out.dtype == dtype
            (grad,) = torch.autograd.grad(out.float().sum(), [x])
            assert out.isfinite().all()
            assert grad.isfinite().all()
