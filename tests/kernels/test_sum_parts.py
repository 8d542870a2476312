"""Sums of parts: the kernel against its twin, the twin against fp64."""

from __future__ import annotations

import pytest
import torch

from bmtrain.kernels.sum_parts import sum_parts, sum_parts_reference, sum_parts_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_kernel_equals_twin(
    num_ranks: int, dtype: torch.dtype, wire: torch.dtype, accumulate: bool
) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    for numel in (1, 64, 4096, 5000):
        parts = torch.randn(num_ranks, numel, generator=generator).to(wire)
        old = torch.randn(numel, generator=generator).to(dtype)
        want, got = old.clone(), old.clone()
        sum_parts_reference(want, parts, accumulate=accumulate)
        sum_parts_triton(got, parts, accumulate=accumulate)
        # Triton's interpreter cuts off where the device rounds (tests/gpu has exact equality)
        if dtype == torch.bfloat16:
            torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=0)
        else:
            assert torch.equal(got, want)
        exact = parts.double().sum(0) + (old.double() if accumulate else 0.0)
        torch.testing.assert_close(want.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_added_in_fp32_and_in_rank_order() -> None:
    """In bf16 the small parts would be lost one by one; in another order fp32 would round
    otherwise.
    """
    parts = torch.tensor([[1.0], [2.0**-8], [2.0**-8]]).bfloat16()
    total = torch.zeros(1).bfloat16()
    sum_parts(total, parts, accumulate=False)
    assert total.item() == 1 + 2.0**-7
    parts = torch.tensor([[1e8], [-1e8], [1.0]])
    total = torch.tensor([1.0])
    sum_parts(total, parts, accumulate=True)
    assert total.item() == 2.0
    sum_parts(total, parts.roll(1, 0), accumulate=False)
    assert total.item() == 0.0


@pytest.mark.parametrize("total_dtype", [torch.float64, torch.float32])
def test_fp64(total_dtype: torch.dtype) -> None:
    parts = torch.tensor([[1.0], [1e-12], [-1.0]], dtype=torch.float64)
    total = torch.zeros(1, dtype=total_dtype)
    sum_parts(total, parts, accumulate=False)
    assert total.item() == pytest.approx(1e-12, rel=1e-3)


def test_nothing_to_sum() -> None:
    """A rank may own no element."""
    sum_parts(torch.empty(0), torch.empty(2, 0), accumulate=True)
