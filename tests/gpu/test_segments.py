"""Attention of packed rows by FlexAttention's kernels on a GPU."""

import functools
from typing import Any

import pytest
import torch
from tests.gpu.test_compile import assert_compiled
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from tests.unit.test_segment_attention import packed, results

import bmtrain as bmt
from bmtrain.nn import segment_attention
from model_center.dataset.packing import segment_mask
from model_center.layer import TransformerBlock
from model_center.layer.mask import AttentionMask

pytestmark = pytest.mark.gpu


def drawn(length, dtype):
    shapes = [(2, heads, length, 64) for heads in (4, 2, 2)]
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.fixture(scope="module")
def compiled():
    torch._dynamo.reset()
    return torch.compile(segment_attention, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("length", [1024, 1000])
def test_kernels_compute_what_the_formula_says(length, window, compiled):
    """Values and gradients to the precision of bf16, for grouped heads; other rows, the same code."""
    torch.manual_seed(0)
    for seed in range(3):
        options = {"segments": packed(2, length, 400, seed).cuda(), "window": window}
        narrow, towards = (
            drawn(length, torch.bfloat16),
            torch.randn(2, 4, length, 64, device="cuda"),
        )
        wide = [x.detach().float().requires_grad_() for x in narrow]
        want = results(functools.partial(segment_attention, **options), wide, towards)
        with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
            got = results(functools.partial(compiled, **options), narrow, towards)
        for one, other in zip(got, want, strict=True):
            error, eps = one.float() - other, torch.finfo(torch.bfloat16).eps
            assert torch.isfinite(one).all()
            assert error.norm() <= 2 * eps * other.norm()
            assert error.abs().max() <= 4 * eps * other.abs().max()


def test_nothing_leaks_into_another_text(compiled):
    """A token changed in one text changes no bit of another's output or gradients."""
    torch.manual_seed(0)
    segments, place = packed(2, 1024, 400).cuda(), 500
    tensors, towards = drawn(1024, torch.bfloat16), torch.randn(2, 4, 1024, 64, device="cuda")
    own = segments == segments[:, place : place + 1]
    before = results(lambda *x: compiled(*x, segments), tensors, towards)
    again = results(lambda *x: compiled(*x, segments), tensors, towards)
    with torch.no_grad():
        for x in (*tensors, towards):
            x[:, :, place] += 1
    after = results(lambda *x: compiled(*x, segments), tensors, towards)
    for one, same, other in zip(before, again, after, strict=True):
        assert torch.equal(one, same), "the same rows have other bits"
        differs = (one != other).any(1).any(-1)
        assert differs.any() and not (differs & ~own).any()


def in_a_block():
    """A layer of model_center compiles with such a mask, holds no pairs, and computes as with pairs."""
    torch.manual_seed(0)
    sizes = {"dim_model": 256, "num_heads": 4, "dim_head": 64, "dim_ff": 512}
    length = 16384
    block = bmt.Block(TransformerBlock(**sizes, dtype=torch.bfloat16), use_checkpoint=True)
    bmt.init_parameters(block)
    segments = packed(1, length, 3000).to(bmt.device())
    masks = (
        AttentionMask(causal=True, segments=segments),
        AttentionMask(pairs=segment_mask(segments)[:, None]),
    )
    x = torch.randn(1, length, 256, device=bmt.device(), dtype=torch.bfloat16)
    found = []
    for mask in masks:
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            block.zero_grad()
            leaf: Any = x.clone().requires_grad_()
            out = block(leaf, mask)
            out.float().square().mean().backward()
        grads = [grad_of(param).float().flatten() for param in block.parameters()]
        peak = torch.cuda.max_memory_allocated() - before
        found.append([out.float(), leaf.grad.float(), torch.cat(grads), peak])
    assert_compiled(block)
    *ours, peak = found[0]
    for one, other in zip(ours, found[1][:-1], strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
    assert peak < length * length, f"{peak / 2**20:.0f} MiB"
    return peak


def test_a_block_of_packed_rows():
    run_ranks(in_a_block, torch.cuda.device_count(), device=None, timeout=300)
