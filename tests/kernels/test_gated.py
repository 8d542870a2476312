"""Gated activations: kernel against twin, twin against torch's functions."""

import pytest
import torch
from torch.testing import assert_close

from model_center.kernels.gated import ACTIVATIONS, gated, gated_by_triton

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_kernel_equals_twin(act):
    for dtype, tolerance in TOLERANCE.items():
        for shape in ((0, 3), (1, 1), (3, 1, 700), (2, 1024)):
            generator = torch.Generator().manual_seed(0)
            gate, up = (3 * torch.randn(2, *shape, generator=generator)).to(dtype)
            expected, found = gated(gate, up, act), gated_by_triton(gate, up, act)
            assert found.dtype == expected.dtype == dtype and found.shape == shape
            assert_close(found, expected, rtol=tolerance, atol=tolerance)
            plain = (ACTIVATIONS[act](gate.float()) * up.float()).to(dtype)
            assert torch.equal(expected, plain)
    gate, up = torch.randn(2, 5, 7).mT
    assert_close(gated_by_triton(gate, up, act), gated(gate, up, act))
