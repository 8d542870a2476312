"""Sums of squares: the kernel and its twin against exact arithmetic, and what is not finite found
anywhere.
"""

import itertools
import math

import pytest
import torch
from tests.tensors import by_kernel, by_torch

from bmtrain.kernels import squares
from bmtrain.kernels.squares import sum_of_squares

# The interpreter's numpy tells of the overflow that the kernel reckons with.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)
CPU, INF, NAN = torch.device("cpu"), math.inf, math.nan
HALF = [torch.float32, torch.bfloat16, torch.float16]
# Lengths 0, 1, odd, of whole and of several chunks; starts that are aligned and that are not.
BOUNDS = [(0, 64), (64, 64), (64, 65), (66, 399), (400, 784), (785, 1000)]
both_paths = pytest.mark.parametrize("path", [by_torch, by_kernel])


def total(path, tensors):
    found = path(sum_of_squares, tensors, CPU)
    assert found.dtype == torch.float64 and found.shape == ()
    return found.item()


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs one program after another; three still take several chunks each."""
    monkeypatch.setattr(squares, "NUM_PROGRAMS", 3)
    monkeypatch.setattr(squares, "BLOCK", 64)


def tensors(dtype, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    flat = (torch.randn(1000, generator=generator) * scale).to(dtype)
    return [flat[begin:end] for begin, end in BOUNDS]


def check(path, parts):
    exact = math.fsum(x * x for part in parts for x in part.double().tolist())
    assert total(path, parts) == pytest.approx(exact, rel=1e-6)
    assert total(path, parts) == total(path, parts), "the same tensors gave other bits"


@both_paths
def test_sum(path):
    """Squares may leave the range of the dtype: they are finite, as the elements are, and right; also
    where one large element stands among small ones. fp16's smallest number counts; zeros are zero.
    """
    for dtype, scale in zip(HALF, (3e37, 3e37, 1e4), strict=True):
        check(path, tensors(dtype))
        check(path, tensors(dtype, scale))
        lonely = tensors(dtype)
        lonely[-1][-1] = torch.finfo(dtype).max
        check(path, lonely)
    check(path, [part for dtype in HALF for part in tensors(dtype)])
    check(path, [torch.full((100,), 2.0**-24, dtype=torch.float16)])
    assert total(path, [torch.zeros(70)]) == 0


@both_paths
@pytest.mark.parametrize("dtype", HALF)
def test_not_finite_exactly_if_an_element_is_not(path, dtype):
    """Wherever it stands: the first and the last element of every tensor. Nothing cancels."""
    parts = [part for part in tensors(dtype) if part.numel()]
    bad = itertools.cycle((INF, -INF, NAN))
    for part, place in itertools.product(parts, (0, -1)):
        before, part[place] = part[place].clone(), next(bad)
        assert not math.isfinite(total(path, parts)), f"at {place} of {part.numel()}"
        part[place] = before
    assert math.isfinite(total(path, parts))
    for values in ((INF, -INF), (NAN, INF), (NAN, 3e38)):
        assert not math.isfinite(total(path, [torch.tensor(values).to(dtype)]))


def test_nothing_to_sum():
    """A rank may own no element, or no tensor. fp64 is squared in fp64, by the twin."""
    for path in (by_torch, by_kernel):
        assert total(path, []) == total(path, [torch.empty(0)]) == 0
    large = [torch.tensor([1e100], dtype=torch.float64)]
    assert total(by_torch, large) == pytest.approx(1e200)
