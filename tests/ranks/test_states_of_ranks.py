"""Saved states that ranks were given differently: refused on all ranks, and nothing is changed."""

import copy
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, RanksDivergedError
from bmtrain.optim import AdamOptimizer, OptimManager

State = dict[str, Any]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 700)  # of so many elements that places of it are compared

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Run:
    def __init__(self):
        self.model: Any = bmt.BMTrainModelWrapper(Net())
        self.model.ordinary = nn.Parameter(torch.ones(3))
        self.manager = OptimManager(loss_scale=8.0, loss_scale_steps=2)
        first = AdamOptimizer([*self.model.layers.parameters(), self.model.ordinary], lr=0.01)
        self.manager.add_optimizer(first, bmt.lr_scheduler.Linear(first, 0.01, 2, 10))
        self.manager.add_optimizer(torch.optim.Adafactor(self.model.head.parameters(), lr=0.01))

    def train(self, steps):
        for step in range(steps):
            self.manager.zero_grad()
            loss = self.model(torch.ones(2, 6) * step).square().mean() + self.model.ordinary.sum()
            self.manager.backward(loss)
            self.manager.step()
        return models.cloned_state(self.model)

    def load(self, weights, state):
        self.model.load_state_dict(weights)
        self.manager.load_state_dict(state)


def add(x):
    x.view(-1)[-1] += 1


def first(state):
    return state["optimizers"][0]["state"]


def second(state):
    return state["optimizers"][1]["state"]


def settings(state):
    return state["optimizers"][0]["param_groups"][0]


CHANGES = {
    "exp_avg": lambda state: add(first(state)[2]["exp_avg"]),
    "of an ordinary one": lambda state: add(first(state)[4]["exp_avg"]),
    "step": lambda state: first(state)[1].update(step=7),
    "torch's step": lambda state: second(state)[0]["step"].add_(1),
    "rows": lambda state: add(second(state)[0]["row_var"]),
    "lr": lambda state: settings(state).update(lr=0.5),
    "betas": lambda state: settings(state).update(betas=(0.5, 0.5)),
    "schedule": lambda state: state["lr_schedulers"][0].update(num_iter=9),
    "loss scale": lambda state: state["loss_scale_state"].update(value=2.0),
    "good steps": lambda state: state["loss_scale_state"].update(good_steps=0),
    "steps": lambda state: state.update(num_steps=9),
    "missing": lambda state: first(state).pop(4),
    "of another optimizer": lambda state: second(state).pop(0),
}


@on_ranks(3)
def test_states_that_differ_between_ranks():
    run = Run()
    weights, state = run.train(3), run.manager.state_dict(gather_opt=True)
    straight = run.train(2)
    run = Run()
    before = repr(run.manager.state_dict(gather_opt=True))
    for name, change in CHANGES.items():
        other = copy.deepcopy(state)
        if bmt.rank() == bmt.world_size() - 1:
            change(other)
        with pytest.raises(CheckpointError, match="differ"):
            run.manager.load_state_dict(other)
        assert repr(run.manager.state_dict(gather_opt=True)) == before, name
    values = models.cloned_state(run.model)
    for name in ("layers.0.weight", "head.bias", "ordinary"):
        other = {key: value + 1 for key, value in values.items()}
        if bmt.rank() == 1:
            add(other[name])
        with pytest.raises(RanksDivergedError, match=name):
            run.model.load_state_dict(other)
        models.assert_same_dicts(models.cloned_state(run.model), values, "as it was", 0.0)
    run.load(weights, state)
    models.assert_same_dicts(run.train(2), straight, "goes on", 0.0)
    own = copy.deepcopy(run.manager.state_dict())  # slices, which differ by themselves
    weights, straight = models.cloned_state(run.model), run.train(2)
    run.load(weights, own)
    models.assert_same_dicts(run.train(2), straight, "from slices", 0.0)
