"""Kernels of cross entropy against their plain-torch twins, and the twins against softmax in
fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from bmtrain.kernels import cross_entropy as kernels
from bmtrain.kernels.cross_entropy import RowFactors, RowSums

ROWS = 6
# Triton's interpreter cuts bf16 off where the device rounds (tests/gpu asks for half of this).
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}
CASES = list(itertools.product(ROUNDING, (False, True), (False, True)))  # dtype, weighted, smoothed
COLUMNS = (1, 23, 64)  # less than a vector, rows that begin anywhere, several blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of columns to a row, several rows to a chunk, several chunks."""
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "CHUNK_NUMEL", 4 * 23)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def logits_of(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Some far below, some masked, in the first row a whole block and more."""
    logits = random(ROWS, num_columns, dtype=dtype) * 3
    logits[1] -= 500
    if num_columns > 16:
        logits[0, :17] = -torch.inf
        logits[2, -2] = -torch.inf
    return logits


def weight_of(num_columns: int, dtype: torch.dtype, weighted: bool) -> torch.Tensor | None:
    return random(num_columns, dtype=kernels.arithmetic(dtype), seed=1).abs() if weighted else None


def factors_of(num_columns: int, dtype: torch.dtype, smoothed: bool) -> RowFactors:
    """Row 3 has no gradient; the classes of some rows have no column."""
    mass, smooth, hit = random(3, ROWS, dtype=kernels.arithmetic(dtype), seed=2).abs()
    for each in (mass, smooth, hit):
        each[3] = 0
    column = torch.randint(0, num_columns, (ROWS,), generator=torch.Generator().manual_seed(3))
    column[::4] = -1
    return RowFactors(mass, smooth * (0.1 if smoothed else 0.0), hit, column)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 10, equal_nan=True)


@pytest.mark.parametrize(("dtype", "weighted", "smoothed"), CASES)
def test_kernels_equal_twins(dtype: torch.dtype, weighted: bool, smoothed: bool) -> None:
    arithmetic = ROUNDING[kernels.arithmetic(dtype)]
    for num_columns in COLUMNS:
        logits, weight = logits_of(num_columns, dtype), weight_of(num_columns, dtype, weighted)
        factors = factors_of(num_columns, dtype, smoothed)
        want = kernels.row_sums_by_torch(logits, weight, smoothed=smoothed)
        for got_part, want_part in zip(
            kernels.row_sums_by_triton(logits, weight, smoothed=smoothed), want, strict=True
        ):
            assert_close(got_part, want_part, arithmetic)
        gradient = kernels.row_gradient_by_torch(logits, want, factors, weight, smoothed=smoothed)
        assert_close(
            kernels.row_gradient_by_triton(logits, want, factors, weight, smoothed=smoothed),
            gradient,
            ROUNDING[dtype],
        )
        for in_place in (kernels.row_gradient_by_torch_, kernels.row_gradient_by_triton_):
            memory = torch.full((ROWS, num_columns + 5), 7.0, dtype=dtype)
            taken = memory[:, :num_columns].copy_(logits)
            in_place(taken, want, factors, weight, smoothed=smoothed)
            assert_close(taken, gradient, ROUNDING[dtype])
            assert (memory[:, num_columns:] == 7).all(), "written beyond the columns"


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("weighted", [False, True])
def test_twins_equal_the_formula(num_columns: int, weighted: bool) -> None:
    logits = random(ROWS, num_columns, dtype=torch.float64) * 3
    weight, factors = (
        weight_of(num_columns, torch.float64, weighted),
        factors_of(num_columns, torch.float64, smoothed=True),
    )
    sums = kernels.row_sums_by_torch(logits, weight, smoothed=True)
    each = torch.ones(num_columns, dtype=torch.float64) if weight is None else weight
    assert torch.equal(sums.highest, logits.amax(1))
    torch.testing.assert_close(sums.highest + sums.sum_exp.log(), logits.logsumexp(1))
    torch.testing.assert_close(sums.below, ((logits - logits.amax(1, keepdim=True)) * each).sum(1))
    gradient = kernels.row_gradient_by_torch(logits, sums, factors, weight, smoothed=True)
    hits = torch.zeros_like(logits)
    for row, column in enumerate(factors.column.tolist()):
        if column >= 0:
            hits[row, column] = factors.hit[row]
    torch.testing.assert_close(
        gradient, factors.mass[:, None] * logits.softmax(1) - factors.smooth[:, None] * each - hits
    )


@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_row_and_one(num_rows: int) -> None:
    logits = random(num_rows, 23, dtype=torch.float32)
    mass, smooth, hit = torch.ones(3, num_rows).unbind(0)
    factors = RowFactors(mass, smooth, hit, torch.zeros(num_rows, dtype=torch.int64))
    sums = kernels.row_sums_by_triton(logits, None, smoothed=True)
    gradient = kernels.row_gradient_by_triton(logits, sums, factors, None, smoothed=False)
    want = kernels.row_gradient_by_torch(logits, sums, factors, None, smoothed=False)
    assert gradient.shape == (num_rows, 23)
    assert_close(gradient, want, 1e-6)
    assert_close(
        kernels.row_gradient_by_triton_(logits, sums, factors, None, smoothed=False), want, 1e-6
    )


@pytest.mark.parametrize("strides", ["columns", "rows", "transposed", "expanded"])
def test_any_strides(strides: str) -> None:
    whole = random(2 * ROWS, 2 * 23, dtype=torch.float32)
    logits = {
        "columns": whole[:ROWS, ::2],
        "rows": whole[::2, :23],
        "transposed": whole.view(46, -1)[:23, :ROWS].t(),
        "expanded": whole[:1, :23].expand(ROWS, 23),
    }[strides]
    factors, plain = factors_of(23, torch.float32, smoothed=False), logits.contiguous()
    want = kernels.row_sums_by_torch(plain, None, smoothed=True)
    for part, want_part in zip(
        kernels.row_sums_by_triton(logits, None, smoothed=True), want, strict=True
    ):
        assert_close(part, want_part, 2e-6)
    gradient = kernels.row_gradient_by_triton(logits, want, factors, None, smoothed=False)
    assert gradient.shape == plain.shape and gradient.stride(1) == 1
    assert_close(
        gradient, kernels.row_gradient_by_torch(plain, want, factors, None, smoothed=False), 2e-6
    )
    assert_close(
        gradient, kernels.row_gradient_by_torch(logits, want, factors, None, smoothed=False), 2e-6
    )


GRADIENTS = [
    kernels.row_gradient_by_torch,
    kernels.row_gradient_by_torch_,
    kernels.row_gradient_by_triton,
    kernels.row_gradient_by_triton_,
]


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda gradient: gradient.__name__)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_row_without_gradient_may_hold_anything(
    gradient: Callable[..., torch.Tensor], bad: float
) -> None:
    logits, factors = (
        random(ROWS, 23, dtype=torch.float32),
        factors_of(23, torch.float32, smoothed=False),
    )
    spoilt = logits.clone()
    spoilt[3, 5] = bad
    answers = []
    for rows in (logits, spoilt):
        sums = kernels.row_sums_by_torch(rows, None, smoothed=False)
        answers.append(gradient(rows, sums, factors, None, smoothed=False).clone())
    assert torch.equal(*answers)
    assert not answers[0][3].any() and answers[0][2].all()


def test_all_columns_masked() -> None:
    """As on a rank whose whole part of the vocabulary is: nothing beside a finite maximum
    elsewhere, and no NaN.
    """
    logits = torch.full((2, 23), -torch.inf)
    for sums_of in (kernels.row_sums_by_torch, kernels.row_sums_by_triton):
        sums: RowSums = sums_of(logits, None, smoothed=True)
        assert (
            (sums.highest == -torch.inf).all()
            and not sums.sum_exp.any()
            and (sums.below == -torch.inf).all()
        )


def test_autograd_is_told_of_the_change() -> None:
    """Else a backward pass that needs the logits would read the gradient in their place."""
    logits = random(ROWS, 23, dtype=torch.float32)
    sums, before = kernels.row_sums_by_torch(logits, None, smoothed=False), logits._version
    kernels.row_gradient_by_triton_(
        logits, sums, factors_of(23, torch.float32, smoothed=False), None, smoothed=False
    )
    assert logits._version > before
