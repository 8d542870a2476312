"""Gradients that a program keeps over a step: under a loss scale that changes they add up as
without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, tuple[Make, Make]] = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.01), lambda ps: torch.optim.SGD(ps, lr=0.01)),
    "torch's": (
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.0),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.0),
    ),
    "ours": (
        lambda ps: AdamOptimizer(ps, lr=0.01),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.0),
    ),
    "offload": (
        lambda ps: AdamOffloadOptimizer(ps, lr=0.01),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.0),
    ),
}
STEPS = 7


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    out: torch.Tensor = model(x).square().mean() * (step + 1)
    return out


def in_one_process(make: Make, clipped: bool) -> dict[str, torch.Tensor]:
    """The first layer's gradients are cleared every second step, the others' every third."""
    model = net()
    first, others = make(model[0].parameters()), make(model[1:].parameters())
    for step in range(STEPS):
        if step % 2 == 0:
            first.zero_grad()
        if step % 3 == 0:
            others.zero_grad()
        loss_of(model, step).backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        first.step()
        others.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def on_ranks(make: Make, clipped: bool, **options: Any) -> dict[str, torch.Tensor]:
    model = nn.Sequential(*[bmt.Block(layer) for layer in net()])
    first, others = make(model[0].parameters()), make(model[1:].parameters())
    manager = OptimManager(loss_scale=2.0**10, **options)
    manager.add_optimizer(first)
    manager.add_optimizer(others)
    for step in range(STEPS):
        if step % 2 == 0:
            first.zero_grad()
        if step % 3 == 0:
            others.zero_grad()
        if step % 2:
            manager.backward(loss_of(model, step) / 2, reduce_gradients=False)
            manager.backward(loss_of(model, step) / 2)
        else:
            manager.backward(loss_of(model, step))
        if clipped:
            manager.clip_grad_norm([*first.param_groups, *others.param_groups], 0.5)
        manager.step()
    assert manager.skipped_steps == 0
    return models.cloned_state(model)


def kept() -> None:
    for name, (make, plain) in KINDS.items():
        for clipped in (False, True):
            want = in_one_process(plain, clipped)
            for steps in (1, 1000):
                got = on_ranks(make, clipped, loss_scale_steps=steps)
                models.assert_same_dicts(got, want, f"{name}, {clipped}, {steps}", 1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scale_that_grows(world_size: int) -> None:
    run_ranks(kept, world_size)


def overflow() -> None:
    """The scale shrinks in a skipped step, over which other gradients are kept."""
    for make, plain in KINDS.values():
        model = net()
        first, others = plain(model[0].parameters()), plain(model[1:].parameters())
        loss_of(model, 1).backward()
        first.zero_grad()
        loss_of(model, 2).backward()
        first.step()
        others.step()
        want = {name: value.clone() for name, value in model.state_dict().items()}

        model = nn.Sequential(*[bmt.Block(layer) for layer in net()])
        first, others = make(model[0].parameters()), make(model[1:].parameters())
        manager = OptimManager(loss_scale=2.0**10)
        manager.add_optimizer(first)
        manager.add_optimizer(others)
        manager.backward(loss_of(model, 1))
        for param in model[0].parameters():
            param.grad = torch.full_like(param, torch.inf)
        manager.step()
        assert manager.skipped_steps == 1 and manager.loss_scale == 2.0**9
        first.zero_grad()
        manager.scale_loss(loss_of(model, 2)).backward()
        manager.step()
        models.assert_same_dicts(models.cloned_state(model), want, "after an overflow", 1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scale_that_shrinks(world_size: int) -> None:
    run_ranks(overflow, world_size)


def by_old_calls() -> None:
    plain = net()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(STEPS):
        loss_of(plain, step).backward()
        adam.step()
    want = {name: value.clone() for name, value in plain.state_dict().items()}
    model = nn.Sequential(*[bmt.Block(layer) for layer in net()])
    optimizer = AdamOptimizer(model.parameters(), lr=0.01, scale=2.0**10, scale_steps=2)
    for step in range(STEPS):
        optimizer.loss_scale(loss_of(model, step)).backward()
        bmt.optim_step(optimizer)
    models.assert_same_dicts(models.cloned_state(model), want, "old calls", 1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_of_older_programs(world_size: int) -> None:
    run_ranks(by_old_calls, world_size)
