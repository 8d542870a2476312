"""Linear maps in eight bits, as the formula says, and as near to plain ones as eight bits allow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.tensors import grad_of

from bmtrain.compile.fp8 import Fp8Mode, linear
from bmtrain.kernels import fp8

KINDS = [(fp8.E4M3, 448.0, 3), (fp8.E5M2, 57344.0, 2)]


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def straight(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The numbers that the codes of `x` stand for, by the formula in fp64."""
    limit = torch.finfo(kind).max
    unit = (x.double().abs().max() / limit).float().double()
    return (x.double() / unit).clamp(-limit, limit).float().to(kind).double() * unit


@pytest.mark.parametrize(("kind", "limit", "bits"), KINDS)
@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e6])
def test_quantise_takes_the_largest_to_the_largest_code(
    kind: torch.dtype, limit: float, bits: int, scale: float
) -> None:
    x = values(33, 48, scale=scale)
    codes, unit = fp8.quantise(x, kind)
    assert codes.dtype == kind
    assert codes.float().abs().max() == limit
    near = x.abs() > 1e-2 * x.abs().max()
    error = ((codes.float() * unit - x).abs() / x.abs())[near]
    assert error.max() <= 2.0 ** -(bits + 1) * 1.01


@pytest.mark.parametrize("kind", [fp8.E4M3, fp8.E5M2])
def test_quantise_of_zeros_infinities_and_nan(kind: torch.dtype) -> None:
    codes, unit = fp8.quantise(torch.zeros(4, 4), kind)
    assert codes.float().abs().sum() == 0
    assert unit.isfinite() and unit > 0
    for bad in (float("inf"), float("nan")):
        x = torch.ones(4, 4)
        x[1, 2] = bad
        codes, unit = fp8.quantise(x, kind)
        assert (codes.float() * unit)[1, 2].isnan(), "an overflow must stay visible"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(16,), (3, 7), ()])
def test_linear_is_the_formula(dtype: torch.dtype, has_bias: bool, rows: tuple[int, ...]) -> None:
    """Values and all gradients: products of what the codes stand for, straight through the
    rounding.
    """
    x, weight, bias = (
        values(*rows, 32),
        values(48, 32, seed=1, scale=0.1),
        values(48, seed=2) if has_bias else None,
    )
    own_x, own_weight = (t.to(dtype).requires_grad_() for t in (x, weight))
    own_bias = None if bias is None else bias.to(dtype).requires_grad_()
    out = linear(own_x, own_weight, own_bias)
    grad = values(*rows, 48, seed=3).to(dtype)
    out.backward(grad)
    flat, dy = own_x.detach().reshape(-1, 32), grad.reshape(-1, 48)
    x8, w8, g8 = (
        straight(flat, fp8.E4M3),
        straight(own_weight.detach(), fp8.E4M3),
        straight(dy, fp8.E5M2),
    )
    want = [x8 @ w8.T + (0 if own_bias is None else own_bias.detach().double()), g8 @ w8, g8.T @ x8]
    got = [out.detach().reshape(-1, 48), grad_of(own_x).reshape(-1, 32), grad_of(own_weight)]
    if own_bias is not None:
        want.append(dy.double().sum(0))
        got.append(grad_of(own_bias))
    for mine, exact in zip(got, want, strict=True):
        assert mine.dtype == dtype
        error = (mine.double() - exact).abs().max() / exact.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 5e-3), error


def test_linear_is_near_the_plain_one() -> None:
    x, weight = (
        values(256, 128).requires_grad_(),
        values(64, 128, seed=1, scale=0.1).requires_grad_(),
    )
    grad = values(256, 64, seed=2)
    found = []
    for function in (linear, F.linear):
        x.grad = weight.grad = None
        out = function(x, weight)
        out.backward(grad)
        found.append((out.detach(), x.grad, weight.grad))
    for mine, plain in zip(*found, strict=True):
        error = (mine - plain).norm() / plain.norm()
        assert 1e-3 < error < 0.1, "as much rounding as eight bits make, and no more"
        assert F.cosine_similarity(mine.flatten(), plain.flatten(), dim=0) > 0.995


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 24, 32), (5, 32, 24), (0, 32, 32)])
def test_other_sizes_are_left_to_torch(rows: int, inputs: int, outputs: int) -> None:
    x, weight = values(rows, inputs), values(outputs, inputs)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_autocast_decides_the_result() -> None:
    x, weight = values(8, 32).requires_grad_(), values(16, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert grad_of(x).dtype == grad_of(weight).dtype == torch.float32


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_only_wanted_gradients_are_made(frozen: str) -> None:
    given = {"x": values(8, 32), "weight": values(16, 32), "bias": values(16)}
    for name, tensor in given.items():
        tensor.requires_grad_(name != frozen)
    linear(*given.values()).sum().backward()
    assert {name for name, tensor in given.items() if tensor.grad is None} == {frozen}


def test_eight_bits_are_kept() -> None:
    """Of the input; the weight is kept as it is, not as a copy."""
    kept: list[torch.Tensor] = []
    x, weight = (
        values(64, 32).bfloat16().requires_grad_(),
        values(16, 32).bfloat16().requires_grad_(),
    )

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x, weight)
    own = [t for t in kept if t.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()]
    assert sum(t.numel() * t.element_size() for t in own) == 64 * 32 + 2 * 4


def test_the_mode_takes_modules_of_any_class() -> None:
    layer = torch.nn.Linear(32, 16)
    x = values(4, 32)
    with Fp8Mode():
        inside = layer(x)
    assert torch.equal(inside, linear(x, layer.weight, layer.bias))
    assert not torch.equal(inside, layer(x))
