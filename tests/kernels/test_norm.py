"""Layer norm and RMS norm, and their gradients, in one pass: kernels against twins, twins against plain
PyTorch in fp64.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tensors import by_kernel, by_torch
from torch import Tensor
from torch.testing import assert_close

from bmtrain.kernels import norm
from bmtrain.kernels.norm import WIDE, norm_backward

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes its time for each."""
    monkeypatch.setattr(norm, "PARTS", 5)
    monkeypatch.setattr(norm, "PARTS_OF_WIDE", 3)
    monkeypatch.setattr(norm, "FORWARD_PARTS", 4)


def drawn(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Random tensors, and what plain PyTorch makes of them."""

    def __init__(self, dtype, *, num_grads, num_inputs, centered, residual, rows, n):
        grads, inputs, others = (
            [drawn(2, rows, n, dtype=dtype, seed=first + place) for place in range(count)]
            for first, count in ((0, num_grads), (10, num_inputs), (21, 1))
        )
        weight, added = drawn(n, dtype=dtype, seed=20), others[0] if residual else None
        x = torch.stack(inputs).double().sum(0).requires_grad_()
        out, mean, rstd, _ = true_norm([x], weight, torch.zeros(n), EPS, centered)
        grad = torch.stack(grads).double().sum(0)
        of_x = torch.autograd.grad(out, x, grad)[0] + (0 if added is None else added.double())
        normed = ((x - mean if centered else x) * rstd).detach()
        self.want = [of_x, (grad * normed).sum((0, 1)), grad.sum((0, 1))]
        mean, rstd = mean.detach().float() if centered else None, rstd.detach().float()
        self.arguments: tuple[Any, ...] = (grads, inputs, weight, mean, rstd, added, True, residual)


def named(names, *rows):
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


CASES = named(
    "num_grads num_inputs centered residual rows n",
    (1, 1, True, False, 5, 7),
    (3, 1, True, True, 30, 48),
    (1, 2, True, True, 3, 1030),
    (2, 2, False, True, 9, 64),
    (1, 1, False, False, 1, 1),
    (2, 1, True, True, 2, WIDE + 2),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case):
    """The twin's are those of PyTorch, the kernel's are the twin's."""
    for dtype in DTYPES:
        made, n, eps = Case(dtype, **case), case["n"], torch.finfo(dtype).eps
        want = norm_backward(*made.arguments)
        parts = norm.PARTS_OF_WIDE if n > WIDE else norm.PARTS
        grad_x, sums, more = want
        assert grad_x.dtype == dtype and sums.dtype == more.dtype == torch.float32
        assert sums.shape == (2, parts, n) and more.shape == (1 + case["residual"], parts, n)
        assert_close(grad_x.double(), made.want[0], rtol=eps, atol=2e-5)
        residual = made.arguments[5]
        columns = [grad_x] if residual is None else [grad_x, residual]
        totals = [*made.want[1:], *(tensor.double().sum((0, 1)) for tensor in columns)]
        for found, exact in zip([*sums, *more], totals, strict=True):  # fp32 throughout
            assert_close(found.double().sum(0), exact, rtol=1e-4, atol=1e-3)
        got = by_kernel(norm_backward, *made.arguments)
        # Triton's interpreter cuts bf16 off where the device rounds.
        rtol = (2 if dtype == torch.bfloat16 else 1) * eps
        assert_close(got[0], grad_x, rtol=rtol, atol=1e-5)
        assert_close(got[1], sums, rtol=1e-5, atol=1e-4)
        # of its own numbers, which are cut off here
        columns[0] = got[0]
        own = norm._sums([norm._rows(tensor, n) for tensor in columns], n)
        assert_close(got[2], own, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True)])
def test_only_the_sums_that_are_asked_for(asked):
    both = Case(torch.float32, **CASES[1]).arguments
    every = norm_backward(*both)[2]
    for run in (by_torch, by_kernel):
        found = run(norm_backward, *both[:-2], *asked)[2]
        assert_close(found, every[torch.tensor(asked)], rtol=1e-5, atol=1e-5)


