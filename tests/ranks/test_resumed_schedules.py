"""Checkpoints that were saved with other schedules or optimizers than go on: refused, before
anything is changed.
"""

from __future__ import annotations

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
from bmtrain.errors import CheckpointError
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
                lambda manager=manager: manager.load_state_dict(state),  # type: ignore[misc]
                lambda model=model, manager=manager: restore(place, model, manager),  # type: ignore[misc]
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
