"""Layers that work on each token by itself, against plain torch; first values; constructors as
ModelCenter's.
"""

from __future__ import annotations

import copy
import inspect
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.parity import assert_close

import model_center.layer as layers
from model_center.errors import ConfigError, InputError
from model_center.layer.blocks import (
    CrossAttentionBlock,
    FFNBlock,
    SelfAttentionBlock,
    TransformerBlock,
)
from model_center.layer.conv import Conv2d, Identity
from model_center.layer.dense_attention import Attention
from model_center.layer.embedding import Embedding, PatchEmbedding
from model_center.layer.feedforward import DenseACT, DenseGatedACT, FeedForward, gelu_new
from model_center.layer.layernorm import LayerNorm, rms_layernorm
from model_center.layer.linear import Linear
from model_center.layer.parameter import materialize
from model_center.layer.position_embedding.relative import RelativePositionEmbedding
from model_center.layer.position_embedding.rotary import RotaryEmbedding, RotaryEmbeddingESM
from model_center.layer.position_embedding.segment import SegmentPositionEmbedding
from model_center.layer.sparse_attention import SparseSelfAttention
from model_center.layer.transformer import Decoder, Encoder

HALF = torch.half
REQUIRED = object()  # no default
NORM = [("norm_init_var", 1.0), ("norm_bias", False), ("norm_eps", 1e-5)]
ATTENTION = [
    ("att_init_mean", 0.0),
    ("att_init_std", 0.02),
    ("att_bias", False),
    ("att_mask_value", -math.inf),
]
FFN = [
    ("ffn_init_mean", 0.0),
    ("ffn_init_std", 0.02),
    ("ffn_bias", False),
    ("ffn_activate_fn", "gated_gelu"),
]
DTYPE = [("dtype", HALF), ("int8", False)]
SCALES = [("length_scale", False), ("attn_scale", False), ("dropout_p", 0)]
SPARSE = [("sparse_attention", False), ("attention_window", 512)]


def needed(*names: str) -> list[tuple[str, Any]]:
    return [(name, REQUIRED) for name in names]


