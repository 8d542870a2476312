"""Linear maps in eight bits, as the formula says, and as near to plain ones as eight bits allow."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.tensors import grad_of

from bmtrain.compile.fp8 import linear
from bmtrain.kernels import fp8

KINDS = pytest.mark.parametrize(
    ("kind", "limit", "bits"), [(fp8.E4M3, 448.0, 3), (fp8.E5M2, 57344.0, 2)]
)


def values(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def straight(x, kind):
    """The numbers that the codes of `x` stand for, by the formula in fp64."""
    limit = torch.finfo(kind).max
    unit = (x.double().abs().max() / limit).float().double()
    return (x.double() / unit).clamp(-limit, limit).float().to(kind).double() * unit


@KINDS
def test_quantise_takes_the_largest_to_the_largest_code(kind, limit, bits):
    for scale in (1e-20, 1e-3, 1.0, 1e6):
        x = values(33, 48, scale=scale)
        codes, unit = fp8.quantise(x, kind)
        assert codes.dtype == kind and codes.float().abs().max() == limit
        near = x.abs() > 1e-2 * x.abs().max()
        error = ((codes.float() * unit - x).abs() / x.abs())[near]
        assert error.max() <= 2.0 ** -(bits + 1) * 1.01
    codes, unit = fp8.quantise(torch.zeros(4, 4), kind)
    assert not codes.float().any() and unit.isfinite() and unit > 0
    for bad in (float("inf"), float("nan")):
        x = torch.ones(4, 4)
        x[1, 2] = bad
        codes, unit = fp8.quantise(x, kind)
        assert (codes.float() * unit)[1, 2].isnan(), "an overflow must stay visible"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_formula(dtype):
    """Values and all gradients: products of what the codes stand for, straight through the rounding."""
    for rows, has_bias in itertools.product(((16,), (3, 7), ()), (True, False)):
        given = [values(*rows, 32), values(48, 32, seed=1, scale=0.1), values(48, seed=2)]
        own = [t.to(dtype).requires_grad_() for t in given[: 2 + has_bias]]
        grad = values(*rows, 48, seed=3).to(dtype)
        for frozen in (*own, torch.empty(0)):  # only wanted gradients are made
            for tensor in own:
                tensor.requires_grad_(tensor is not frozen).grad = None
            out = linear(*own)
            out.backward(grad)
            assert [x for x in own if x.grad is None] == [x for x in own if x is frozen]
        flat, dy = own[0].detach().reshape(-1, 32), grad.reshape(-1, 48)
        x8, w8 = (straight(x, fp8.E4M3) for x in (flat, own[1].detach()))
        g8 = straight(dy, fp8.E5M2)
        want = [x8 @ w8.T, g8 @ w8, g8.T @ x8]
        if has_bias:
            want[0] += own[2].detach().double()
            want.append(dy.double().sum(0))
        for mine, exact in zip([out.detach(), *map(grad_of, own)], want, strict=True):
            assert mine.dtype == dtype
            error = (mine.double().view(exact.shape) - exact).abs().max() / exact.abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 5e-3), error


def test_other_sizes_are_left_to_torch():
    for rows, columns, outputs in ((5, 24, 32), (5, 32, 24), (0, 32, 32)):
        x, weight = values(rows, columns), values(outputs, columns)
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    x, weight = values(5, 32), values(32, 32)
    assert not torch.equal(linear(x, weight), F.linear(x, weight))


def test_autocast_decides_the_result():
    x, weight = values(8, 32).requires_grad_(), values(16, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert grad_of(x).dtype == grad_of(weight).dtype == torch.float32


def test_eight_bits_are_kept():
    """Of the input; the weight is kept as it is, not as a copy."""
    kept = []
    x, weight = (values(size, 32).bfloat16().requires_grad_() for size in (64, 16))

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x, weight)
    own = [t for t in kept if t.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()]
    assert sum(t.numel() * t.element_size() for t in own) == 64 * 32 + 2 * 4
