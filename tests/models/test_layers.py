"""Layers that work on each token by itself, against plain torch; first values; wrong arguments."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from tests.models import by_hand
from tests.models.by_hand import assert_alike, noise
from tests.models.parity import assert_close
from transformers.activations import ACT2FN

import model_center.layer as layers
from model_center.errors import ConfigError, InputError
from model_center.layer.conv import Conv2d, Identity, to_2tuple
from model_center.layer.dense_attention import Attention
from model_center.layer.embedding import Embedding
from model_center.layer.feedforward import FeedForward
from model_center.layer.layernorm import LayerNorm, rms_layernorm
from model_center.layer.linear import Linear
from model_center.layer.parameter import materialize
from model_center.layer.sparse_attention import SparseSelfAttention
from model_center.layer.transformer import Encoder


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "name", ["Linear", "FeedForward", "Attention", "FFNBlock", "Encoder", "Decoder"]
)
def test_wrong_arguments_are_named(name):
    """Those that there are, and their order, are in the table of import paths."""
    layer = getattr(layers, name)
    with pytest.raises(TypeError, match="no_such_argument"):
        layer(no_such_argument=3)
    if name == "FFNBlock":
        with pytest.raises(TypeError, match=f"{name}: missing a required argument: 'dim_model'"):
            layer()


def test_other_attentions_take_what_attention_does():
    found, of_dense = (inspect.signature(x).parameters for x in (SparseSelfAttention, Attention))
    assert found.keys() >= of_dense.keys() - {"num_heads_kv", "variant"}
    assert "num_heads_kv" not in inspect.signature(layers.CrossAttentionBlock).parameters


def test_linear():
    """Scaled before or after: the same value; the bias is never scaled."""
    for scale, before, bias in itertools.product((False, True), repeat=3):
        options = {"length_scale": scale, "length_scale_before": before}
        layer = Linear(5, 3, dtype=torch.float32, int8=True, bias=bias, init_mean=0.5, **options)
        by_hand.drawn(layer)
        x = noise(2, 4, 5)
        assert_alike(layer(x), by_hand.linear(layer, x), x, layer)
        assert (layer.in_features, layer.out_features) == (5, 3)
        assert isinstance(layer, torch.nn.Linear)
    # a product that overflows fp16 before it is scaled
    wide = Linear(4096, 1, True, True, init_mean=10.0, init_std=0.0)
    assert wide(torch.full((1, 4096), 10.0).half()).item() == pytest.approx(6400)


def test_embedding():
    ids = torch.tensor([[3, 0], [6, 3]])
    for scale, factor in ((False, 1.0), (True, 0.5)):
        layer = Embedding(7, 4, length_scale=scale, dtype=torch.float32, int8=True)
        assert_alike(layer(ids), layer.weight[ids] * factor, layer)
        x = noise(2, 3, 4)
        assert_alike(layer.projection(x), x @ layer.weight.T * factor, x, layer)
    for bad in (torch.tensor([7]), torch.tensor([-1])):
        with pytest.raises(InputError, match="7 rows got ids"):
            layer(bad)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(InputError, match="expected integers"):
            layer(torch.ones(2, dtype=dtype))
    assert torch.equal(layer(ids.int()), layer(ids))
    assert layer(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 4)
    for padding_idx in (2, -5):
        layer = Embedding(7, 4, dtype=torch.float32, padding_idx=padding_idx)
        assert not layer.weight[2].any() and layer.weight[6].all()
        with torch.no_grad():
            layer.weight[2] = 1.0
        out = layer(torch.tensor([2, 6, 6]))
        (grad,) = torch.autograd.grad(out.sum(), [layer.weight])
        assert out[0].all() and grad.tolist() == [[0.0] * 4] * 6 + [[2.0] * 4]


def test_norms():
    """Layer norm with a bias, RMS norm without."""
    for bias in (True, False):
        layer = LayerNorm(6, torch.float32, bias=bias, eps=0.1, init_var=3.0)
        assert layer.weight.tolist() == [3.0] * 6 and (layer.bias is not None) == bias
        by_hand.drawn(layer)
        x = noise(2, 3, 6)
        assert_alike(layer(x), by_hand.layer_norm(layer, x), x, layer)
    wide = torch.full((1, 6), 300.0).half()  # whose squares overflow fp16
    found = rms_layernorm(wide, torch.ones(6).half(), 1e-6).float()
    assert_close(found, torch.ones(1, 6), tolerance=1e-2)


def test_conv():
    sizes = (4, 6, (3, 2), 2, 1, (1, 2), 2)
    layer, x = Conv2d(*(*sizes, torch.float32, True)), noise(2, 4, 8, 9)
    assert not layer.state_dict()["bias"].any() and Conv2d(1, 1, 1, bias=False).bias is None
    by_hand.drawn(layer)
    torch.nn.Conv2d(*sizes).load_state_dict(layer.state_dict())
    expected = torch.nn.functional.conv2d(x, layer.weight, layer.bias, *sizes[3:])
    assert_alike(layer(x), expected, x, layer)
    with pytest.raises(ConfigError, match="padding_mode is 'circular'"):
        Conv2d(1, 1, 1, padding_mode="circular")
    assert Identity(3, key=4)(x) is x
    assert to_2tuple(3) == (3, 3) and to_2tuple((3, 4)) == (3, 4)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "silu"])
def test_feed_forward(name):
    """Plain and gated, with scales and biases."""
    act, x, linear = ACT2FN[name], noise(2, 3, 4), by_hand.linear
    for bias, scale in itertools.product((False, True), repeat=2):
        options = {"bias": bias, "length_scale": scale, "int8": True}
        for gate in ("", "gated_"):
            layer = FeedForward(4, 6, 5, torch.float32, activate_fn=gate + name, **options)
            by_hand.drawn(layer)
            first, *second = layer.w_in.maps
            inside = act(linear(first, x))
            for up in second:
                inside = inside * linear(up, x)
            assert len(second) == bool(gate)
            assert_alike(layer(x), linear(layer.w_out, inside), x, layer)


def test_feed_forward_defaults_errors_and_dropout():
    """Dropout is between the maps, and for training only."""
    names = [name for name, _ in FeedForward(4, 6).named_parameters()]
    assert names == ["w_in.w_0.weight", "w_in.w_1.weight", "w_out.weight"]
    assert FeedForward(4, 6).w_out.weight.shape == (4, 6)
    with pytest.raises(ConfigError, match="unknown activation 'gleu': expected one of relu, gelu"):
        FeedForward(4, 6, activate_fn="gated_gleu")
    layer, x = (
        FeedForward(8, 500, None, torch.float32, False, 1.0, 0.0, dropout_p=0.5),
        torch.ones(1, 8),
    )
    of_each = layer.eval()(x)[0, 0] / 500
    found = layer.train()(x)[0, 0] / of_each
    # each of 500 numbers is dropped, or doubled
    assert found != 500 and 375 < found < 625 and abs(found / 2 - (found / 2).round()) < 1e-3


def test_materialized_layers_keep_their_ties():
    """On the meta device nothing is allocated; `materialize` makes room."""
    with torch.device("meta"):
        layer: Any = Encoder(2, 8, 12, 2, 4, dtype=torch.float32)
        one, other = (part.ffn.ffn.w_out for part in layer.layers)
        one.weight = other.weight.requires_grad_(False)
    assert all(param.is_meta for param in layer.parameters())
    materialize(layer)
    assert one.weight is other.weight and not one.weight.requires_grad
    source = Encoder(2, 8, 12, 2, 4, dtype=torch.float32)
    layer.load_state_dict(source.state_dict())
    assert not any(param.is_meta for param in layer.parameters())
    for name, param in layer.named_parameters():
        assert "w_out" in name or param.equal(source.get_parameter(name))