# Names, order and defaults of ModelCenter's constructors.
CONSTRUCTORS: dict[Callable[..., Any], list[tuple[str, Any]]] = {
    Linear: [
        *needed("dim_in", "dim_out"),
        ("length_scale", False),
        ("length_scale_before", False),
        *DTYPE,
        ("init_mean", 0.0),
        ("init_std", 1),
        ("bias", False),
    ],
    Embedding: [
        *needed("vocab_size", "embedding_size"),
        ("length_scale", False),
        *DTYPE,
        ("init_mean", 0.0),
        ("init_std", 1),
        ("padding_idx", None),
    ],
    LayerNorm: [
        *needed("dim_norm"),
        ("dtype", HALF),
        ("bias", True),
        ("eps", 1e-5),
        ("init_var", 1.0),
    ],
    Conv2d: [
        *needed("in_channels", "out_channels", "kernel_size"),
        ("stride", 1),
        ("padding", 0),
        ("dilation", 1),
        ("groups", 1),
        ("dtype", torch.float),
        ("int8", False),
        ("init_mean", 0.0),
        ("init_std", 1),
        ("bias", True),
        ("padding_mode", "zeros"),
    ],
    PatchEmbedding: [
        ("img_size", 224),
        ("patch_size", 16),
        ("in_chans", 3),
        ("embed_dim", 768),
        ("flatten", True),
        ("dtype", HALF),
    ],
    FeedForward: [
        *needed("dim_in", "dim_ff"),
        ("dim_out", None),
        *DTYPE,
        ("init_mean", 0.0),
        ("init_std", 0.02),
        ("bias", False),
        ("activate_fn", "gated_gelu"),
        ("length_scale", False),
        ("dropout_p", 0),
    ],
    Attention: [
        *needed("dim_in", "dim_head", "num_heads"),
        ("dim_out", None),
        *DTYPE,
        ("init_mean", 0.0),
        ("init_std", 0.02),
        ("bias", False),
        ("mask_value", -math.inf),
        ("pos_bias_type", "none"),
        *SCALES,
        ("num_heads_kv", -1),
    ],
    RelativePositionEmbedding: [
        *needed("num_heads"),
        ("num_buckets", 32),
        ("max_distance", 128),
        ("bidirectional", False),
        ("dtype", HALF),
        ("init_mean", 0.0),
        ("init_std", 1),
    ],
    RotaryEmbedding: needed("rotary_dim"),
    RotaryEmbeddingESM: [*needed("dim"), ("base", 10000), ("distance_scale", 1), ("dtype", HALF)],
    SegmentPositionEmbedding: [
        *needed("num_heads"),
        ("num_segments", 1),
        ("num_buckets", 32),
        ("max_distance", 128),
        ("bidirectional", False),
        ("dtype", HALF),
        ("absolute_inner_segment", True),
        ("init_mean", 0.0),
        ("init_std", 1),
    ],
    SelfAttentionBlock: [
        *needed("dim_model", "num_heads", "dim_head"),
        *DTYPE,
        *NORM,
        *ATTENTION,
        ("pos_bias_type", "none"),
        ("post_layer_norm", False),
        *SCALES,
        *SPARSE,
        ("num_heads_kv", -1),
    ],
    FFNBlock: [
        *needed("dim_model", "dim_ff"),
        *DTYPE,
        *NORM,
        *FFN,
        ("post_layer_norm", False),
        ("length_scale", False),
        ("dropout_p", 0),
    ],
    Encoder: [
        *needed("num_layers", "dim_model", "dim_ff", "num_heads", "dim_head"),
        *DTYPE,
        *NORM,
        *ATTENTION,
        *FFN,
        ("pos_bias_type", "none"),
        ("post_layer_norm", False),
        *SCALES,
        ("parallel_ffn", False),
        *SPARSE,
        ("mask_modules", None),
        ("num_heads_kv", -1),
    ],
    Decoder: [
        *needed("num_layers", "dim_model", "dim_ff", "num_heads", "dim_head"),
        *DTYPE,
        *NORM,
        *ATTENTION,
        *FFN,
        ("pos_bias_type", "none"),
        *SCALES,
        ("parallel_ffn", False),
        ("mask_modules", None),
    ],
    TransformerBlock: [
        *needed("dim_model", "dim_ff", "num_heads", "dim_head"),
        ("is_decoder", False),
        *DTYPE,
        *NORM,
        *ATTENTION,
        *FFN,
        ("pos_bias_type", "none"),
        ("post_layer_norm", False),
        ("parallel_ffn", False),
        *SCALES,
        *SPARSE,
        ("mask_att", False),
        ("mask_cross", False),
        ("mask_ffn", False),
        ("num_heads_kv", -1),
    ],
}
# Arguments of forward passes that programs give by position.
FORWARDS: dict[Callable[..., Any], str] = {
    Attention: "query key_value attention_mask position_bias use_cache past_key_value",
    SparseSelfAttention: "hidden_states attention_mask position_bias",
    RelativePositionEmbedding: "query key",
    SegmentPositionEmbedding: "key_pos query_pos key_segment query_segment",
    SelfAttentionBlock: "hidden_states attention_mask position_bias use_cache past_key_value",
    CrossAttentionBlock: "hidden_states key_value_states attention_mask position_bias use_cache "
    "past_key_value",
    TransformerBlock: "self_hidden_states self_attention_mask self_position_bias cross_hidden_states "
    "cross_attention_mask "
    "cross_position_bias use_cache past_key_value",
    Encoder: "hidden_states attention_mask position_bias use_cache past_key_values",
    Decoder: "hidden_states attention_mask position_bias cross_hidden_states "
    "cross_attention_mask cross_position_bias use_cache "
    "past_key_values",
}


