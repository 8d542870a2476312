"""Scaling in place: the kernel against its twin."""

from __future__ import annotations

import math

import pytest
import torch

from bmtrain.kernels import scale
from bmtrain.kernels.chunks import Batch
from bmtrain.kernels.scale import scale_, scale_reference_, scale_triton_

BOUNDS = [(0, 64), (64, 64), (64, 65), (66, 399), (400, 1200), (1344, 1344 + 640)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for each program of a short tensor."""
    monkeypatch.setattr(scale, "NUM_PROGRAMS", 3)
    monkeypatch.setattr(scale, "BLOCK", 64)


@pytest.mark.parametrize("factor", [1.0, 0.37, 0.0, math.nan])
@pytest.mark.parametrize(
    "dtypes", [[torch.float32], [torch.float16], [torch.bfloat16], [torch.float32, torch.float16]]
)
def test_kernel_equals_twin(dtypes: list[torch.dtype], factor: float) -> None:
    """Every element of the tensors is multiplied and rounded once, none beside them is touched."""
    number = torch.tensor(factor)
    results = []
    for path in (scale_reference_, scale_triton_):
        flats = [
            torch.randn(2000, generator=torch.Generator().manual_seed(1)).to(dtype)
            for dtype in dtypes
        ]
        parts = [flat[begin:end] for flat in flats for begin, end in BOUNDS]
        versions = [flat._version for flat in flats]
        path(Batch([(part,) for part in parts]), number)
        assert all(flat._version > before for flat, before in zip(flats, versions, strict=True)), (
            "written unnoticed"
        )
        results.append(flats)
    for want, got in zip(*results, strict=True):
        # Triton's interpreter cuts off where the device rounds (tests/gpu has exact equality)
        if want.dtype == torch.bfloat16:
            torch.testing.assert_close(got, want, rtol=2.0**-7, atol=0, equal_nan=True)
        else:
            assert torch.equal(got.isnan(), want.isnan()) and torch.equal(
                got.nan_to_num(), want.nan_to_num()
            )


def test_a_factor_of_one_changes_no_bit() -> None:
    """Not even where a product would: NaN, infinities and negative zero stay."""
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.5])
    before = values.clone().view(torch.int32)
    scale_triton_(Batch([(values,)]), torch.tensor(1.0))
    assert torch.equal(values.view(torch.int32), before)


def test_nothing_to_scale() -> None:
    for path in (scale_, scale_reference_, scale_triton_):
        path(Batch([]), torch.tensor(0.5))
        path(Batch([(torch.empty(0),)]), torch.tensor(0.5))
