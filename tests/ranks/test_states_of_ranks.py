"""Saved states that ranks were given differently: refused on all ranks, and nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, RanksPartedError
from bmtrain.optim import AdamOptimizer, OptimManager

State = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 700)  # of so many elements that places of it are compared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        out: torch.Tensor = self.head(x)
        return out


def make() -> tuple[nn.Module, OptimManager]:
    model = bmt.BMTrainModelWrapper(Net())
    model.ordinary = nn.Parameter(torch.ones(3))
    manager = OptimManager(loss_scale=8.0, loss_scale_steps=2)
    first = AdamOptimizer([*model.layers.parameters(), model.ordinary], lr=0.01)
    manager.add_optimizer(first, bmt.lr_scheduler.Linear(first, 0.01, 2, 10))
    manager.add_optimizer(torch.optim.Adafactor(model.head.parameters(), lr=0.01))
    return model, manager


def train(model: nn.Module, manager: OptimManager, steps: int) -> None:
    for step in range(steps):
        manager.zero_grad()
        loss = (
            model(torch.ones(2, 6) * step).square().mean() + model.get_parameter("ordinary").sum()
        )
        manager.backward(loss)
        manager.step()


def add(x: torch.Tensor) -> None:
    x.view(-1)[-1] += 1


def settings(state: State) -> State:
    found: State = state["optimizers"][0]["param_groups"][0]
    return found


CHANGES: dict[str, Callable[[State], object]] = {
    "exp_avg": lambda state: add(state["optimizers"][0]["state"][2]["exp_avg"]),
    "of an ordinary one": lambda state: add(state["optimizers"][0]["state"][4]["exp_avg"]),
    "step": lambda state: state["optimizers"][0]["state"][1].update(step=7),
    "torch's step": lambda state: state["optimizers"][1]["state"][0]["step"].add_(1),
    "rows": lambda state: add(state["optimizers"][1]["state"][0]["row_var"]),
    "lr": lambda state: settings(state).update(lr=0.5),
    "betas": lambda state: settings(state).update(betas=(0.5, 0.5)),
    "schedule": lambda state: state["lr_schedulers"][0].update(num_iter=9),
    "loss scale": lambda state: state["loss_scale_state"].update(value=2.0),
    "good steps": lambda state: state["loss_scale_state"].update(good_steps=0),
    "steps": lambda state: state.update(num_steps=9),
    "missing": lambda state: state["optimizers"][0]["state"].pop(4),
    "of another optimizer": lambda state: state["optimizers"][1]["state"].pop(0),
}


def optimizers() -> None:
    model, manager = make()
    train(model, manager, 3)
    state = manager.state_dict(gather_opt=True)
    weights = models.cloned_state(model)
    train(model, manager, 2)
    straight = models.cloned_state(model)
    model, manager = make()
    before = repr(manager.state_dict(gather_opt=True))
    for name, change in CHANGES.items():
        other = copy.deepcopy(state)
        if bmt.rank() == bmt.world_size() - 1:
            change(other)
        with pytest.raises(CheckpointError, match="differ"):
            manager.load_state_dict(other)
        assert repr(manager.state_dict(gather_opt=True)) == before, name
    model.load_state_dict(weights)
    manager.load_state_dict(state)
    train(model, manager, 2)
    models.assert_same_dicts(models.cloned_state(model), straight, "goes on", 0.0)
    own = copy.deepcopy(manager.state_dict())  # slices, which differ by themselves
    weights = models.cloned_state(model)
    train(model, manager, 2)
    straight = models.cloned_state(model)
    model.load_state_dict(weights)
    manager.load_state_dict(own)
    train(model, manager, 2)
    models.assert_same_dicts(models.cloned_state(model), straight, "from slices", 0.0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_states_of_managers(world_size: int) -> None:
    run_ranks(optimizers, world_size)


def weights() -> None:
    model, _ = make()
    state = models.cloned_state(model)
    for name in ("layers.0.weight", "head.bias", "ordinary"):
        other = {key: value + 1 for key, value in state.items()}
        if bmt.rank() == 1:
            add(other[name])
        with pytest.raises(RanksPartedError, match=name):
            model.load_state_dict(other)
        models.assert_same_dicts(models.cloned_state(model), state, "as it was", 0.0)


def test_states_of_models() -> None:
    run_ranks(weights, 2)
