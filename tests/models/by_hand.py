"""Layers against what they compute, written out in plain torch: values and gradients."""

import math

import torch
from tests.models.parity import assert_close


def noise(*shape):
    return torch.randn(*shape, requires_grad=True)


def drawn(module, std=1.0):
    """No parameter keeps a value that hides what it does."""
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(std=std)


def assert_alike(out, expected, *leaves):
    """Values are the same, and so are the gradients of `leaves` and of modules' parameters, of a
    loss that weighs every number differently.
    """
    assert_close(out, expected)
    of_all = []
    for leaf in leaves:
        of_all += leaf.parameters() if isinstance(leaf, torch.nn.Module) else [leaf]
    weight = torch.randn(out.shape)
    found, wanted = (
        torch.autograd.grad(
            (one * weight).sum(),
            of_all,
            retain_graph=True,
            materialize_grads=True,
            allow_unused=True,
        )
        for one in (out, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance=1e-4)


def linear(layer, x):
    product = x @ layer.weight.T / (math.sqrt(layer.dim_in) if layer.length_scale else 1)
    return product if layer.bias is None else product + layer.bias


def layer_norm(layer, x):
    """RMS norm where there is no bias."""
    centred = x if layer.bias is None else x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normed = centred / (variance + layer.eps).sqrt() * layer.weight
    return normed if layer.bias is None else normed + layer.bias


def attention(layer, query, keys, seen=None, bias=None):
    """What attention gives, and its probabilities; a query that sees no key sees all of them.

    `seen` is bool, broadcastable to (batch, queries, keys), `bias` to (batch, heads, queries,
    keys).
    """
    q, k, v = (
        linear(part, x).unflatten(-1, (-1, layer.dim_head)).transpose(1, 2)
        for part, x in ((layer.project_q, query), (layer.project_k, keys), (layer.project_v, keys))
    )
    if layer.norm_q is not None and layer.norm_k is not None:
        q, k = layer_norm(layer.norm_q, q), layer_norm(layer.norm_k, k)
    serves = torch.arange(layer.num_heads) // (layer.num_heads // layer.num_heads_kv)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k[:, serves]) * layer.scale
    scores = scores if bias is None else scores + bias
    if seen is not None:
        scores = scores.where((seen | ~seen.any(-1, keepdim=True))[..., None, :, :], -1e9)
    probabilities = scores.softmax(-1)
    mixed = torch.einsum("bhqk,bhkd->bqhd", probabilities, v[:, serves])
    return linear(layer.attention_out, mixed.flatten(2)), probabilities
