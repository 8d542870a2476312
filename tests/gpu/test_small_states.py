"""Small states of Adam on real GPUs: the kernel against its twin, whole steps, states in host
memory.
"""

import functools
import math
from typing import Any

import pytest
import torch
from tests.gpu.test_engine import Layer, forbid_waiting, on_gpus
from tests.gpu.test_optimizer import quiet
from tests.kernels import test_adam

import bmtrain as bmt
from bmtrain.kernels import adam
from bmtrain.kernels.adam import AdamSettings, adamw_reference, adamw_triton
from bmtrain.kernels.blockwise import Blocks
from bmtrain.optim import streaming

pytestmark = pytest.mark.gpu
# Lengths 1, of no whole block, of whole blocks, of many chunks; places beyond 32 bits.
SIZES = {1: 0, 63: 64, 64: 128, 65: 0, 4096: 640, 100_069: 2**32 - 128, 500_032: 0}
KINDS = [
    (torch.float32, "fp32"),
    (torch.float16, "fp32"),
    (torch.bfloat16, "fp32"),
    (torch.bfloat16, "split"),
    (torch.bfloat16, "none"),
]
FORMS: list[dict[str, str]] = [
    {"moments": "8bit"},
    {"moments": "8bit", "master_weights": "split"},
    {"moments": "8bit", "master_weights": "none"},
    {"master_weights": "split"},
]


tensors = functools.partial(test_adam.tensors, sizes=SIZES, device="cuda")


def written(members):
    """By their names."""
    found: dict[str, list[torch.Tensor]] = {}
    for t in members:
        named = {"weight": t.weight, "master": t.master, "mean": t.mean, "square": t.square}
        for name, x in named.items():
            parts = x if isinstance(x, Blocks) else [] if x is None else [x]
            for place, part in enumerate(parts):
                found.setdefault(f"{name}{place}", []).append(part)
    return found


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("weight", "master"), KINDS)
def test_kernel_equals_twin(weight, master, quantised, grad, monkeypatch):
    """Ten updates, bit by bit; the twin's moments and masters pass through the kernel for fp32."""
    monkeypatch.setattr(adam, "step_of_masters", test_adam.with_the_kernel)
    want, got = (tensors(master, weight, quantised, grad) for _ in range(2))
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(1, 11):
        for one, other in zip(want, got, strict=True):
            values = torch.randn(one.grad.shape, generator=generator, device="cuda") * 8
            one.grad.copy_(values)
            other.grad.copy_(values)
        settings = AdamSettings(
            lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.2, step=step, scale=8.0
        )
        adamw_reference(want, settings)
        adamw_triton(got, settings)
    differing = {
        name: f"{int((x != y).sum())} of {x.numel()}"
        for name, parts in written(want).items()
        for x, y in zip(parts, written(got)[name], strict=True)
        if not torch.equal(x, y)
    }
    assert not differing


def test_nothing_is_updated_on_a_verdict_that_is_not_finite():
    """The host does not learn of it."""
    for master in ("split", "none"):
        members = tensors(master)
        for t in members:
            t.grad.fill_(math.nan)
        before = {name: [x.clone() for x in parts] for name, parts in written(members).items()}
        verdict = torch.full((), math.nan, dtype=torch.float64, device="cuda")
        forbid_waiting(True)
        settings = AdamSettings(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2, step=1)
        adamw_triton(members, settings, verdict)
        forbid_waiting(False)
        for name, parts in written(members).items():
            assert all(map(torch.equal, parts, before[name])), name


@pytest.mark.parametrize("form", FORMS)
def test_a_training_step_does_not_wait_for_the_device(form):
    on_gpus(quiet, "bfloat16", form)


def in_host_memory(form):
    streaming.LOAD_BYTES = 20_000
    found: list[list[Any]] = []
    kinds: list[Any] = [bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer]
    for kind in kinds:
        torch.manual_seed(1)
        block = bmt.Block(Layer(256).to(bmt.device(), torch.bfloat16))
        params: list[Any] = list(block.parameters())
        optimizer = kind(params, lr=0.01, weight_decay=0.1, **form)
        for step in range(10):
            for place, param in enumerate(params):
                torch.manual_seed(100 * step + place)
                param.grad = torch.randn(param.shape, device=bmt.device()).to(param.dtype) * 4
            optimizer.step(scale=4.0)
        states = optimizer.state_dict(gather=True)["state"]
        found.append([x for state in states.values() for x in state.values()])
        found[-1] += [param.gather().cpu() for param in params]
    for want, got in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(want))


@pytest.mark.fresh  # sets a constant
@pytest.mark.parametrize("form", FORMS)
def test_states_in_host_memory_give_the_same_training(form):
    """AdamOffloadOptimizer against AdamOptimizer, bit for bit."""
    on_gpus(in_host_memory, form)
