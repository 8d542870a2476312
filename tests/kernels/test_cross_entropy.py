"""Kernels of cross entropy against their plain-torch twins, which tests/unit holds against torch."""

import functools

import pytest
import torch
from tests.tensors import by_kernel, by_torch

from bmtrain.kernels import cross_entropy as kernels
from bmtrain.kernels.cross_entropy import RowFactors

ROWS = 6
# Triton's interpreter cuts bf16 off where the device rounds (tests/gpu asks for half of this).
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}
COLUMNS = (1, 23, 64)  # less than a vector, rows that begin anywhere, several blocks
PATHS = (
    functools.partial(by_torch, kernels.row_gradient),
    functools.partial(by_kernel, kernels.row_gradient),
)
IN_PLACE = [functools.partial(path, in_place=True) for path in PATHS]
GRADIENTS = [*IN_PLACE, *PATHS]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of columns to a row, several rows to a chunk, several chunks."""
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "CHUNK_NUMEL", 4 * 23)


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def logits_of(num_columns, dtype):
    """Some far below, some masked, in the first row a whole block and more."""
    logits = random(ROWS, num_columns, dtype=dtype) * 3
    logits[1] -= 500
    if num_columns > 16:
        logits[0, :17] = -torch.inf
        logits[2, -2] = -torch.inf
    return logits


def factors_of(num_columns, dtype=torch.float32, smoothed=False):
    """Row 3 has no gradient; the classes of some rows have no column."""
    factors = random(3, ROWS, dtype=kernels.arithmetic(dtype), seed=2).abs()
    factors[:, 3] = 0
    factors[1] *= 0.1 if smoothed else 0.0
    column = torch.randint(0, num_columns, (ROWS,), generator=torch.Generator().manual_seed(3))
    column[::4] = -1
    mass, smooth, hit = factors
    return RowFactors(mass, smooth, hit, column)


def assert_close(got, want, tolerance=2e-6):
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 10, equal_nan=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernels_equal_twins(dtype, weighted):
    smoothed = weighted == (dtype in (torch.float32, torch.float16))  # all pairs of two settings
    arithmetic = kernels.arithmetic(dtype)
    for num_columns in COLUMNS:
        logits, factors = logits_of(num_columns, dtype), factors_of(num_columns, dtype, smoothed)
        weight = random(num_columns, dtype=arithmetic, seed=1).abs() if weighted else None
        want = by_torch(kernels.row_sums, logits, weight, smoothed=smoothed)
        got = by_kernel(kernels.row_sums, logits, weight, smoothed=smoothed)
        for got_part, want_part in zip(got, want, strict=True):
            assert_close(got_part, want_part, ROUNDING[arithmetic])
        rest = (want, factors, weight)
        gradient = by_torch(kernels.row_gradient, logits, *rest, smoothed=smoothed)
        for function in GRADIENTS:
            memory = torch.full((ROWS, num_columns + 5), 7.0, dtype=dtype)
            taken = memory[:, :num_columns].copy_(logits)
            found = function(taken, *rest, smoothed=smoothed)
            assert_close(found, gradient, ROUNDING[dtype])
            if function in IN_PLACE:
                assert_close(taken, gradient, ROUNDING[dtype])
            assert (memory[:, num_columns:] == 7).all(), "written beyond the columns"


def test_any_strides():
    whole = random(2 * ROWS, 2 * 23)
    for logits in (
        whole[:ROWS, ::2],
        whole[::2, :23],
        whole.view(46, -1)[:23, :ROWS].t(),
        whole[:1, :23].expand(ROWS, 23),
    ):
        factors, plain = factors_of(23), logits.contiguous()
        want = by_torch(kernels.row_sums, plain, None, smoothed=False)
        got = by_kernel(kernels.row_sums, logits, None, smoothed=False)
        for part, want_part in zip(got, want, strict=True):
            assert_close(part, want_part)
        rest = (want, factors, None)
        expected = by_torch(kernels.row_gradient, plain, *rest, smoothed=False)
        for function in PATHS:
            gradient = function(logits, *rest, smoothed=False)
            assert gradient.shape == plain.shape and gradient.stride(1) == 1
            assert_close(gradient, expected)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_row_without_gradient_may_hold_anything(gradient):
    answers = []
    for bad in (1.0, torch.inf, torch.nan):
        logits = random(ROWS, 23)
        logits[3, 5] = bad
        sums = by_torch(kernels.row_sums, logits, None, smoothed=False)
        answers.append(gradient(logits, sums, factors_of(23), None, smoothed=False))
        assert torch.equal(answers[0], answers[-1])
    assert not answers[0][3].any() and answers[0][2].all()


def test_all_columns_masked():
    """As on a rank whose whole part of the vocabulary is: nothing beside a finite maximum elsewhere,
    and no NaN.
    """
    logits = torch.full((2, 23), -torch.inf)
    for run, smoothed in ((by_torch, True), (by_torch, False), (by_kernel, False)):
        highest, sum_exp, below = run(kernels.row_sums, logits, None, smoothed=smoothed)
        assert (highest == -torch.inf).all() and not sum_exp.any()
        assert (below == (-torch.inf if smoothed else 0)).all()


def test_autograd_is_told_of_the_change():
    """Else a backward pass that needs the logits would read the gradient in their place."""
    logits = random(ROWS, 23)
    sums, before = by_torch(kernels.row_sums, logits, None, smoothed=False), logits._version
    IN_PLACE[1](logits, sums, factors_of(23), None, smoothed=False)
    assert logits._version > before
