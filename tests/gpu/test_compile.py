"""Blocks compile by default on a GPU: once for equal ones, exact, and never in the way of what does
not compile.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of

import bmtrain as bmt
from model_center.layer import TransformerBlock
from model_center.layer.mask import AttentionMask

pytestmark = pytest.mark.gpu


def assert_compiled(block):
    """There is compiled code for the block, and it has not been given up."""
    structure = block._runner
    assert structure._programs, "it was not tried"
    assert not structure._is_refused, "it ran uncompiled"


class Layer(torch.nn.Module):
    """Attention and a feed-forward part: (batch, length, dim) to the same."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.last = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, 4 * dim), torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.last(x))))


class WithItem(Layer):
    """Reads a number back: no graph."""

    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


def found(layers, x, scale):
    h = leaf = x.clone().requires_grad_()
    for layer in layers:
        layer.zero_grad()
        h = layer(h)
    (h.sin().sum() / scale).backward()
    return [h.detach(), grad_of(leaf) * scale]


def check(plain, recompute, level, x):
    want = found(plain, x, 1)
    blocks = torch.nn.ModuleList(
        [bmt.Block(copy.deepcopy(m), use_checkpoint=recompute, zero_level=level) for m in plain]
    )
    for number in range(2):
        what = f"ZeRO-{level}, recompute={recompute}, pass {number}"
        for mine, theirs in zip(found(blocks, x, bmt.world_size()), want, strict=True):
            models.assert_same(mine, theirs, what, 2e-5)
        models.assert_same_dicts(
            models.full_gradients(blocks), models.plain_gradients(plain), what, 5e-5
        )
    return blocks


def exact():
    torch.backends.cuda.matmul.allow_tf32 = False
    for recompute, level in ((False, 2), (False, 3), (True, 3)):
        torch.manual_seed(1)
        plain = torch.nn.ModuleList([Layer() for _ in range(4)]).to(bmt.device())
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        x = torch.randn(
            2, 24, 64, device=bmt.device(), generator=torch.Generator(bmt.device()).manual_seed(7)
        )
        blocks = check(plain, recompute, level, x)
        assert_compiled(blocks[0])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 1
        check(plain, recompute, level, x[:, :17])  # other lengths
        check(plain, recompute, level, x[:, :11])


def test_compiled_by_default_and_exact():
    run_ranks(exact, torch.cuda.device_count(), device=None, timeout=300)


def language_model_layer():
    block = bmt.Block(
        TransformerBlock(dim_model=64, dim_ff=128, num_heads=4, dim_head=16, dtype=torch.float32),
        use_checkpoint=False,
    )
    bmt.init_parameters(block)
    block(torch.ones(2, 8, 64, device=bmt.device()), AttentionMask(causal=True)).sum().backward()
    assert_compiled(block)


def test_a_layer_of_a_language_model_compiles():
    """It says so, which is an error here, if it does not."""
    run_ranks(language_model_layer, 1, device=None, timeout=120)


def not_compilable():
    torch.backends.cuda.matmul.allow_tf32 = False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for recompute in (False, True):
            plain = torch.nn.ModuleList([WithItem() for _ in range(2)]).to(bmt.device())
            torch.manual_seed(3)
            check(plain, recompute, 3, torch.randn(2, 8, 64, device=bmt.device()))
    told = [str(each.message) for each in said if "WithItem runs uncompiled" in str(each.message)]
    assert len(told) == 1, [str(each.message) for each in said]


def test_what_does_not_compile_runs_uncompiled():
    run_ranks(not_compilable, torch.cuda.device_count(), device=None, timeout=120)
