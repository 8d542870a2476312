"""Gated activations: kernel against twin, twin against torch's functions."""

from __future__ import annotations

import pytest
import torch

from bmtrain.kernels.gated import ACTIVATIONS, gated, gated_by_triton

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1, 700), (2, 1024)])
def test_kernel_equals_twin(shape: tuple[int, ...], act: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(2, *shape, generator=generator)).to(dtype)
    expected, found = gated(gate, up, act), gated_by_triton(gate, up, act)
    assert found.dtype == expected.dtype == dtype and found.shape == shape
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(expected, (ACTIVATIONS[act](gate.float()) * up.float()).to(dtype))


def test_nothing_and_strides() -> None:
    assert gated_by_triton(torch.empty(0, 3), torch.empty(0, 3), "silu").shape == (0, 3)
    gate, up = torch.randn(2, 5, 7).mT
    torch.testing.assert_close(gated_by_triton(gate, up, "relu"), gate.relu() * up)
