"""Steps of which the host learns later that the device has left them out: nothing of them stays."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.optim.verdict import Verdict

BAD = (math.inf, -math.inf, math.nan)


def as_on_a_gpu() -> None:
    """The CPU knows at once what is finite; from here on the host asks as late as with a GPU."""
    Verdict.needs_waiting = True  # type: ignore[method-assign, assignment]


def make_model() -> nn.Module:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 2), nn.Linear(2, 1)).half()
    model[0] = bmt.Block(model[0])
    return bmt.BMTrainModelWrapper(model)


Kind = type[AdamOptimizer] | type[AdamOffloadOptimizer]
KINDS: list[Kind] = [AdamOptimizer, AdamOffloadOptimizer]


class Training:
    """A small fp16 model under one manager, on every rank's own rows."""

    def __init__(
        self,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        scale: float = 64.0,
        kind: Kind = AdamOptimizer,
    ) -> None:
        self.model = make_model()
        self.plain = nn.Linear(1, 1).half()  # an ordinary layer
        params = [*self.model.parameters(), *self.plain.parameters()]
        self.optimizer = kind(
            [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}], lr=0.01
        )
        self.schedule: Any = None if schedule is None else schedule(self.optimizer)
        self.manager = OptimManager(loss_scale=scale, loss_scale_steps=100)
        self.manager.add_optimizer(self.optimizer, self.schedule)

    def backward(self, step: int, factor: float = 1.0) -> None:
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).half()
        self.manager.zero_grad()
        mine = self.plain(self.model(x.chunk(bmt.world_size())[bmt.rank()])).float().square().mean()
        self.manager.backward(mine * (factor if bmt.rank() == bmt.world_size() - 1 else 1.0))

    def step(self, step: int, factor: float = 1.0) -> None:
        self.backward(step, factor)
        self.manager.clip_grad_norm(self.optimizer.param_groups, 1.0)
        self.manager.step()

    def numbers(self) -> list[Any]:
        """What a step counts, as it is now: read without settling."""
        counts = [state["step"] for state in self.optimizer.state.values()]
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        schedule = None if self.schedule is None else self.schedule.state_dict()
        return copy.deepcopy([counts, groups, schedule, self.manager._num_steps])

    def tensors(self) -> list[torch.Tensor]:
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [
            x.detach().clone()
            for x in (*self.model.parameters(), *self.plain.parameters(), *states)
        ]


SCHEDULES: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "ours": lambda optimizer: bmt.lr_scheduler.Linear(optimizer, 0.01, 3, 20),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: 1 / (1 + epoch)
    ),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=30
    ),
    "chain": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[4],
    ),
}
ASK: dict[str, Callable[[Training], object]] = {
    "backward": lambda training: training.backward(0),
    "loss_scale": lambda training: training.manager.loss_scale,
    "scale_loss": lambda training: training.manager.scale_loss(torch.ones(())),
    "step": lambda training: training.manager.clip_grad_norm([], 1.0),
    "state": lambda training: training.manager.state_dict(),
    "optimizer state": lambda training: training.optimizer.state_dict(),
    "0.1.x scale": lambda training: training.optimizer.scale,
    "0.1.x loss": lambda training: training.optimizer.loss_scale(torch.ones(())),
}


