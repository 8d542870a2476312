"""Linear maps in eight bits on the GPU's own products: the kernel beside its twin, blocks beside
plain ones, compiled and not.
"""

import copy
import itertools

import pytest
import torch
from tests.gpu.test_engine import Layer
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import by_torch, grad_of

import bmtrain as bmt
from bmtrain.kernels import fp8
from bmtrain.recompute.level import Level

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


def skip_without_eight_bits():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no eight-bit products")


def bits(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("shape", [(16, 16), (53, 80), (1000, 336), (4096, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_its_twin(shape, dtype):
    skip_without_eight_bits()
    x = torch.randn(
        *shape, device=DEVICE, dtype=dtype, generator=torch.Generator(DEVICE).manual_seed(1)
    )
    codes, unit = fp8.quantise(x, fp8.E4M3)
    assert torch.equal(bits(fp8.transposed(x, unit)), bits(by_torch(fp8.transposed, x, unit)))
    for kind in (fp8.E4M3, fp8.E5M2):
        codes, _ = fp8.quantise(x, kind)
        assert torch.equal(bits(fp8.transposed(codes)), bits(by_torch(fp8.transposed, codes)))


def test_an_overflow_stays_visible():
    skip_without_eight_bits()
    for bad in (float("inf"), float("nan")):
        x = torch.ones(32, 32, device=DEVICE)
        x[1, 2] = bad
        _, unit = fp8.quantise(x, fp8.E4M3)
        assert fp8.transposed(x, unit)[2, 1].isnan()
        one = torch.ones((), device=DEVICE)
        codes = fp8.transposed(x, unit)
        assert (
            not fp8.product(codes, unit, codes, unit, None, torch.float32, fast=False)
            .isfinite()
            .all()
        )
        assert (
            fp8.transposed(x, one)[2, 1].isnan() == by_torch(fp8.transposed, x, one)[2, 1].isnan()
        )


@pytest.mark.parametrize("fast", [False, True])
def test_products_are_those_of_fp32(fast):
    skip_without_eight_bits()
    x, w, b = (torch.randn(*shape, device=DEVICE) for shape in ((200, 512), (96, 512), (96,)))
    (x8, xu), (w8, wu) = fp8.quantise(x, fp8.E4M3), fp8.quantise(w, fp8.E4M3)
    want = (x8.float() @ w8.float().t()) * (xu * wu) + b.float()
    # The tensor cores themselves keep some 14 bits of a sum; what is not fast adds those up in fp32
    # every few numbers.
    for dtype, tolerance in ((torch.float32, 2e-3 if fast else 5e-4), (torch.bfloat16, 8e-3)):
        models.assert_same(
            fp8.product(x8, xu, w8, wu, b.to(dtype), dtype, fast).float(),
            want,
            f"{dtype}, fast={fast}",
            tolerance,
        )


def found(layer, scale):
    x = torch.linspace(-1, 1, 77 * 256, device=bmt.device()).view(77, 256).requires_grad_()
    layer.zero_grad()
    out = layer(x)
    (out.sin().sum() / scale).backward()
    # without the residual, beside which the branch is small
    return [out.detach() - x.detach(), grad_of(x) * scale]


def near(mine, plain, what, least=0.0):
    """Off by no more than eight bits are, and by `least`, which 16 bits are not."""
    error = ((mine.cpu() - plain.cpu()).norm() / plain.cpu().norm()).item()
    assert least <= error < 0.1, f"{what}: off by {error:.3f}"


def blocks():
    torch.manual_seed(1)
    plain = Layer(256).to(bmt.device())
    want = found(plain, 1)
    gradients = models.plain_gradients(plain)
    for zero, level, compiles in itertools.product(
        (2, 3), (Level.NOTHING, Level.CHEAP, Level.BLOCK), (False, True)
    ):
        what = f"ZeRO-{zero}, {level}, compiled={compiles}"
        block = bmt.Block(
            copy.deepcopy(plain), use_checkpoint=level, zero_level=zero, compile=compiles, fp8=True
        )
        for mine, theirs in zip(found(block, bmt.world_size()), want, strict=True):
            near(mine, theirs, what, least=1e-2)
        for name, grad in models.full_gradients(block).items():
            least = 1e-2 if name in ("up.weight", "down.weight") else 0.0
            near(grad, gradients[name], f"{what}: {name}", least)


def test_blocks_are_near_plain_ones():
    skip_without_eight_bits()
    run_ranks(blocks, torch.cuda.device_count(), device=None, timeout=300)
