"""Layer norm and RMS norm, and their gradients, in one pass: kernels against twins, twins against
plain PyTorch in fp64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bmtrain.kernels import norm
from bmtrain.kernels.norm import (
    WIDE,
    Norm,
    Terms,
    norm_backward,
    norm_backward_by_triton,
    norm_backward_reference,
    norm_by_triton,
    norm_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for each."""
    monkeypatch.setattr(norm, "PARTS", 10)
    monkeypatch.setattr(norm, "PARTS_OF_WIDE", 3)
    monkeypatch.setattr(norm, "FORWARD_PARTS", 4)


class Case:
    """Random tensors, and what plain PyTorch makes of them."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        num_grads: int,
        num_inputs: int,
        centered: bool,
        residual: bool,
        rows: int,
        n: int,
    ) -> None:
        generator = torch.Generator().manual_seed(num_grads + 10 * num_inputs)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.grads, self.inputs = (
            [draw(2, rows, n) for _ in range(count)] for count in (num_grads, num_inputs)
        )
        self.weight, self.residual = draw(n), draw(2, rows, n) if residual else None
        x = sum(part.double() for part in self.inputs)
        assert isinstance(x, torch.Tensor)
        self.mean = x.mean(-1, keepdim=True).float() if centered else None
        spread = (
            x.var(-1, keepdim=True, correction=0) if centered else x.square().mean(-1, keepdim=True)
        )
        self.rstd = (spread + EPS).rsqrt().float()
        weight, bias = (
            self.weight.double().requires_grad_(),
            torch.zeros(n, dtype=torch.float64, requires_grad=True),
        )
        leaves = [x.requires_grad_(), weight, bias]
        out = (
            F.layer_norm(x, (n,), weight, bias, EPS)
            if centered
            else F.rms_norm(x, (n,), weight, EPS) + bias
        )
        self.want = list(
            torch.autograd.grad(out, leaves, sum(part.double() for part in self.grads))  # type: ignore[arg-type]
        )
        if self.residual is not None:
            self.want[0] = self.want[0] + self.residual.double()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.grads,
            self.inputs,
            self.weight,
            self.mean,
            self.rstd,
            self.residual,
            True,
            self.residual is not None,
        )


CASES: list[dict[str, Any]] = [
    {"num_grads": 1, "num_inputs": 1, "centered": True, "residual": False, "rows": 5, "n": 7},
    {"num_grads": 3, "num_inputs": 1, "centered": True, "residual": True, "rows": 300, "n": 48},
    {"num_grads": 1, "num_inputs": 2, "centered": True, "residual": True, "rows": 3, "n": 1030},
    {"num_grads": 2, "num_inputs": 2, "centered": False, "residual": True, "rows": 9, "n": 64},
    {"num_grads": 1, "num_inputs": 1, "centered": False, "residual": False, "rows": 1, "n": 1},
    {"num_grads": 2, "num_inputs": 1, "centered": True, "residual": True, "rows": 2, "n": WIDE + 2},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_gradient(case: dict[str, Any], dtype: torch.dtype) -> None:
    made = Case(dtype, **case)
    grad_x, sums, more = norm_backward(*made.arguments)
    parts = norm.PARTS_OF_WIDE if case["n"] > WIDE else norm.PARTS
    assert grad_x.dtype == dtype and sums.dtype == more.dtype == torch.float32
    assert sums.shape == (2, parts, case["n"]) and more.shape == (
        1 + case["residual"],
        parts,
        case["n"],
    )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad_x.double(), made.want[0], rtol=eps, atol=2e-5)
    columns = [grad_x] if made.residual is None else [grad_x, made.residual]
    wants = [*made.want[1:], *(tensor.double().sum((0, 1)) for tensor in columns)]
    for got, want in zip([*sums, *more], wants, strict=True):  # fp32 throughout
        torch.testing.assert_close(got.double().sum(0), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: dict[str, Any], dtype: torch.dtype) -> None:
    made = Case(dtype, **case)
    terms = Terms(*made.arguments)
    want, got = norm_backward_reference(terms), norm_backward_by_triton(terms)
    # Triton's interpreter cuts bf16 off where the device rounds.
    rtol = (2 if dtype == torch.bfloat16 else 1) * torch.finfo(dtype).eps
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-4)
    # of its own numbers, which are cut off here
    tensors = [got[0]] if made.residual is None else [got[0], made.residual]
    own = norm._sums([norm._rows(tensor, case["n"]) for tensor in tensors], case["n"])
    torch.testing.assert_close(got[2], own, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True)])
def test_only_the_sums_that_are_asked_for(asked: tuple[bool, bool]) -> None:
    both = Terms(*Case(torch.float32, **CASES[1]).arguments)
    every = norm_backward_reference(both)[2]
    terms = dataclasses.replace(both, sums_result=asked[0], sums_residual=asked[1])
    for run in (norm_backward_reference, norm_backward_by_triton):
        torch.testing.assert_close(run(terms)[2], every[torch.tensor(asked)], rtol=1e-5, atol=1e-5)


def test_the_operator_is_well_declared() -> None:
    torch.library.opcheck(
        torch.ops.bmtrain.norm_backward.default, Case(torch.float32, **CASES[2]).arguments
    )


FORWARD: list[dict[str, Any]] = [
    {"num_inputs": 1, "centered": True, "has_bias": True, "rows": 5, "n": 7},
    {"num_inputs": 2, "centered": True, "has_bias": True, "rows": 30, "n": 48},
    {"num_inputs": 2, "centered": False, "has_bias": False, "rows": 3, "n": 1030},
    {"num_inputs": 1, "centered": False, "has_bias": False, "rows": 1, "n": 1},
    {"num_inputs": 1, "centered": True, "has_bias": False, "rows": 0, "n": 16},
    {"num_inputs": 1, "centered": True, "has_bias": True, "rows": 2, "n": 5000},
]


def forward_arguments(
    dtype: torch.dtype, *, num_inputs: int, centered: bool, has_bias: bool, rows: int, n: int
) -> tuple[Any, ...]:
    """What `norm` takes: numbers far from 0, so that a spread that is the difference of two large
    sums would be wrong.
    """
    generator = torch.Generator().manual_seed(n)
    inputs = [
        (3 + torch.randn(2, rows, n, generator=generator)).to(dtype) for _ in range(num_inputs)
    ]
    weight, bias = (torch.randn(n, generator=generator).to(dtype) for _ in range(2))
    return inputs, weight, bias if has_bias else None, EPS, centered


def true_norm(
    inputs: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> Any:
    """By plain PyTorch in fp64 of the sum as it is rounded: result, mean, one over the spread,
    sum.
    """
    total = inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]
    x, n = total.double(), weight.shape[0]
    mean = x.mean(-1, keepdim=True)
    spread = (x - mean if centered else x).square().mean(-1, keepdim=True)
    shift = None if bias is None else bias.double()
    out = (
        F.layer_norm(x, (n,), weight.double(), shift, eps)
        if centered
        else F.rms_norm(x, (n,), weight.double(), eps)
    )
    return out, mean, (spread + eps).rsqrt(), total


def check_norm(arguments: tuple[Any, ...], got: tuple[torch.Tensor, ...], room: int = 1) -> None:
    """`room`: how many roundings of the dtype a result may be off."""
    inputs, centered = arguments[0], arguments[4]
    out, mean, rstd, total = true_norm(*arguments)
    dtype = inputs[0].dtype
    assert got[0].dtype == got[3].dtype == dtype and got[1].dtype == got[2].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), out, rtol=room * torch.finfo(dtype).eps, atol=2e-5)
    if centered:
        torch.testing.assert_close(got[1].double(), mean, rtol=1e-6, atol=1e-6)
    assert got[1].numel() == (rstd.numel() if centered else 0)
    torch.testing.assert_close(got[2].double(), rstd, rtol=2e-6, atol=0)
    assert torch.equal(got[3], total) if len(inputs) > 1 else got[3].numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_norm_is_that_of_pytorch(case: dict[str, Any], dtype: torch.dtype) -> None:
    arguments = forward_arguments(dtype, **case)
    check_norm(arguments, norm.norm(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_kernel_of_a_norm_equals_twin(case: dict[str, Any], dtype: torch.dtype) -> None:
    arguments = forward_arguments(dtype, **case)
    got, want = norm_by_triton(Norm(*arguments)), norm_reference(Norm(*arguments))
    if dtype != torch.bfloat16:
        check_norm(arguments, got)
        assert torch.equal(got[3], want[3])
        return
    # Triton's interpreter cuts bf16 off where the device rounds: the sum, and with it the rest.
    torch.testing.assert_close(got[3], want[3], rtol=2 * torch.finfo(dtype).eps, atol=0)
    if case["num_inputs"] == 2:
        arguments = ([got[3]], *arguments[1:])
        got = (*got[:3], got[3][:0].flatten())
    check_norm(arguments, got, room=2)


def test_strides_do_not_matter() -> None:
    """Of inputs, weights and gradients: each second number of larger ones."""

    def strided(tensor: Any) -> Any:
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], -1)[..., 0]

    kernels: tuple[tuple[tuple[Any, ...], Callable[[Any], Any], type], ...] = (
        (forward_arguments(torch.float32, **FORWARD[1]), norm_by_triton, Norm),
        (Case(torch.float32, **CASES[1]).arguments, norm_backward_by_triton, Terms),
    )
    for arguments, kernel, case in kernels:
        spread = torch.utils._pytree.tree_map_only(torch.Tensor, strided, arguments)
        for got, want in zip(kernel(case(*spread)), kernel(case(*arguments)), strict=True):
            assert torch.equal(got, want)


def test_the_operator_of_a_norm_is_well_declared() -> None:
    for case in FORWARD[:3]:
        torch.library.opcheck(
            torch.ops.bmtrain.norm.default, forward_arguments(torch.float32, **case)
        )