def skipped(kind: Kind) -> None:
    as_on_a_gpu()
    # a sequence of schedules of torch 2.8 uses it itself
    warnings.filterwarnings("ignore", message="The epoch parameter")
    for number, (name, schedule) in enumerate(SCHEDULES.items()):
        training = Training(schedule, 1024.0, kind=kind)
        for step in range(3):
            training.step(step)
        assert training.manager.loss_scale == 1024
        for place, (how, ask) in enumerate(ASK.items()):
            what = f"{name}, {how}"
            numbers, tensors = training.numbers(), training.tensors()
            scale = training.manager.loss_scale
            training.step(place, BAD[(number + place) % 3])
            if name != "none":
                assert training.numbers()[1:3] != numbers[1:3], (
                    f"{what}: schedules go on until the verdict is asked for"
                )
            ask(training)
            assert training.numbers() == numbers, what
            assert training.manager.loss_scale == scale / 2, what
            for one, other in zip(training.tensors(), tensors, strict=True):
                assert torch.equal(one, other), what
            training.step(place)
            assert training.numbers() != numbers, f"{what}: a good step counts"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_left_out_is_taken_back_whoever_asks(world_size: int, kind: Kind) -> None:
    """Weights, masters, moments bit by bit; step counts, hyperparameters, schedules of ours and of
    torch, number of steps.
    """
    run_ranks(skipped, world_size, kind)