FORWARD = named(
    "num_inputs centered has_bias rows n",
    (1, True, True, 5, 7),
    (2, True, True, 30, 48),
    (2, False, False, 3, 1030),
    (1, False, False, 1, 1),
    (1, True, False, 0, 16),
    (1, True, True, 2, 5000),
)


def forward_arguments(dtype, *, num_inputs, centered, has_bias, rows, n):
    """What `norm` takes: numbers far from 0, so that a spread that is the difference of two large sums
    would be wrong.
    """
    inputs = [
        (3 + drawn(2, rows, n, dtype=torch.float32, seed=n + place)).to(dtype)
        for place in range(num_inputs)
    ]
    weight, bias = (drawn(n, dtype=dtype, seed=seed) for seed in (0, 1))
    return inputs, weight, bias if has_bias else None, EPS, centered


def true_norm(inputs, weight, bias, eps, centered):
    """By plain PyTorch in fp64 of the sum as it is rounded: result, mean, one over the spread, sum."""
    total = inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]
    x, shape, scale = total.double(), weight.shape, weight.double()
    mean = x.mean(-1, keepdim=True)
    spread = (x - mean if centered else x).square().mean(-1, keepdim=True)
    shift = None if bias is None else bias.double()
    if centered:
        out = F.layer_norm(x, shape, scale, shift, eps)
    else:
        out = F.rms_norm(x, shape, scale, eps)
    return out, mean, (spread + eps).rsqrt(), total


def check_norm(arguments, got, room=1):
    """`room`: how many roundings of the dtype a result may be off."""
    inputs, centered = arguments[0], arguments[4]
    out, mean, rstd, total = true_norm(*arguments)
    dtype = inputs[0].dtype
    assert got[0].dtype == got[3].dtype == dtype and got[1].dtype == got[2].dtype == torch.float32
    assert_close(got[0].double(), out, rtol=room * torch.finfo(dtype).eps, atol=2e-5)
    if centered:
        assert_close(got[1].double(), mean, rtol=1e-6, atol=1e-6)
    assert got[1].numel() == (rstd.numel() if centered else 0)
    assert_close(got[2].double(), rstd, rtol=2e-6, atol=0)
    assert torch.equal(got[3], total) if len(inputs) > 1 else got[3].numel() == 0


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_norm_is_that_of_pytorch(case):
    """The twin's, and so is the kernel's."""
    for dtype in DTYPES:
        arguments = forward_arguments(dtype, **case)
        check_norm(arguments, norm.norm(*arguments))
        got, want = by_kernel(norm.norm, *arguments), norm.norm(*arguments)
        if dtype != torch.bfloat16:
            check_norm(arguments, got)
            assert torch.equal(got[3], want[3])
            continue
        # Triton's interpreter cuts bf16 off where the device rounds: the sum, and with it the rest.
        assert_close(got[3], want[3], rtol=2 * torch.finfo(dtype).eps, atol=0)
        if case["num_inputs"] == 2:
            arguments = ([got[3]], *arguments[1:])
            got = (*got[:3], got[3][:0].flatten())
        check_norm(arguments, got, room=2)


def test_strides_do_not_matter():
    """Of inputs, weights and gradients: each second number of larger ones."""

    def strided(tensor):
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], -1)[..., 0]

    given = (
        (forward_arguments(torch.float32, **FORWARD[1]), norm.norm),
        (Case(torch.float32, **CASES[1]).arguments, norm_backward),
    )
    for arguments, function in given:
        spread = torch.utils._pytree.tree_map_only(Tensor, strided, arguments)
        both = (by_kernel(function, *each) for each in (spread, arguments))
        for got, want in zip(*both, strict=True):
            assert torch.equal(got, want)


def test_the_operators_are_well_declared():
    operators = torch.ops.bmtrain
    backward = Case(torch.float32, **CASES[2]).arguments
    torch.library.opcheck(operators.norm_backward.default, backward)
    for case in FORWARD[:3]:
        forward = forward_arguments(torch.float32, **case)
        torch.library.opcheck(operators.norm.default, forward)
