"""Passes of plain layers and of the blocks made of them, compared; and tests that run on ranks."""

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.ranks import models
from tests.tensors import grad_of, sharded_parameter
from torch import Tensor, nn

import bmtrain as bmt

Call = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """A residual layer: (..., dim) to the same."""

    def __init__(self, dim=6, wide=11):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, wide), nn.Linear(wide, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def ask(module, x):
    return module(x)


def blocks_of(layers, **options):
    """A list of copies of the layers, each in a block."""
    return nn.ModuleList([bmt.Block(copy.deepcopy(layer), **options) for layer in layers])


def run(
    layers, x, call=ask, *, share=1, times=1, around=contextlib.nullcontext, before=lambda: None
):
    """A forward pass from seeds after `before`, and backward passes inside of `around`.

    Returns the output and the input's gradient of `share` losses, and where generators stand.
    """
    before()
    torch.manual_seed(4), random.seed(5), np.random.seed(6)
    layers.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    h = leaf * 1.5
    for layer in layers:
        h = call(layer, h)
    loss = h.float().square().mean() / share
    with around(layers):
        for number in range(times):
            loss.backward(retain_graph=number + 1 < times)
    stands = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)
    return [h.detach(), grad_of(leaf) * share], str(stands)


def gradients(blocks):
    """Every parameter's whole gradient by name, all in one collective."""
    ranks: list[Any] = [None] * bmt.world_size()
    dist.all_gather_object(ranks, models.plain_gradients(blocks))
    whole = {}
    for name, param in blocks.named_parameters():
        parts = [x if x is None else x.to(bmt.device()) for x in (part[name] for part in ranks)]
        shape = sharded_parameter(param)._original_shape
        present = [part for part in parts if part is not None]
        whole[name] = None if param.grad is None else torch.cat(present).view(shape)
    return whole


def compare(plain, blocks, what, x, call=ask, *, plainly=None, tolerance=1e-5, **options):
    """A pass of all ranks' equal rows has the values, gradients, buffers and generators of a plain
    one, whose layers are called by `plainly`.
    """
    want, stood = run(plain, x, plainly or call, **options)
    got, stands = run(blocks, x, call, share=bmt.world_size(), **options)
    what = f"{what}, {bmt.world_size()} ranks"
    for mine, theirs, name in zip(got, want, ("value", "gradient of the input"), strict=True):
        models.assert_same(mine, theirs, f"{what}: {name}", tolerance)
    assert stands == stood, f"{what}: generators stand elsewhere"
    models.assert_same_dicts(gradients(blocks), models.plain_gradients(plain), what, tolerance)
    models.assert_same_dicts(dict(blocks.named_buffers()), dict(plain.named_buffers()), what)
