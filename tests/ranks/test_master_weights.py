"""Master weights and weights that the program has written, at any time: the weights count, or the
next step is refused on all ranks.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ParameterError
from bmtrain.optim import AdamOptimizer, OptimManager

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "8bit": {"moments": "8bit"},
    "none": {"master_weights": "none"},
    "split": {"master_weights": "split"},
}
RATE = 2.0**-10  # a step moves a weight by no more: less than half a last place of 3 in bf16


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(*[bmt.Block(layer.bfloat16()) for layer in layers])


def make(model: nn.Module, **options: Any) -> tuple[OptimManager, AdamOptimizer]:
    optimizer = AdamOptimizer(model.parameters(), lr=RATE, **options)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    return manager, optimizer


def train(model: nn.Module, manager: OptimManager, steps: int) -> None:
    for step in range(steps):
        manager.zero_grad()
        manager.backward(model(torch.ones(3, 8).bfloat16() * (step + 1)).float().square().mean())
        manager.step()


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def goes_on_from(model: nn.Module, value: float) -> bool:
    """Whether the weights are this value up to one step."""
    state = models.cloned_state(model)
    return all(bool(((x.float() - value).abs() <= 2**-6).all()) for x in state.values())


Way = Callable[[nn.Module, OptimManager, AdamOptimizer, dict[str, str], pathlib.Path], None]


def straight_on(
    model: nn.Module,
    manager: OptimManager,
    optimizer: AdamOptimizer,
    options: dict[str, str],
    folder: pathlib.Path,
) -> None:
    train(model, manager, 1)
    assert goes_on_from(model, 3)


def copied(
    model: nn.Module,
    manager: OptimManager,
    optimizer: AdamOptimizer,
    options: dict[str, str],
    folder: pathlib.Path,
) -> None:
    again, second = copy.deepcopy((model, optimizer))
    other = OptimManager()
    other.add_optimizer(second)
    train(again, other, 1)
    assert goes_on_from(again, 3)


def saved_and_loaded(
    model: nn.Module,
    manager: OptimManager,
    optimizer: AdamOptimizer,
    options: dict[str, str],
    folder: pathlib.Path,
) -> None:
    for gather in (False, True):
        state = manager.state_dict(gather_opt=gather)
        again = net()
        second, _ = make(again, **options)
        again.load_state_dict(models.cloned_state(model))
        second.load_state_dict(state)
        train(again, second, 1)
        assert goes_on_from(again, 3)


def checkpointed(
    model: nn.Module,
    manager: OptimManager,
    optimizer: AdamOptimizer,
    options: dict[str, str],
    folder: pathlib.Path,
) -> None:
    again = net()
    second, _ = make(again, **options)
    train(again, second, 1)
    with bmt.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, model, manager)
        assert checkpoints.restore(again, second) is not None
    train(again, second, 1)
    assert goes_on_from(again, 3)


WAYS: list[Way] = [straight_on, copied, saved_and_loaded, checkpointed]


def all_ways(folder: str) -> None:
    for name, options in FORMS.items():
        for way in WAYS:
            model = net()
            manager, optimizer = make(model, **options)
            train(model, manager, 2)
            fill(model, 3.0)
            place = pathlib.Path(folder, name, way.__name__)
            if name != "split":
                way(model, manager, optimizer, options, place)
                continue
            refusal = (ParameterError, CheckpointError)
            with pytest.raises(refusal, match="written since the last step"):
                way(model, manager, optimizer, options, place)
            assert goes_on_from(model, 3), "nothing is changed"


@pytest.mark.parametrize("world_size", [1, 2])
def test_written_weights_count(world_size: int, tmp_path: pathlib.Path) -> None:
    """Whether the run goes straight on, or by way of a copy or a file."""
    run_ranks(all_ways, world_size, str(tmp_path))


def loads() -> None:
    """A state that was loaded, and weights that come before it, after it, or of elsewhere."""
    model = net()
    manager, _ = make(model)
    train(model, manager, 3)
    weights, state = models.cloned_state(model), manager.state_dict(gather_opt=True)
    train(model, manager, 1)
    straight = models.cloned_state(model)
    for name, options in FORMS.items():
        if name in ("8bit", "none"):  # other numbers from here on
            continue
        again = net()
        second, _ = make(again, **options)
        again.load_state_dict(weights)
        second.load_state_dict(state)
        train(again, second, 1)
        models.assert_same_dicts(models.cloned_state(again), straight, f"in order, {name}", 0.0)

        again = net()
        second, _ = make(again, **options)
        before = models.cloned_state(again)
        if name == "split":
            with pytest.raises(CheckpointError, match="load the weights first"):
                second.load_state_dict(state)
            models.assert_same_dicts(models.cloned_state(again), before, "as it was", 0.0)
            again.load_state_dict(weights)
            second.load_state_dict(state)
            fill(again, 3.0)
            with pytest.raises(ParameterError, match="load the weights first"):
                train(again, second, 1)
            assert goes_on_from(again, 3)
            continue
        second.load_state_dict(state)
        again.load_state_dict(weights)
        train(again, second, 1)
        models.assert_same_dicts(models.cloned_state(again), straight, "weights last", 0.0)

        again = net()
        second, _ = make(again, **options)
        fill(again, 3.0)
        second.load_state_dict(state)
        train(again, second, 1)
        assert goes_on_from(again, 3), "weights of elsewhere stay"


@pytest.mark.parametrize("world_size", [1, 2])
def test_loads_in_any_order(world_size: int) -> None:
    run_ranks(loads, world_size)


def of_one_block() -> None:
    """The library's and torch's optimizers for parts of a block: only its own weights matter to
    each. Where one has them all, a write to a slice by hand is seen too.
    """
    kept = {}
    for name in ("fp32", "split"):
        model = net()
        params = list(model.parameters())
        manager = OptimManager()
        manager.add_optimizer(AdamOptimizer(params[::3], lr=RATE, **FORMS[name]))
        manager.add_optimizer(AdamOptimizer(params[1::3], lr=RATE, **FORMS[name]))
        manager.add_optimizer(torch.optim.SGD(params[2::3], lr=RATE))
        train(model, manager, 3)
        kept[name] = models.cloned_state(model)
    models.assert_same_dicts(kept["split"], kept["fp32"], "of one block", 2.0**-7)
    with torch.no_grad():
        params[2].add_(1)  # another optimizer's
    train(model, manager, 1)
    model = net()
    manager, _ = make(model, **FORMS["split"])
    train(model, manager, 1)
    written = next(model.parameters())
    assert isinstance(written, bmt.DistributedParameter)
    written.local.add_(1)
    with pytest.raises(ParameterError, match="written since the last step"):
        train(model, manager, 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_of_one_block(world_size: int) -> None:
    run_ranks(of_one_block, world_size)


def states_stay() -> None:
    """A step updates the state where it is: it makes no new one."""
    for name, options in FORMS.items():
        model = net()
        manager, optimizer = make(model, **options)
        train(model, manager, 1)
        before = {
            (param, key): value
            for param, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        train(model, manager, 2)
        manager.state_dict()
        for (param, key), value in before.items():
            assert optimizer.state[param][key] is value, f"{key} of {name}"


def test_states_stay_where_they_are() -> None:
    run_ranks(states_stay, 2)
