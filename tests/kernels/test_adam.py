"""AdamW: torch's operators and the kernel against torch.optim.AdamW."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bmtrain.kernels import adam
from bmtrain.kernels.adam import AdamSettings, AdamTensors, adamw_reference, adamw_triton

# Lengths 0, 1, odd, of whole and of several chunks; starts that are aligned and that are not.
BOUNDS = [(0, 64), (64, 64), (64, 65), (66, 139), (150, 350), (400, 400 + 192)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATHS = (adamw_reference, adamw_triton)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several chunks of a short tensor."""
    monkeypatch.setattr(adam, "CHUNK", 64)


class State:
    """Flat tensors, and the parts of them that are parameters."""

    def __init__(self, weight, grad):
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(600, generator=generator).to(weight)
        self.grad = torch.ones(600).to(grad)
        self.master = self.weight if weight == torch.float32 else self.weight.float()
        self.mean, self.square = torch.zeros(600), torch.zeros(600)

    def parts(self):
        whole = AdamTensors(self.weight, self.grad, self.master, self.mean, self.square)
        return [whole.part(begin, end) for begin, end in BOUNDS]

    def written(self):
        return [self.weight, self.master, self.mean, self.square]


def settings(step=1, **others):
    values = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.2}
    return AdamSettings(**values | others, step=step)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_torch(path, dtype):
    """Masters are torch's fp32 weights, weights are their rounding; what lies between the tensors is not
    touched, and the gradient not written.
    """
    inside = torch.zeros(600, dtype=torch.bool)
    for begin, end in BOUNDS:
        inside[begin:end] = True
    for grad_dtype, (maximize, scale) in itertools.product(DTYPES, ((False, 1.0), (True, 1024.0))):
        state, start = State(dtype, grad_dtype), State(dtype, grad_dtype)
        param = torch.nn.Parameter(start.master.clone())
        options: Any = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
        of_torch = torch.optim.AdamW([param], lr=0.01, maximize=maximize, **options)
        generator, verdict = torch.Generator().manual_seed(1), torch.zeros((), dtype=torch.float64)
        for step in range(1, 4):
            grad = (torch.randn(600, generator=generator) * scale).to(grad_dtype)
            state.grad.copy_(grad)
            param.grad = grad.float() / scale
            of_torch.step()
            path(state.parts(), settings(step, scale=scale, maximize=maximize), verdict)
            assert torch.equal(state.grad, grad), "the gradient was written"
        moments = of_torch.state[param]
        want = [param.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        for found, exact, old in zip(state.written()[1:], want, start.written()[1:], strict=True):
            assert_close(found[inside], exact[inside], rtol=1e-5, atol=1e-6)
            assert torch.equal(found[~inside], old[~inside])
        # Triton's interpreter cuts bf16 off where the device rounds.
        is_cut = path is adamw_triton and dtype == torch.bfloat16
        rtol, rounded = 2.0**-7 if is_cut else 0, state.master.to(dtype)
        assert_close(state.weight, rounded, rtol=rtol, atol=0)


def test_dtypes_together():
    """One call for parameters of several kinds."""
    states = [State(dtype, dtype) for dtype in (torch.float16, torch.float32)]
    adamw_triton([part for state in states for part in state.parts()], settings())
    for state in states:
        alone = State(state.weight.dtype, state.grad.dtype)
        adamw_triton(alone.parts(), settings())
        assert all(map(torch.equal, state.written(), alone.written()))


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_updated_on_a_verdict_that_is_not_finite(path):
    """Bit by bit, though the gradients too are not finite. Optimizers see by versions who has written
    the weights. A rank may own no element, or no tensor. At rate 0, as in hold_steps, moments alone
    change: weight decay too is off.
    """
    state, nothing = State(torch.float16, torch.float16), torch.empty(0)
    before = [x.clone() for x in state.written()]
    for verdict in (math.nan, math.inf, -math.inf):
        state.grad.fill_(verdict)
        path(state.parts(), settings(), torch.tensor(verdict, dtype=torch.float64))
        assert all(map(torch.equal, state.written(), before))
    state.grad.fill_(1)
    versions = [x._version for x in state.written()]
    path(state.parts(), settings(), torch.tensor(1e300, dtype=torch.float64))
    for x, old, version in zip(state.written(), before, versions, strict=True):
        assert not torch.equal(x, old)
        # torch's own operator does not count
        assert x._version > version or path is adamw_reference
    before = [x.clone() for x in state.written()]
    path(state.parts(), settings(2, lr=0.0))
    assert [*map(torch.equal, state.written(), before)] == [True, True, False, False]
    path([], settings())
    path([AdamTensors(nothing, nothing, nothing, nothing, nothing)], settings())