def positional(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and defaults of the arguments that can be given by position."""
    found = [
        param
        for param in inspect.signature(function).parameters.values()
        if param.kind is param.POSITIONAL_OR_KEYWORD
    ]
    return [
        (param.name, REQUIRED if param.default is param.empty else param.default) for param in found
    ]


@pytest.mark.parametrize("layer", CONSTRUCTORS, ids=lambda layer: layer.__name__)
def test_constructors_are_modelcenters(layer: type) -> None:
    """Further arguments follow, or are by name only."""
    expected = CONSTRUCTORS[layer]
    found = positional(layer)
    assert found[: len(expected)] == expected
    assert all(default is not REQUIRED for _, default in found[len(expected) :])


def test_the_cross_attention_block_takes_what_the_other_does_but_for_heads_of_keys() -> None:
    of_self = CONSTRUCTORS[SelfAttentionBlock]
    mine = [(name, default) for name, default in of_self if name != "num_heads_kv"]
    assert positional(CrossAttentionBlock) == mine


def test_sparse_attention_takes_what_attention_does() -> None:
    found = {
        param.name: param.default
        for param in inspect.signature(SparseSelfAttention).parameters.values()
    }
    assert found.pop("attention_window") == 512
    for name, default in CONSTRUCTORS[Attention]:
        if name != "num_heads_kv":
            assert found[name] == (inspect.Parameter.empty if default is REQUIRED else default)


@pytest.mark.parametrize("layer", FORWARDS, ids=lambda layer: layer.__name__)
def test_forward_arguments_are_modelcenters(layer: Any) -> None:
    names = FORWARDS[layer].split()
    assert [name for name, _ in positional(layer.forward)][1 : 1 + len(names)] == names


def test_public_names() -> None:
    for layer in CONSTRUCTORS:
        assert layers.__dict__[layer.__name__] is layer


def grads(out: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of a loss that weighs every number of `out` differently."""
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad((out * noise).sum(), leaves)


def assert_alike(out: torch.Tensor, expected: torch.Tensor, *leaves: torch.Tensor) -> None:
    """Values and the gradients of `leaves` are the same."""
    assert_close(out, expected)
    for one, other in zip(grads(out, *leaves), grads(expected, *leaves), strict=True):
        assert_close(one, other, tolerance=1e-4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "before"), [(False, False), (True, False), (True, True)])
def test_linear(bias: bool, scale: bool, before: bool) -> None:
    """Scaled before or after: the same value; the bias is never scaled."""
    layer = Linear(
        5,
        3,
        length_scale=scale,
        length_scale_before=before,
        dtype=torch.float32,
        bias=bias,
        init_mean=0.5,
    )
    x = noise(2, 4, 5)
    expected = x @ layer.weight.T / (math.sqrt(5) if scale else 1)
    leaves = [x, layer.weight]
    if bias:
        with torch.no_grad():
            layer.bias.normal_()
        expected, leaves = expected + layer.bias, [*leaves, layer.bias]
    assert_alike(layer(x), expected, *leaves)
    assert (layer.in_features, layer.out_features) == (5, 3)
    assert isinstance(layer, torch.nn.Linear)


def test_scaling_before_the_product_is_safe_in_fp16() -> None:
    """A product that overflows fp16 before it is scaled."""
    layer = Linear(
        4096, 1, length_scale=True, length_scale_before=True, init_mean=10.0, init_std=0.0
    )
    assert layer(torch.full((1, 4096), 10.0).half()).item() == pytest.approx(6400)


def test_embedding() -> None:
    ids = torch.tensor([[3, 0], [6, 3]])
    for scale in (False, True):
        layer = Embedding(7, 4, length_scale=scale, dtype=torch.float32)
        factor = 0.5 if scale else 1.0
        assert_alike(layer(ids), layer.weight[ids] * factor, layer.weight)
        x = noise(2, 3, 4)
        assert_alike(layer.projection(x), x @ layer.weight.T * factor, x, layer.weight)
    assert torch.equal(layer(ids.int()), layer(ids))


@pytest.mark.parametrize("padding_idx", [2, -5])
def test_embedding_of_padding(padding_idx: int) -> None:
    """Row 2 of 7 starts at 0 and learns nothing from lookups; the last row is a row like others."""
    layer = Embedding(7, 4, dtype=torch.float32, padding_idx=padding_idx)
    assert not layer.weight[2].any()
    assert layer.weight[6].all()
    with torch.no_grad():
        layer.weight[2] = 1.0
    (grad,) = torch.autograd.grad(layer(torch.tensor([2, 6, 6])).sum(), [layer.weight])
    assert grad.tolist() == [[0.0] * 4] * 6 + [[2.0] * 4]


def test_embedding_refuses_what_is_no_id() -> None:
    layer = Embedding(7, 4)
    for bad in (torch.tensor([7]), torch.tensor([-1])):
        with pytest.raises(InputError, match="7 rows got ids"):
            layer(bad)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(InputError, match="expected integers"):
            layer(torch.ones(2, dtype=dtype))
    assert layer(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 4)


