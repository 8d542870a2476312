"""Managers that go on from a checkpoint or a copy; schedules and optimizers other than the saved
ones are refused, before anything is changed.
"""

from __future__ import annotations

import copy
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn
from torch.optim import lr_scheduler

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ConfigurationError
from bmtrain.optim import AdamOptimizer, OptimManager

Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule | None] = {
    "none": None,
    "linear": lambda optimizer: bmt.lr_scheduler.Linear(optimizer, 0.01, 2, 10),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
}


def make(schedule: Schedule | None) -> tuple[nn.Module, OptimManager]:
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    optimizer = AdamOptimizer(model.parameters(), lr=0.01)
    manager = OptimManager()
    manager.add_optimizer(optimizer, None if schedule is None else schedule(optimizer))
    return model, manager


def train(model: nn.Module, manager: OptimManager, steps: int) -> None:
    for step in range(steps):
        manager.zero_grad()
        manager.backward(model(torch.ones(2, 4) * (step + 1)).square().mean())
        manager.step()


def both_ways(folder: str) -> None:
    for name, schedule in SCHEDULES.items():
        model, manager = make(schedule)
        train(model, manager, 3)
        state = manager.state_dict(gather_opt=True)
        place = pathlib.Path(folder, name)
        with bmt.CheckpointManager(place) as checkpoints:
            checkpoints.save(3, model, manager)
        weights = models.cloned_state(model)
        train(model, manager, 2)
        straight = models.cloned_state(model)
        for other, others in SCHEDULES.items():
            model, manager = make(others)
            before = repr((models.cloned_state(model), manager.state_dict(gather_opt=True)))
            ways: list[Callable[[], object]] = [
                functools.partial(manager.load_state_dict, state),
                functools.partial(restore, place, model, manager),
            ]
            for way in ways:
                if other != name:
                    with pytest.raises(CheckpointError, match="schedule for optimizer 0"):
                        way()
                    now = models.cloned_state(model), manager.state_dict(gather_opt=True)
                    assert repr(now) == before, f"{name}, {other}"
                    continue
                model.load_state_dict(weights)
                way()
                train(model, manager, 2)
                models.assert_same_dicts(models.cloned_state(model), straight, name, 0.0)


def restore(place: pathlib.Path, model: nn.Module, manager: OptimManager) -> None:
    with bmt.CheckpointManager(place) as checkpoints:
        checkpoints.restore(model, manager)


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_schedules(world_size: int, tmp_path: pathlib.Path) -> None:
    run_ranks(both_ways, world_size, str(tmp_path))


def cured() -> None:
    """As the errors say: another schedule from its start, or none."""
    for one, other in (("none", "linear"), ("linear", "none"), ("steps", "linear")):
        model, manager = make(SCHEDULES[one])
        train(model, manager, 3)
        state = manager.state_dict(gather_opt=True)
        model, manager = make(SCHEDULES[one])
        manager.load_state_dict(state)
        schedule = SCHEDULES[other]
        manager.lr_schedulers[0] = schedule and schedule(manager.optimizers[0])
        rate = manager.optimizers[0].param_groups[0]["lr"]
        train(model, manager, 1)
        assert (manager.optimizers[0].param_groups[0]["lr"] == rate) is (other == "none")


def test_the_remedy() -> None:
    run_ranks(cured, 2)


def other_optimizers() -> None:
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        lambda params: torch.optim.NAdam(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
        lambda params: torch.optim.Adagrad(params, lr=0.01),
    ]
    for kind in kinds:
        model, _ = make(None)
        manager = OptimManager()
        manager.add_optimizer(kind(model.parameters()))
        train(model, manager, 2)
        for gather in (False, True):
            state = manager.state_dict(gather_opt=gather)
            _, other = make(None)
            before = repr(other.state_dict(gather_opt=True))
            with pytest.raises(CheckpointError, match="state of another optimizer"):
                other.load_state_dict(state)
            assert repr(other.state_dict(gather_opt=True)) == before
    model, _ = make(None)
    manager = OptimManager()
    manager.add_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0))
    train(model, manager, 2)
    weights, state = models.cloned_state(model), manager.state_dict(gather_opt=True)
    train(model, manager, 1)
    again, other = make(None)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    train(again, other, 1)
    models.assert_same_dicts(
        models.cloned_state(again), models.cloned_state(model), "torch's AdamW goes on", 1e-6
    )


def test_states_of_other_optimizers() -> None:
    run_ranks(other_optimizers, 2)


def other_order(folder: str) -> None:
    """Parameters of one shape that the optimizer got in another order than when it was saved."""

    def of(turned: bool) -> tuple[nn.Module, OptimManager]:
        model, _ = make(None)
        params = list(model.parameters())
        manager = OptimManager()
        manager.add_optimizer(AdamOptimizer(params[2:] + params[:2] if turned else params, lr=0.01))
        return model, manager

    model, manager = of(turned=False)
    train(model, manager, 2)
    with bmt.CheckpointManager(folder) as checkpoints:
        checkpoints.save(2, model, manager)
        other, second = of(turned=True)
        before = repr((models.cloned_state(other), second.state_dict(gather_opt=True)))
        with pytest.raises(CheckpointError, match=r"another order: number 0 was '0\.weight'"):
            checkpoints.restore(other, second)
        now = models.cloned_state(other), second.state_dict(gather_opt=True)
        assert repr(now) == before
        other, second = of(turned=False)
        assert checkpoints.restore(other, second) is not None
    train(model, manager, 1)
    train(other, second, 1)
    models.assert_same_dicts(models.cloned_state(other), models.cloned_state(model), "on", 0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_order_of_parameters(world_size: int, tmp_path: pathlib.Path) -> None:
    run_ranks(other_order, world_size, str(tmp_path))


def with_a_metric() -> None:
    model, _ = make(None)
    optimizer = AdamOptimizer(model.parameters(), lr=0.01)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    manager = OptimManager()
    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau.*'metrics'"):
        manager.add_optimizer(optimizer, plateau)
    assert manager.optimizers == [] and manager.lr_schedulers == []
    manager.add_optimizer(optimizer)
    for metric in (1.0, 2.0, 3.0):
        train(model, manager, 1)
        plateau.step(metric)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**2)


def test_schedules_that_need_a_metric() -> None:
    run_ranks(with_a_metric, 2)


def copied() -> None:
    """A copy of model and manager goes its own way, from the same state."""
    for schedule in SCHEDULES.values():
        torch.manual_seed(0)
        model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        optimizer = AdamOptimizer(model.parameters(), lr=0.01)
        manager = OptimManager(loss_scale=2.0**6, loss_scale_steps=2)
        manager.add_optimizer(optimizer, None if schedule is None else schedule(optimizer))
        train(model, manager, 3)
        again, second = copy.deepcopy((model, manager))
        for one, other in ((model, manager), (again, second)):
            train(one, other, 2)
            other.backward(one(torch.ones(2, 4)).square().mean())  # gradients are kept
            other.step()
        models.assert_same_dicts(
            models.cloned_state(again), models.cloned_state(model), "the copy", 0.0
        )
        assert second.loss_scale == manager.loss_scale == 2.0**9
        assert second.optimizers[0] is not optimizer


def test_copies_of_managers() -> None:
    run_ranks(copied, 2)
