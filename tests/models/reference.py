"""The models of ModelCenter that transformers does not have, as its catalogue describes them:
explicit softmax in fp64, weights by name.
"""

import dataclasses
import json
import math
from typing import Any

import torch
from tests.models import parity
from tests.models.parity import assert_close
from torch import Tensor

from model_center.model.outputs import BaseModelOutput

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, Tensor]


def layer_shapes(prefix, dim, inner, wide, kind):
    """Names and shapes of one layer's tensors in ModelCenter's files.

    Args:
        dim, inner, wide: width of the model, of all heads, of the feed-forward network.
        kind: "encoder" or "decoder", gated and without biases; "biased".
    """
    shapes: dict[str, Any] = {}
    for part in ("self_att", "cross_att") if kind == "decoder" else ("self_att",):
        shapes[f"{prefix}{part}.layernorm_before_attention"] = (dim,)
        for name in ("project_q", "project_k", "project_v"):
            shapes[f"{prefix}{part}.self_attention.{name}"] = (inner, dim)
        shapes[f"{prefix}{part}.self_attention.attention_out"] = (dim, inner)
    shapes[f"{prefix}ffn.layernorm_before_ffn"] = (dim,)
    for name in ("w",) if kind == "biased" else ("w_0", "w_1"):
        shapes[f"{prefix}ffn.ffn.w_in.{name}"] = (wide, dim)
    shapes[f"{prefix}ffn.ffn.w_out"] = (dim, wide)
    return tensors_of(shapes, biased=kind == "biased")


def tensors_of(parts, *, biased):
    """Weights, and biases, of these parts."""
    weights = {f"{name}.weight": shape for name, shape in parts.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in parts.items() if biased}


def write_files(folder, shapes, config, std):
    """A folder of ModelCenter with random weights, which are returned in fp64 as leaves that take
    gradients.
    """
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * std
        + (len(shape) == 1 and "bias" not in name)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.pt")
    return {name: tensor.double().requires_grad_() for name, tensor in weights.items()}


@dataclasses.dataclass(frozen=True)
class Reference:
    """The arithmetic, over weights by name. Norms with biases are LayerNorms, others RMSNorms."""

    weights: Weights
    num_heads: int
    length_scale: bool = False
    attn_scale: bool = True

    def linear(self, x, name):
        weight = self.weights[f"{name}.weight"]
        out = x @ weight.T / (math.sqrt(weight.shape[1]) if self.length_scale else 1)
        return out + self.weights.get(f"{name}.bias", torch.zeros(()))

    def norm(self, x, name):
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if bias is None:
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    def attention(self, x, states, name, seen, bias):
        """Of `x` over `states`, by `seen` (batch, queries, keys); a query that sees nothing gets
        zeros.
        """
        q, k, v = (
            self.linear(of, f"{name}.project_{part}").unflatten(-1, (self.num_heads, -1))
            for of, part in ((x, "q"), (states, "k"), (states, "v"))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores = scores / math.sqrt(q.shape[-1]) if self.attn_scale else scores
        scores = scores if bias is None else scores + bias
        powers = (scores - scores.detach().amax(-1, keepdim=True)).exp() * seen[:, None]
        shares = powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)
        mixed = torch.einsum("bhqk,bkhd->bqhd", shares, v)
        return self.linear(mixed.flatten(2), f"{name}.attention_out")

    def ffn(self, x, name):
        gated = f"{name}.w_in.w_0.weight" in self.weights
        inside = self.linear(x, f"{name}.w_in.w{'_0' if gated else ''}")
        inside = inside * 0.5 * (1 + torch.erf(inside / math.sqrt(2)))
        inside = inside * self.linear(x, f"{name}.w_in.w_1") if gated else inside
        return self.linear(inside, f"{name}.w_out")

    def stack(self, x, name, seen, bias=None, states=None, seen_states=None):
        """All layers and the last norm; with `states`, decoder layers over those of an encoder."""
        layers = {key.split(".")[2] for key in self.weights if key.startswith(f"{name}.layers.")}
        for layer in sorted(layers):
            prefix = f"{name}.layers.{layer}."
            normed = self.norm(x, prefix + "self_att.layernorm_before_attention")
            x = x + self.attention(normed, normed, prefix + "self_att.self_attention", seen, bias)
            if states is not None:
                assert seen_states is not None
                normed = self.norm(x, prefix + "cross_att.layernorm_before_attention")
                x = x + self.attention(
                    normed, states, prefix + "cross_att.self_attention", seen_states, None
                )
            x = x + self.ffn(self.norm(x, prefix + "ffn.layernorm_before_ffn"), prefix + "ffn.ffn")
        return self.norm(x, f"{name}.output_layernorm")


def prefix_seen(length, mask=None, context=None, span=None):
    """Which keys each query sees, bool (2, length, length): valid ones of its span, of the context
    or, unless it is in the context itself, those before it.
    """
    seen = torch.ones(length, length).tril().bool().expand(2, -1, -1)
    if context is not None:
        inside = context.bool()
        seen = inside[:, None] | (~inside[:, :, None] & seen)
    if span is not None:
        seen = seen & (span[:, None] == span[:, :, None])
    return seen if mask is None else seen & mask.bool()[:, None]


def assert_same_answers(ours, weights, scores, expected, valid):
    """Scores of valid tokens, and the gradients of all weights of a loss of them."""
    assert_close(scores[valid], expected[valid], "logits")
    ours.zero_grad()
    for one in (scores, expected):
        parity.loss_of(BaseModelOutput(logits=one), valid).backward()
    own = dict(ours.named_parameters())
    assert own.keys() == weights.keys()
    for name, weight in weights.items():
        found, grad = (
            torch.zeros_like(weight) if one.grad is None else one.grad
            for one in (own[name], weight)
        )
        tolerance = parity.TOLERANCE * max(1.0, grad.abs().max().item())
        assert_close(found, grad, f"gradient of {name}", tolerance)
