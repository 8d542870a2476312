"""The optimizer step on real GPUs: kernels against their twins, overflow without waiting, nothing
in the way of the device.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from tests.gpu.test_engine import Layer, forbid_waiting, on_gpus
from tests.ranks import models
from tests.tensors import by_torch

import bmtrain as bmt
from bmtrain.errors import ParameterError
from bmtrain.kernels.adam import AdamSettings, AdamTensors, update_tensors
from bmtrain.kernels.scale import scale_
from bmtrain.kernels.squares import sum_of_squares
from bmtrain.optim import streaming

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Lengths 0, 1, odd, of one and of many chunks; starts that are aligned and that are not.
BOUNDS = [
    (0, 64),
    (64, 64),
    (64, 65),
    (66, 100_069),
    (100_069, 100_071),
    (100_080, 500_080),
    (500_096, 700_000),
]


def normal(dtype, seed, numel=700_000):
    return torch.randn(
        numel, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"
    ).to(dtype)


def cut(flat):
    return [flat[begin:end] for begin, end in BOUNDS]


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_adam_is_that_of_torch(dtype, grad_dtype):
    """Ten updates of many tensors at once against torch.optim.AdamW; what lies between the
    tensors is not touched.
    """
    weight = normal(dtype, 0)
    master = weight if dtype == torch.float32 else weight.float()
    mean, square = torch.zeros(700_000, device="cuda"), torch.zeros(700_000, device="cuda")
    # Not torch's fused kernel, whose 1 - beta2 has the accuracy of fp32 (torch 2.11).
    plain = [x.clone().requires_grad_() for x in cut(weight.float())]
    rates: Any = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
    torchs = torch.optim.AdamW(plain, betas=(0.9, 0.999), foreach=False, **rates)
    expected = [master.clone(), mean.clone(), square.clone()]
    for step in range(1, 11):
        grad = normal(grad_dtype, step) * 8
        parts = zip(cut(weight), cut(grad), cut(master), cut(mean), cut(square), strict=True)
        tensors = [AdamTensors(w, g, w if master is weight else x, m, v) for w, g, x, m, v in parts]
        update_tensors(tensors, AdamSettings(beta1=0.9, beta2=0.999, step=step, scale=8.0, **rates))
        for param, part in zip(plain, cut(grad), strict=True):
            param.grad = part.float() / 8
        torchs.step()
    assert torch.equal(weight, master.to(dtype))
    states = [torchs.state[param] for param in plain]
    moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    own = zip(plain, *moments, strict=True)
    for found in zip(*map(cut, expected), own, strict=True):
        for part, value in zip(found[:3], found[3], strict=True):
            part.copy_(value.detach())
    names = ("master", "exp_avg", "exp_avg_sq")
    for name, want, got in zip(names, expected, (master, mean, square), strict=True):
        models.assert_same(got, want, name, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares(dtype):
    """Right, the same bits wherever the tensors lie and whatever ran before, and right beyond the
    range of fp32.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    for scale in (1.0, 1e4 if dtype == torch.float16 else 3e37):
        flat = (normal(torch.float32, 3) * scale).to(dtype)
        want = sum(part.double().square().sum().item() for part in cut(flat))
        got = sum_of_squares(cut(flat), device)
        assert got.item() == pytest.approx(want, rel=1e-6)
        assert all(torch.equal(sum_of_squares(cut(flat.clone()), device), got) for _ in range(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found_anywhere(dtype):
    """NaN and both infinities, at the first and the last element of every tensor."""
    device = torch.device("cuda", torch.cuda.current_device())
    parts = cut(normal(dtype, 4))
    for part, place, bad in itertools.product(parts, (0, -1), (math.nan, math.inf, -math.inf)):
        if part.numel():
            before = part[place].clone()
            part[place] = bad
            assert not math.isfinite(sum_of_squares(parts, device).item()), (
                f"{bad} at {place} of {part.numel()}"
            )
            part[place] = before
    assert math.isfinite(sum_of_squares(parts, device).item())


@pytest.mark.parametrize("factor", [1.0, 0.37, 0.0, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_is_that_of_the_twin(dtype, factor):
    """Bit by bit, and nothing between the tensors."""
    number = torch.tensor(factor, device="cuda")
    want, got = normal(dtype, 5), normal(dtype, 5)
    by_torch(scale_, cut(want), number)
    scale_(cut(got), number)
    assert torch.equal(want.nan_to_num(nan=7.0), got.nan_to_num(nan=7.0))


class Training:
    """A few blocks and an ordinary layer, trained in half precision under one manager."""

    def __init__(self, dtype, scale, **form):
        torch.manual_seed(3)
        blocks = [bmt.Block(Layer(256).to(bmt.device(), dtype)) for _ in range(4)]
        self.model = torch.nn.Sequential(
            *blocks, torch.nn.Linear(256, 8, device=bmt.device(), dtype=dtype)
        )
        decayed = [
            p
            for p in self.model.parameters()
            if p.dim() > 1 or isinstance(p, bmt.DistributedParameter)
        ]
        others = [p for p in self.model.parameters() if not any(p is q for q in decayed)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        kind = bmt.optim.AdamOptimizer
        self.optimizer = kind(groups, lr=1e-3, **form)
        self.schedule = bmt.lr_scheduler.Linear(self.optimizer, 1e-3, 3, 100)
        self.manager = bmt.optim.OptimManager(loss_scale=scale, loss_scale_steps=5)
        self.manager.add_optimizer(self.optimizer, self.schedule)
        self.x = torch.randn(16, 256, device=bmt.device()).to(dtype)

    def backward(self, factor=1.0):
        self.manager.zero_grad()
        self.manager.backward(self.model(self.x).float().square().mean() * factor)

    def step(self):
        self.manager.clip_grad_norm(self.optimizer.param_groups, 0.1)
        self.manager.step()

    def snapshot(self):
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [x.detach().clone() for x in (*self.model.parameters(), *states)]

    def counts(self):
        steps = [state["step"] for state in self.optimizer.state.values()]
        return [
            *steps,
            self.schedule.num_iter,
            self.optimizer.param_groups[0]["lr"],
            self.manager.state_dict()["num_steps"],
        ]


def overflow(is_last):
    training = Training(torch.float16, 64.0)
    for step in range(9):
        if step in (3, 4, 7):
            before, counts, scale = (
                training.snapshot(),
                training.counts(),
                training.manager.loss_scale,
            )
            bad = math.inf if bmt.rank() == bmt.world_size() - 1 else 1.0
            training.backward(bad)
            forbid_waiting(True)
            training.step()
            forbid_waiting(False)
            assert training.schedule.num_iter == counts[-3] + 1, (
                "the step is taken back when the verdict is asked for"
            )
            if is_last:
                assert training.manager.loss_scale == scale / 2
            else:
                training.backward()
            assert training.counts() == counts
            assert all(
                torch.equal(one, other)
                for one, other in zip(training.snapshot(), before, strict=True)
            )
            assert training.manager.loss_scale == scale / 2
        else:
            training.backward()
            training.step()
    assert training.counts()[-1] == 6 and {
        state["step"] for state in training.optimizer.state.values()
    } == {6}


@pytest.mark.parametrize("is_last", [False, True])
def test_an_overflow_leaves_everything_as_it_was(is_last):
    """Weights, moments and masters bit by bit, step counts, schedule; asked for at once, or known
    at the next backward.
    """
    on_gpus(overflow, is_last)


def fp16_equals_waiting():
    """The device's decision gives the training that the host's decision gives."""
    results = []
    for skips in (True, False):
        training = Training(torch.float16, 2.0**18)  # overflows at the first steps
        if not skips:
            # which must not be called for a step left out
            training.optimizer.register_step_post_hook(lambda *_: None)
        scales = []
        for _ in range(12):
            training.backward()
            training.step()
            scales.append(training.manager.loss_scale)
        results.append((training.snapshot(), training.counts(), scales))
    (one, counts, scales), (other, same_counts, same_scales) = results
    assert scales == same_scales and counts == same_counts and counts[-1] < 12
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_deciding_on_the_device_is_deciding_on_the_host():
    """Bitwise the same weights and state, the same scales, schedule and counts, with steps that
    overflow by themselves.
    """
    on_gpus(fp16_equals_waiting)


def quiet(name, form):
    training = Training(getattr(torch, name), 64.0 if name == "float16" else None, **form)
    for step in range(8):
        forbid_waiting(step >= 2)
        training.backward()
        training.step()
        forbid_waiting(False)
    assert training.counts()[-1] == 8
    assert all(x.isfinite().all() for x in training.snapshot())


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_training_step_does_not_wait_for_the_device(name):
    """Neither to clip nor to learn of an overflow."""
    on_gpus(quiet, name, {})


def part_and_meet():
    training = Training(torch.float32, None)
    ordinary = training.model.get_parameter("4.weight")
    for step in range(4):  # the fourth step begins a comparison
        if step == 3 and bmt.rank() == 1:
            ordinary.data.add_(1)
        forbid_waiting(step == 3)
        training.backward()
        training.step()
        forbid_waiting(False)
    before = training.snapshot()
    training.backward()
    with pytest.raises(ParameterError, match="values differ between ranks"):
        training.step()
    assert all(torch.equal(x, y) for x, y in zip(training.snapshot(), before, strict=True))
    with torch.no_grad():
        ordinary.copy_(bmt.distributed.broadcast(ordinary.detach(), 0))
    for _ in range(4):  # the eighth compares again
        training.backward()
        training.step()
    assert len({float(x) for x in bmt.gather_result(ordinary.detach().sum()[None])}) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one rank differs from nobody")
def test_ordinary_parameters_that_part_are_seen_a_step_later():
    """Without a wait of the host; the program can mend them and go on."""
    on_gpus(part_and_meet)


def launches():
    blocks = Training(torch.bfloat16, None).model[:4]
    params = list(blocks.parameters())
    optimizer = bmt.optim.AdamOptimizer(
        [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2]}], lr=1e-3
    )
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    x = torch.randn(16, 256, device=bmt.device(), dtype=torch.bfloat16)

    def step():
        manager.clip_grad_norm(optimizer.param_groups, 0.1)
        manager.step()

    for _ in range(3):
        manager.zero_grad()
        manager.backward(blocks(x).float().square().mean())
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        step()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]


def test_few_launches():
    """Two groups in turns over four storages: a launch of Adam each, one of the norm, one of
    clipping, and small ones; one of them adds the mark of a loss that is not finite.
    """
    for names in on_gpus(launches):
        assert sum("adamw_kernel" in name for name in names) == 2
        # One of them makes the sum infinite where Adam could not keep it.
        assert len(names) <= 16, "\n".join(names)


def offloaded():
    """Ten steps of the same gradients by both optimizers, with accumulated counts, loss scale,
    groups and many chunks.
    """
    streaming.LOAD_BYTES = 20_000
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for kind in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer):
            torch.manual_seed(1)
            block = bmt.Block(Layer(256).to(bmt.device(), dtype))
            params = list(block.parameters())
            optimizer = kind(
                [
                    {"params": params[::2], "weight_decay": 0.1},
                    {"params": params[1::2], "lr": 0.02},
                ],
                lr=0.01,
            )
            for step in range(10):
                for place, param in enumerate(params):
                    torch.manual_seed(100 * step + place)
                    grad = torch.randn(param.shape, device=bmt.device()).to(dtype) * 4
                    param.grad = None if (step + place) % 4 == 0 else grad
                optimizer.step(scale=4.0)
            states = [optimizer.state[param] for param in params]
            exact = [
                state.get("master", param).detach().cpu()
                for state, param in zip(states, params, strict=True)
            ]
            moments = [state[name].cpu() for state in states for name in ("exp_avg", "exp_avg_sq")]
            results.append([x.clone() for x in (*exact, *moments)])
            for param, master in zip(params, exact, strict=True):
                assert torch.equal(param.cpu(), master.to(dtype)), (
                    "the weights are not the rounded masters"
                )
        for place, (want, got) in enumerate(zip(*results, strict=True)):
            assert torch.equal(got, want), f"{dtype} {place}"


@pytest.mark.fresh  # sets a constant
def test_the_state_in_host_memory_gives_the_same_training():
    """AdamOffloadOptimizer against AdamOptimizer: masters, moments, weights."""
    on_gpus(offloaded)