def test_layer_norm() -> None:
    layer = LayerNorm(6, torch.float32, bias=True, eps=0.1, init_var=3.0)
    assert layer.weight.tolist() == [3.0] * 6
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    x = noise(2, 3, 6)
    centred = x - x.mean(-1, keepdim=True)
    expected = (
        centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * layer.weight + layer.bias
    )
    assert_alike(layer(x), expected, x, layer.weight, layer.bias)


def test_rms_norm() -> None:
    layer = LayerNorm(6, torch.float32, bias=False, eps=0.1)
    assert layer.bias is None
    with torch.no_grad():
        layer.weight.normal_()
    x = noise(2, 3, 6)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * layer.weight
    assert_alike(layer(x), expected, x, layer.weight)
    wide = torch.full((1, 6), 300.0).half()  # whose squares overflow fp16
    assert_close(
        rms_layernorm(wide, torch.ones(6).half(), 1e-6).float(), torch.ones(1, 6), tolerance=1e-2
    )


def test_conv() -> None:
    layer = Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2)
    assert layer.weight.shape == (6, 2, 3, 2)
    with torch.no_grad():
        assert layer.bias is not None
        layer.bias.normal_()
    x = noise(2, 4, 8, 9)
    plain = torch.nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2)
    plain.load_state_dict(layer.state_dict())
    assert plain.bias is not None
    assert_close(layer(x), plain(x))
    found, expected = (
        grads(layer(x), x, layer.weight, layer.bias),
        grads(plain(x), x, plain.weight, plain.bias),
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert Conv2d(1, 1, 1, bias=False).bias is None
    with pytest.raises(ConfigError, match="padding_mode is 'circular'"):
        Conv2d(1, 1, 1, padding_mode="circular")
    assert Identity(3, key=4)(x) is x


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "silu": lambda x: x / (1 + (-x).exp()),
}


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*ACTIVATIONS, *(f"gated_{name}" for name in ACTIVATIONS)])
def test_feed_forward(name: str, bias: bool, scale: bool) -> None:
    layer = FeedForward(
        4, 6, 5, dtype=torch.float32, init_std=1.0, bias=bias, activate_fn=name, length_scale=scale
    )
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_()
    x = noise(2, 3, 4)
    act = ACTIVATIONS[name.removeprefix("gated_")]

    def by_hand(part: Linear, value: torch.Tensor) -> torch.Tensor:
        product = value @ part.weight.T / (math.sqrt(part.dim_in) if scale else 1)
        return product + part.bias if bias else product

    if name.startswith("gated_"):
        assert isinstance(layer.w_in, DenseGatedACT)
        inside = act(by_hand(layer.w_in.w_0, x)) * by_hand(layer.w_in.w_1, x)
    else:
        assert isinstance(layer.w_in, DenseACT)
        inside = act(by_hand(layer.w_in.w, x))
    assert_alike(layer(x), by_hand(layer.w_out, inside), x, *layer.parameters())
    assert_close(gelu_new(x), ACTIVATIONS["gelu_new"](x))


def test_feed_forward_defaults_and_errors() -> None:
    layer = FeedForward(4, 6)
    assert layer.w_out.weight.shape == (4, 6)
    assert layer.w_out.weight.dtype == torch.half
    assert sorted(name for name, _ in layer.named_parameters()) == [
        "w_in.w_0.weight",
        "w_in.w_1.weight",
        "w_out.weight",
    ]
    with pytest.raises(ConfigError, match="unknown activation 'gleu': expected one of relu, gelu"):
        FeedForward(4, 6, activate_fn="gated_gleu")


