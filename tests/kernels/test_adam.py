"""The fused AdamW kernel against its plain-torch twin, which tests/unit holds against torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bmtrain.kernels import adam
from bmtrain.kernels.adam import (
    AdamSettings,
    AdamTensors,
    adamw_reference,
    adamw_triton,
    adamw_update,
)
from bmtrain.kernels.chunks import Batch

# Lengths 0, 1, odd, of whole and of several chunks; starts that are aligned and that are not.
BOUNDS = [(0, 64), (64, 64), (64, 65), (66, 139), (150, 350), (400, 400 + 192)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of a short tensor."""
    monkeypatch.setattr(adam, "BLOCK", 64)


class State:
    """Flat tensors, and the parts of them that are parameters."""

    def __init__(self, weight: torch.dtype, grad: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight, self.grad = (
            torch.randn(600, generator=generator).to(weight),
            torch.zeros(600).to(grad),
        )
        self.master = self.weight if weight == torch.float32 else self.weight.float()
        self.mean, self.square = torch.zeros(600), torch.zeros(600)

    def parts(self) -> Batch:
        out = []
        for begin, end in BOUNDS:
            weight = self.weight[begin:end]
            master = weight if self.master is self.weight else self.master[begin:end]
            out.append(
                AdamTensors(
                    weight,
                    self.grad[begin:end],
                    master,
                    self.mean[begin:end],
                    self.square[begin:end],
                )
            )
        return Batch(out)

    def written(self) -> list[torch.Tensor]:
        return [self.weight, self.master, self.mean, self.square]


def settings(step: int, scale: float = 8.0, maximize: bool = False) -> AdamSettings:
    return AdamSettings(
        lr=0.01,
        beta1=0.8,
        beta2=0.95,
        eps=1e-6,
        weight_decay=0.2,
        step=step,
        scale=scale,
        maximize=maximize,
    )


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
def test_kernel_equals_twin(weight: torch.dtype, grad: torch.dtype) -> None:
    """Three updates of all tensors in one launch; what lies between the tensors is not touched."""
    want, got = State(weight, grad), State(weight, grad)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        values = torch.randn(600, generator=generator) * 8
        for state, path in ((want, adamw_reference), (got, adamw_triton)):
            state.grad.copy_(values)
            path(
                state.parts(),
                settings(step, maximize=step == 2),
                torch.zeros((), dtype=torch.float64),
            )
            assert torch.equal(state.grad, values.to(grad)), "the gradient was written"
    for name in ("master", "mean", "square"):
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-7, msg=name
        )
    # Triton's interpreter cuts bf16 off where the device rounds.
    torch.testing.assert_close(
        got.weight, want.weight, rtol=2.0**-7 if weight == torch.bfloat16 else 2e-3, atol=1e-7
    )


def test_dtypes_together() -> None:
    """One call for parameters of several kinds."""
    states = [State(dtype, dtype) for dtype in (torch.float16, torch.float32)]
    for state in states:
        state.grad.fill_(1)
    adamw_triton(Batch([part for state in states for part in state.parts().rows]), settings(1))
    for state in states:
        alone = State(state.weight.dtype, state.grad.dtype)
        alone.grad.fill_(1)
        adamw_triton(alone.parts(), settings(1))
        assert all(
            torch.equal(one, other)
            for one, other in zip(state.written(), alone.written(), strict=True)
        )


@pytest.mark.parametrize("verdict", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", [adamw_reference, adamw_triton, adamw_update])
def test_nothing_is_updated_on_a_verdict_that_is_not_finite(
    path: Callable[..., None], verdict: float
) -> None:
    """Bit by bit, though the gradients too are not finite."""
    state = State(torch.float16, torch.float16)
    state.grad.fill_(verdict)
    before = [x.clone() for x in state.written()]
    path(state.parts(), settings(1), torch.tensor(verdict, dtype=torch.float64))
    assert all(torch.equal(x, y) for x, y in zip(state.written(), before, strict=True))
    state.grad.fill_(1)
    path(state.parts(), settings(1), torch.tensor(1e300, dtype=torch.float64))
    assert not any(torch.equal(x, y) for x, y in zip(state.written(), before, strict=True))


def test_writes_are_counted() -> None:
    """Optimizers see by versions who has written the weights."""
    state = State(torch.bfloat16, torch.bfloat16)
    before = [x._version for x in state.written()]
    adamw_triton(state.parts(), settings(1))
    assert all(x._version > version for x, version in zip(state.written(), before, strict=True))


def test_nothing_to_update() -> None:
    """A rank may own no element, or no tensor."""
    nothing = torch.empty(0)
    for path in (adamw_reference, adamw_triton, adamw_update):
        path(Batch([]), settings(1))
        path(Batch([AdamTensors(nothing, nothing, nothing, nothing, nothing)]), settings(1))
