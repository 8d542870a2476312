"""Sums of squares: the kernel and its twin against exact arithmetic, and what is not finite found
anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from bmtrain.kernels import squares
from bmtrain.kernels.chunks import Batch
from bmtrain.kernels.squares import sum_of_squares, sum_of_squares_reference, sum_of_squares_triton

# The interpreter's numpy tells of the overflow that the kernel reckons with.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)
CPU = torch.device("cpu")
HALF = [torch.float32, torch.bfloat16, torch.float16]
Path = Callable[[list[torch.Tensor], torch.device], torch.Tensor]


def of_batch(function: Callable[[Batch, torch.device], torch.Tensor]) -> Path:
    return lambda tensors, device: function(Batch([(tensor,) for tensor in tensors]), device)


PATHS = [of_batch(sum_of_squares_reference), of_batch(sum_of_squares_triton)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after another; three still take several chunks each."""
    monkeypatch.setattr(squares, "NUM_PROGRAMS", 3)
    monkeypatch.setattr(squares, "BLOCK", 64)


def tensors(dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    """Lengths 0, 1, odd, of whole and of several chunks; starts that are aligned and that are
    not.
    """
    generator = torch.Generator().manual_seed(0)
    flat = (torch.randn(2000, generator=generator) * scale).to(dtype)
    bounds = [
        (0, 64),
        (64, 64),
        (64, 65),
        (65, 66),
        (66, 399),
        (400, 1200),
        (1201, 1329),
        (1344, 1344 + 640),
    ]
    return [flat[begin:end] for begin, end in bounds]


def exactly(parts: list[torch.Tensor]) -> float:
    return math.fsum(x * x for part in parts for x in part.double().tolist())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("path", PATHS)
def test_sum(path: Path, dtype: torch.dtype) -> None:
    parts = tensors(dtype)
    total = path(parts, CPU)
    assert total.dtype == torch.float64 and total.shape == ()
    assert total.item() == pytest.approx(exactly(parts), rel=1e-6)
    assert torch.equal(path(parts, CPU), total), "the same tensors gave other bits"


@pytest.mark.parametrize("path", PATHS)
def test_dtypes_together(path: Path) -> None:
    parts = [part for dtype in HALF for part in tensors(dtype)]
    assert path(parts, CPU).item() == pytest.approx(exactly(parts), rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 3e37), (torch.bfloat16, 3e37), (torch.float16, 1e4)]
)
@pytest.mark.parametrize("path", PATHS)
def test_squares_may_leave_the_range_of_the_dtype(
    path: Path, dtype: torch.dtype, scale: float
) -> None:
    """They are finite, as the elements are, and right; also where one large element stands among
    small ones.
    """
    parts = tensors(dtype, scale)
    assert path(parts, CPU).item() == pytest.approx(exactly(parts), rel=1e-6)
    lonely = tensors(dtype)
    lonely[-1][-1] = torch.finfo(dtype).max
    assert path(lonely, CPU).item() == pytest.approx(exactly(lonely), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("path", PATHS)
def test_not_finite_exactly_if_an_element_is_not(
    path: Path, dtype: torch.dtype, bad: float
) -> None:
    """Wherever it stands: the first and the last element of every tensor."""
    parts = tensors(dtype)
    for part, place in itertools.product(parts, (0, -1)):
        if part.numel():
            before = part[place].clone()
            part[place] = bad
            assert not math.isfinite(path(parts, CPU).item()), f"{bad} at {place} of {part.numel()}"
            part[place] = before
    assert math.isfinite(path(parts, CPU).item())


def test_infinities_of_both_signs_and_nan_together() -> None:
    """Nothing cancels."""
    for path, bad in itertools.product(
        PATHS, ((math.inf, -math.inf), (math.nan, math.inf), (math.nan, 3e38))
    ):
        assert not math.isfinite(path([torch.tensor(bad)], CPU).item())


@pytest.mark.parametrize("path", PATHS)
def test_small_squares(path: Path) -> None:
    """fp16's smallest number counts; zeros are zero."""
    tiny = torch.full((100,), 2.0**-24, dtype=torch.float16)
    assert path([tiny], CPU).item() == pytest.approx(100 * 2.0**-48, rel=1e-6)
    assert path([torch.zeros(70)], CPU).item() == 0


@pytest.mark.parametrize("nothing", [[], [torch.empty(0)]])
def test_nothing_to_sum(nothing: list[torch.Tensor]) -> None:
    """A rank may own no element, or no tensor."""
    for path in (*PATHS, of_batch(sum_of_squares)):
        assert path(nothing, CPU).item() == 0


def test_what_the_kernel_does_not_take_is_summed_by_the_twin() -> None:
    """fp64 is squared in fp64."""
    assert of_batch(sum_of_squares)(
        [torch.tensor([1e100], dtype=torch.float64)], CPU
    ).item() == pytest.approx(1e200)