def test_dropout_is_between_the_maps_and_for_training_only() -> None:
    layer = FeedForward(8, 500, dtype=torch.float32, activate_fn="relu", dropout_p=0.5)
    with torch.no_grad():
        layer.get_parameter("w_in.w.weight").fill_(1.0)
        layer.w_out.weight.fill_(1.0)
    out, x = layer(torch.ones(1, 8)), torch.ones(1, 8)
    assert out[0, 0] != 4000
    assert out[0, 0] / 16 == (out[0, 0] / 16).round()  # each of 500 numbers is dropped, or doubled
    assert 3000 < out[0, 0] < 5000
    layer.eval()
    assert layer(x)[0, 0] == 4000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """All layers keep their dtype forward and backward, and are near their fp32 form."""
    x = torch.randn(2, 3, 8)
    made: list[Callable[[torch.dtype], torch.nn.Module]] = [
        lambda kind: Linear(8, 8, dtype=kind, bias=True, length_scale=True),
        lambda kind: LayerNorm(8, kind),
        lambda kind: LayerNorm(8, kind, bias=False),
        lambda kind: FeedForward(8, 16, dtype=kind, init_std=1.0, length_scale=True),
        lambda kind: Attention(
            8, 4, 2, dtype=kind, init_std=1.0, attn_scale=True, length_scale=True
        ),
        lambda kind: SparseSelfAttention(
            2, dim_in=8, dim_head=4, num_heads=2, dtype=kind, init_std=1.0, attn_scale=True
        ),
    ]
    for make in made:
        wide, narrow = make(torch.float32), make(dtype)
        narrow.load_state_dict(wide.state_dict())
        is_attention = isinstance(wide, Attention) and not isinstance(wide, SparseSelfAttention)
        arguments = (x, x) if is_attention else (x,)
        out = narrow(*(argument.to(dtype) for argument in arguments))
        assert out.dtype == dtype
        expected = wide(*arguments)
        assert (out.float() - expected).norm() / expected.norm() < 0.05
        out.sum().backward()
        for name, param in narrow.named_parameters():
            assert param.dtype == dtype
            assert param.grad is None or param.grad.isfinite().all(), name


def test_int8_does_nothing_anywhere() -> None:
    """As in ModelCenter."""
    made: list[Callable[[], torch.nn.Module]] = [
        lambda: Linear(2, 2, int8=True),
        lambda: Embedding(2, 2, int8=True),
        lambda: Conv2d(1, 1, 1, int8=True),
        lambda: FeedForward(2, 2, int8=True),
        lambda: Attention(2, 2, 1, int8=True),
        lambda: Encoder(1, 2, 2, 1, 2, int8=True),
    ]
    for make in made:
        assert all(param.isfinite().all() for param in make().parameters())


def test_first_values() -> None:
    """Mean and spread as asked, norms and biases at their constants."""
    layer = Linear(200, 200, dtype=torch.float32, init_mean=2.0, init_std=0.5, bias=True)
    assert layer.weight.mean().item() == pytest.approx(2.0, abs=0.02)
    assert layer.weight.std().item() == pytest.approx(0.5, abs=0.02)
    assert not layer.bias.any()
    attention = Attention(64, 16, 4, dtype=torch.float32, init_std=0.3)
    for name in ("project_q", "project_k", "project_v", "attention_out"):
        assert attention.get_parameter(f"{name}.weight").std().item() == pytest.approx(
            0.3, abs=0.02
        )
    block = TransformerBlock(
        64, 128, 4, 16, dtype=torch.float32, norm_init_var=0.7, att_init_std=0.3, ffn_init_std=0.1
    )
    assert block.self_att is not None
    assert block.ffn is not None
    assert block.ffn.get_parameter("layernorm_before_ffn.weight").unique().item() == pytest.approx(
        0.7
    )
    assert block.ffn.ffn.w_out.weight.std().item() == pytest.approx(0.1, abs=0.01)
    assert block.self_att.get_parameter(
        "self_attention.project_v.weight"
    ).std().item() == pytest.approx(0.3, abs=0.02)


def test_meta_device_copies_and_pickles(tmp_path: pathlib.Path) -> None:
    """On the meta device nothing is allocated; `materialize` makes room; copies and state dicts are
    ordinary.
    """
    with torch.device("meta"):
        layer = Encoder(2, 8, 12, 2, 4, dtype=torch.float32)
    assert all(param.is_meta for param in layer.parameters())
    materialize(layer)
    assert not any(param.is_meta for param in layer.parameters())
    source = Encoder(2, 8, 12, 2, 4, dtype=torch.float32)
    layer.load_state_dict(source.state_dict())
    torch.save(source, tmp_path / "whole.pt")
    x = torch.randn(1, 3, 8)
    for other in (
        layer,
        copy.deepcopy(source),
        torch.load(tmp_path / "whole.pt", weights_only=False),
    ):
        assert torch.equal(other(x), source(x))
