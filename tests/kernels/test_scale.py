"""Scaling in place: the kernel against its twin."""

from __future__ import annotations

import math

import pytest
import torch

from bmtrain.kernels import scale
from bmtrain.kernels.chunks import Batch
from bmtrain.kernels.scale import scale_, scale_reference_, scale_triton_

BOUNDS = [(0, 64), (64, 64), (64, 65), (66, 399), (400, 784)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for each program of a short tensor."""
    monkeypatch.setattr(scale, "NUM_PROGRAMS", 3)
    monkeypatch.setattr(scale, "BLOCK", 64)


@pytest.mark.parametrize("factor", [1.0, 0.37, 0.0, math.nan])
def test_kernel_equals_twin(factor: float) -> None:
    """Every element of the tensors is multiplied and rounded once, none beside them is touched."""
    for names in ("float32", "float16", "bfloat16", "float32 float16"):
        dtypes, results = [getattr(torch, name) for name in names.split()], []
        for path in (scale_reference_, scale_triton_):
            generator = torch.Generator().manual_seed(1)
            flats = [torch.randn(900, generator=generator).to(dtype) for dtype in dtypes]
            before = [(flat.clone(), flat._version) for flat in flats]
            rows = [(flat[begin:end],) for flat in flats for begin, end in BOUNDS]
            path(Batch(rows), torch.tensor(factor))
            for flat, (old, version) in zip(flats, before, strict=True):
                assert flat._version > version, "written unnoticed"
                assert torch.equal(flat[784:], old[784:]) and flat[65] == old[65]
            results.append(flats)
        for want, got in zip(*results, strict=True):
            # Triton's interpreter cuts off where the device rounds (tests/gpu has exact equality)
            rtol = 2.0**-7 if want.dtype == torch.bfloat16 else 0
            torch.testing.assert_close(got, want, rtol=rtol, atol=0, equal_nan=True)


def test_a_factor_of_one_changes_no_bit() -> None:
    """Not even where a product would: NaN, infinities and negative zero stay. Nothing may be given."""
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.5])
    values.view(torch.int32)[0] = 0x7F800001  # a NaN of which a product makes another one
    before = values.clone().view(torch.int32)
    scale_triton_(Batch([(values,)]), torch.tensor(1.0))
    assert torch.equal(values.view(torch.int32), before)
    for path in (scale_, scale_reference_, scale_triton_):
        path(Batch([]), torch.tensor(0.5))
        path(Batch([(torch.empty(0),)]), torch.tensor(0.5))