def same_as_at_once(kind: Kind) -> None:
    results = []
    for late in (False, True):
        if late:
            as_on_a_gpu()
        training = Training(SCHEDULES["ours"], kind=kind)
        scales = []
        for step in range(12):
            training.step(step, BAD[step % 3] if step in (0, 4, 5, 11) else 1.0)
            scales.append(training.manager.loss_scale)
        results.append((scales, training.numbers(), training.tensors()))
    (scales, numbers, tensors), (late_scales, late_numbers, late_tensors) = results
    assert (
        scales == late_scales and scales[-1] == 4 and numbers == late_numbers and numbers[-1] == 8
    )
    for one, other in zip(tensors, late_tensors, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_late_verdicts_change_no_training(world_size: int, kind: Kind) -> None:
    """Bitwise the run in which every verdict is known at once, overflows at the first, in following
    and at the last step.
    """
    run_ranks(same_as_at_once, world_size, kind)


def what_the_program_writes() -> None:
    as_on_a_gpu()
    training = Training(SCHEDULES["ours"])
    training.step(0)
    before = training.schedule.num_iter
    training.step(1, math.inf)
    training.optimizer.param_groups[1]["lr"] = 0.125
    training.optimizer.param_groups[0]["weight_decay"] = 0.25
    training.optimizer.param_groups[0]["name"] = "first"
    assert training.manager.loss_scale == 32
    assert training.schedule.num_iter == before
    first, second = training.optimizer.param_groups
    assert first["lr"] == training.schedule.current_lr and second["lr"] == 0.125
    assert first["weight_decay"] == 0.25 and first["name"] == "first"


def test_what_the_program_has_written_since_stays() -> None:
    """A learning rate set by hand between the step and the verdict is not the schedule's to take
    back.
    """
    run_ranks(what_the_program_writes, 1)


def without_some_gradients(kind: Kind) -> None:
    as_on_a_gpu()
    training = Training(kind=kind)
    training.step(0)
    training.backward(1, math.nan)
    for param in training.plain.parameters():
        param.grad = None
    training.manager.step()
    assert {state["step"] for state in training.optimizer.state.values()} == {1, 2}
    assert training.manager.loss_scale == 32
    assert {state["step"] for state in training.optimizer.state.values()} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_counted_is_taken_back(kind: Kind) -> None:
    """Parameters that had no gradient in that step keep their count."""
    run_ranks(without_some_gradients, 1, kind)


class Counter:
    """A schedule that cannot go back."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def at_once() -> None:
    as_on_a_gpu()
    training = Training(lambda optimizer: Counter())
    training.backward(0)
    training.manager.step()
    training.backward(1, math.inf)
    training.manager.step()
    assert training.schedule.steps == 1 and training.manager._num_steps == 1
    recording = functools.partial(AdamOffloadOptimizer, record_delta=True)
    for other in (recording, torch.optim.SGD):
        training = Training(SCHEDULES["ours"])
        second = nn.Linear(1, 1)
        training.manager.add_optimizer(other(second.parameters(), lr=0.1))
        training.backward(0, math.inf)
        iteration = training.schedule.num_iter
        training.manager.step()
        assert training.schedule.num_iter == iteration and training.manager._num_steps == 0
    training, steps = Training(), []
    training.optimizer.register_step_post_hook(lambda *_: steps.append(True))
    for step, factor in enumerate((1.0, math.inf, 1.0)):
        training.backward(step, factor)
        training.manager.step()
    assert len(steps) == 2


def test_who_cannot_go_back_waits() -> None:
    """Schedules without a state, torch's optimizers, what records changes, hooks: the host decides
    before anything steps.
    """
    run_ranks(at_once, 1)


def said() -> str:
    as_on_a_gpu()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        training = Training()
        training.step(0, math.inf)
        assert not out.getvalue()
        training.backward(1)
        training.manager.step()
        training.manager.state_dict()
    return out.getvalue()


def test_it_is_said_once() -> None:
    """On rank 0, when the host learns of it."""
    outputs = run_ranks(said, 2)
    assert outputs == ["gradient overflow: loss scale 64 -> 32, the step is skipped\n", ""]


def loaded(kind: Kind) -> None:
    as_on_a_gpu()
    training = Training(SCHEDULES["ours"], kind=kind)
    training.step(0)
    saved = copy.deepcopy(training.manager.state_dict())
    numbers = training.numbers()
    training.step(1)
    training.step(2, math.inf)
    training.manager.load_state_dict(saved)
    assert training.numbers() == numbers and training.manager.loss_scale == 64
    training.step(2, math.inf)
    rate = training.optimizer.param_groups[0]["lr"]  # as the schedule has written it
    saved["optimizers"][0]["param_groups"][0]["lr"] = rate
    training.optimizer.load_state_dict(saved["optimizers"][0])
    assert training.manager.loss_scale == 32 and training.optimizer.param_groups[0]["lr"] == rate
    assert {state["step"] for state in training.optimizer.state.values()} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_loading_comes_after_the_verdict(kind: Kind) -> None:
    """What is loaded is not taken back."""
    run_ranks(loaded, 1, kind)


def strided() -> None:
    """Gradients that the program has put there itself, of any strides."""
    weight = nn.Parameter(torch.ones(3, 4))
    sharded = bmt.DistributedParameter(torch.ones(6))
    weight.grad = torch.arange(12.0).view(4, 3).t()
    sharded.grad = torch.arange(12.0)[::2][: sharded.numel()]
    want = torch.linalg.vector_norm(torch.cat([weight.grad.reshape(-1), sharded.grad]))
    before = [weight.grad.clone(), sharded.grad.clone()]
    manager = OptimManager()
    norm = manager.clip_grad_norm([weight, sharded], 1.0)
    models.assert_same(norm, want, "norm")
    for param, grad in zip((weight, sharded), before, strict=True):
        models.assert_same(param.grad, grad / want, "clipped gradient")


def test_strided_gradients_are_clipped() -> None:
    run_ranks(strided, 1)


def measured() -> None:
    param = nn.Parameter(torch.ones(3))
    for values, norm in (([3.0, 4.0, 0.0], 5.0), ([3.0, math.inf, -1.0], math.inf)):
        param.grad = torch.tensor(values)
        assert OptimManager().clip_grad_norm([param], math.inf) == norm
        assert param.grad.tolist() == values


def test_no_bound_only_measures() -> None:
    """Gradients that are not finite are left as they are, too."""
    run_ranks(measured, 1)


def moved() -> None:
    torch.manual_seed(1)
    layers = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
    params = list(layers.parameters())
    manager = OptimManager()
    norms = []
    for make in (lambda: None, lambda: bmt.Block(layers)):
        make()
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        norms.append(float(manager.clip_grad_norm(params, 1e9)))
    assert norms == [pytest.approx(2 * math.sqrt(7 * 5 + 5 + 5 * 3 + 3))] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_may_move_between_steps(world_size: int) -> None:
    """Where they lie is looked at anew: a block takes them over after they were clipped."""
    run_ranks(moved, world_size)
