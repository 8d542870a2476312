"""The AdamW update: the CPU path and the formula against torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bmtrain.kernels.adam import AdamSettings, AdamTensors, adamw_reference, adamw_update
from bmtrain.kernels.chunks import Batch

PATHS = [adamw_update, adamw_reference]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_torch(
    path: Callable[..., None], maximize: bool, scale: float, dtype: torch.dtype
) -> None:
    """Ten updates with decay, of every dtype: masters are torch's fp32 weights, weights are their
    rounding.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(101, generator=generator).to(dtype)
    param = torch.nn.Parameter(start.float())
    torch_adam = torch.optim.AdamW(
        [param], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, maximize=maximize
    )
    weight = start.clone()
    master = weight if dtype == torch.float32 else weight.float()
    mean, square = torch.zeros(101), torch.zeros(101)
    for step in range(1, 11):
        grad = (torch.randn(101, generator=generator) * scale).to(dtype)
        param.grad = grad.float() / scale
        torch_adam.step()
        before = grad.clone()
        settings = AdamSettings(
            lr=0.01,
            beta1=0.8,
            beta2=0.95,
            eps=1e-6,
            weight_decay=0.2,
            step=step,
            scale=scale,
            maximize=maximize,
        )
        path(Batch([AdamTensors(weight, grad, master, mean, square)]), settings)
        assert torch.equal(grad, before), "the gradient was written"
    torch.testing.assert_close(master, param.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(weight, master.to(dtype))
    state = torch_adam.state[param]
    torch.testing.assert_close(mean, state["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(square, state["exp_avg_sq"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_to_update(path: Callable[..., None]) -> None:
    """A rank may own no element."""
    nothing = torch.empty(0)
    settings = AdamSettings(lr=1, beta1=0, beta2=0, eps=1, weight_decay=0, step=1)
    path(Batch([AdamTensors(nothing, nothing, nothing, nothing, nothing)]), settings)
    path(Batch([]), settings)


def test_rate_zero_changes_moments_only() -> None:
    """As in hold_steps: weight decay too is off."""
    weight, mean, square = torch.ones(3), torch.zeros(3), torch.zeros(3)
    settings = AdamSettings(lr=0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=1, step=1)
    adamw_update(Batch([AdamTensors(weight, torch.ones(3), weight, mean, square)]), settings)
    assert torch.equal(weight, torch.ones(3))
    assert mean.min() > 0 and square.min() > 0
