"""Sums of parts: the kernel against its twin, the twin against fp64."""

import itertools

import pytest
import torch
from tests.tensors import by_kernel, by_torch
from torch.testing import assert_close

from bmtrain.kernels.sum_parts import BLOCK, sum_parts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_kernel_equals_twin(num_ranks):
    generator = torch.Generator().manual_seed(num_ranks)
    for dtype, wire, accumulate in itertools.product(DTYPES, DTYPES, (False, True)):
        for numel in (1, 64, BLOCK, BLOCK + 9):
            parts = torch.randn(num_ranks, numel, generator=generator).to(wire)
            old = torch.randn(numel, generator=generator).to(dtype)
            want, got, eps = old.clone(), old.clone(), torch.finfo(dtype).eps
            version = got._version
            by_torch(sum_parts, want, parts, accumulate=accumulate)
            by_kernel(sum_parts, got, parts, accumulate=accumulate)
            assert got._version > version
            # Triton's interpreter cuts off where the device rounds (tests/gpu has exact equality)
            rtol = eps if dtype == torch.bfloat16 else 0
            assert_close(got, want, rtol=rtol, atol=0)
            exact = parts.double().sum(0) + (old.double() if accumulate else 0.0)
            assert_close(want.double(), exact, rtol=eps, atol=1e-6)


def test_added_in_fp32_and_in_rank_order():
    """In bf16 the small parts would be lost one by one; in another order fp32 would round otherwise.
    fp64 is added in fp64. A rank may own no element.
    """

    def total(values, wire, dtype, *old):
        found = torch.tensor(old or [0.0]).to(dtype)
        parts = torch.tensor(values, dtype=torch.float64)[:, None].to(wire)
        sum_parts(found, parts, accumulate=bool(old))
        return found.item()

    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert total([1.0, 2.0**-8, 2.0**-8], half, half) == 1 + 2.0**-7
    assert total([1e8, -1e8, 1.0], single, single, 1.0) == 2.0
    assert total([1.0, 1e8, -1e8], single, single) == 0.0
    for dtype in (single, double):
        assert total([1.0, 1e-12, -1.0], double, dtype) == pytest.approx(1e-12, rel=1e-3)
    sum_parts(torch.empty(0), torch.empty(2, 0), accumulate=True)
