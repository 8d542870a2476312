"""Moments of 8 bits, split master weights and none: the same values on any number of ranks, after
any kind of resume, and refused where they would not be.
"""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ConfigurationError, ParameterError
from bmtrain.nn.parallel_linear import ColumnParallelLinear
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.shard.sharded import Sharded

SMALL: dict[str, dict[str, str]] = {
    "8bit": {"moments": "8bit"},
    "split": {"master_weights": "split"},
    "none": {"master_weights": "none"},
    "8bit and split": {"moments": "8bit", "master_weights": "split"},
    "8bit and none": {"moments": "8bit", "master_weights": "none"},
}
SIZES = ((7,), (5, 64), (33, 31), (), (129,))


class Net(nn.Module):
    """Parameters of all lengths, in two dtypes, one of them not sharded."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for place, size in enumerate(SIZES):
            values = torch.randn(size, generator=generator)
            self.register_parameter(f"half{place}", nn.Parameter(values.bfloat16()))
            self.register_parameter(f"full{place}", nn.Parameter(values.clone()))


def net() -> Net:
    found = bmt.BMTrainModelWrapper(Net())
    found.replicated = nn.Parameter(torch.linspace(-1, 1, 70).bfloat16())
    return found


def grow(model: nn.Module, step: int) -> torch.Tensor:
    """A loss that is linear in the weights: its gradients, small whole numbers, are the same on
    any number of ranks.
    """
    generator = torch.Generator().manual_seed(step)
    total = torch.zeros(())
    for _, param in sorted(model.named_parameters()):
        factors = torch.randint(-8, 9, param.shape, generator=generator) / 8
        total = total + (param.float() * factors).sum()
    return total


def make(model: nn.Module, **options: Any) -> tuple[OptimManager, torch.optim.Optimizer]:
    kind = options.pop("kind", AdamOptimizer)
    params = [param for _, param in sorted(model.named_parameters())]
    groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2]}]
    optimizer = kind(groups, lr=1e-2, betas=(0.8, 0.95), **options)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    return manager, optimizer


def train(model: nn.Module, manager: OptimManager, steps: range) -> None:
    for step in steps:
        manager.zero_grad()
        manager.backward(grow(model, step))
        manager.step()


Found = tuple[dict[str, torch.Tensor], dict[int, dict[str, Any]]]


def found(model: nn.Module, manager: OptimManager) -> Found:
    state = manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
    return models.cloned_state(model), state


def assert_equal(one: Found, other: Found) -> None:
    models.assert_same_dicts(one[0], other[0], "weights", 0.0)
    assert one[1].keys() == other[1].keys()
    for index, state in one[1].items():
        assert state.keys() == other[1][index].keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[1][index][name])), (
                f"{name} of {index}"
            )


def leave(folder: str) -> dict[str, Any]:
    """Four steps, with everything that can be kept after two of them."""
    out: dict[str, Any] = {}
    for name, options in SMALL.items():
        model = net()
        manager, _ = make(model, **options)
        train(model, manager, range(2))
        kept = found(model, manager)
        whole = manager.state_dict(gather_opt=True)
        own = copy.deepcopy(manager.state_dict())
        with bmt.CheckpointManager(pathlib.Path(folder, name)) as checkpoints:
            checkpoints.save(2, model, manager)
        train(model, manager, range(2, 4))
        end = found(model, manager)
        again = net()
        second, _ = make(again, **options)
        again.load_state_dict(kept[0])
        second.load_state_dict(own)
        train(again, second, range(2, 4))
        assert_equal(found(again, second), end)
        out[name] = kept[0], whole, end
    return out


def come_back(folder: str, kept: dict[str, Any]) -> None:
    for name, options in SMALL.items():
        weights, whole, end = kept[name]
        # split masters refuse the other order: see test_master_weights.py
        for weights_first in (True, False) if "split" not in name else (True,):
            model = net()
            manager, _ = make(model, **options)
            train(model, manager, range(9, 10))
            if weights_first:
                model.load_state_dict(weights)
            manager.load_state_dict(whole)
            if not weights_first:
                model.load_state_dict(weights)
            train(model, manager, range(2, 4))
            assert_equal(found(model, manager), end)
        model = net()
        manager, _ = make(model, **options)
        train(model, manager, range(9, 10))
        with bmt.CheckpointManager(pathlib.Path(folder, name)) as checkpoints:
            restored = checkpoints.restore(model, manager)
        assert restored is not None and restored.step == 2
        train(model, manager, range(2, 4))
        assert_equal(found(model, manager), end)


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_at_any_number_of_ranks(world_size: int, tmp_path: pathlib.Path) -> None:
    """Bitwise, from a rank's own state, from gathered states loaded before or after the weights,
    and from a checkpoint of shards; what 1 and 2 ranks leave is the same.
    """
    kept = run_ranks(leave, world_size, str(tmp_path))[0]
    for other in (1, 2, 4):
        run_ranks(come_back, other, str(tmp_path), kept)


def forms() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, options in {"fp32": {}, **SMALL}.items():
        model = net()
        manager, optimizer = make(model, **options)
        train(model, manager, range(12))
        states = optimizer.state_dict()["state"].values()
        out[name] = found(model, manager), sum(len(state) for state in states)
        if "moments" in options and "master_weights" not in options:
            other = net()
            second, _ = make(other, kind=AdamOffloadOptimizer, **options)
            train(other, second, range(12))
            models.assert_same_dicts(models.cloned_state(other), out[name][0][0], "offload", 0.0)
    return out


def test_forms_agree() -> None:
    """Split masters are those of fp32 bit by bit; 8 bits are close; without masters, weights are
    theirs up to the rounding of each step.
    """
    got = run_ranks(forms, 2)[0]
    weights, states = got["fp32"][0]
    for index, state in states.items():
        split = got["split"][0][1][index]
        assert state.keys() == split.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(split[name])), name
        quantised = got["8bit"][0][1][index]
        for name in ("exp_avg", "exp_avg_sq"):
            # twelve roundings by up to a code, 1/64 of the largest value, that mostly cancel out
            models.assert_same(quantised[name], state[name], name, 0.05)
        assert "master" not in got["none"][0][1][index]
    models.assert_same_dicts(got["split"][0][0], weights, "split", 2.0**-8)
    for name, tolerance in (("8bit", 0.02), ("none", 0.04), ("8bit and none", 0.04)):
        models.assert_same_dicts(got[name][0][0], weights, name, tolerance)
    assert not all(torch.equal(value, weights[name]) for name, value in got["none"][0][0].items())


def memory() -> None:
    """Bytes of state, as the documentation says them."""
    for options, expected in (
        ({}, 12.0),
        (SMALL["8bit"], 4 + 2 + 2 / 16),
        (SMALL["split"], 8 + 2),
        (SMALL["none"], 8),
        (SMALL["8bit and split"], 2 + 2 + 2 / 16),
        (SMALL["8bit and none"], 2 + 2 / 16),
    ):
        model = bmt.BMTrainModelWrapper(nn.Linear(64, 64, bias=False).bfloat16())
        optimizer = AdamOptimizer(model.parameters(), **options)  # type: ignore[arg-type]
        (state,) = optimizer.sharded_state_dict()["state"].values()
        size = sum(x.local.nbytes for x in state.values() if isinstance(x, Sharded))
        assert size == expected * 64 * 64 / bmt.world_size()


def test_memory() -> None:
    run_ranks(memory, 2)


def between() -> None:
    """Writes between steps: followed where the form can, else refused, with nothing changed."""
    for name, options in SMALL.items():
        model = net()
        manager, _ = make(model, **options)
        train(model, manager, range(2))
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.full_like(param, 3.0))
        before = models.cloned_state(model)
        if "split" in name:
            with pytest.raises(ParameterError, match="written since the last step"):
                train(model, manager, range(2, 3))
            with pytest.raises(ParameterError, match="master_weights='fp32'"):
                manager.state_dict(gather_opt=True)
            models.assert_same_dicts(models.cloned_state(model), before, name, 0.0)
            continue
        train(model, manager, range(2, 3))
        for key, value in models.cloned_state(model).items():
            assert (value.float() - 3.0).abs().max() < 0.1, f"{name}: {key}"
    model = net()
    manager, _ = make(model, master_weights="split")
    manager.state_dict()
    model.load_state_dict({key: value * 2 for key, value in before.items()})
    train(model, manager, range(1))
    for key, value in models.cloned_state(model).items():
        assert (value.float() - 6.0).abs().max() < 0.1, f"weights before the first step: {key}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_written_between_steps(world_size: int) -> None:
    run_ranks(between, world_size)


def other_forms(folder: str) -> None:
    """A gathered state moves from any form to any; a checkpoint of shards is refused."""
    all_forms = {"fp32": {}, **SMALL}
    for name, options in all_forms.items():
        model = net()
        manager, _ = make(model, **options)
        train(model, manager, range(3))
        weights, state = models.cloned_state(model), manager.state_dict(gather_opt=True)
        with bmt.CheckpointManager(pathlib.Path(folder, name)) as checkpoints:
            checkpoints.save(3, model, manager)
        for other, others in all_forms.items():
            again = net()
            second, _ = make(again, **others)
            again.load_state_dict(weights)
            second.load_state_dict(state)
            now = second.state_dict(gather_opt=True)["optimizers"][0]["state"]
            for index, values in state["optimizers"][0]["state"].items():
                for key in values.keys() & now[index].keys() - {"step"}:
                    tolerance = 0.01 if "8bit" in other and "8bit" not in name else 0.0
                    if key == "master" and name != other:
                        tolerance = 2.0**-22
                    models.assert_same(now[index][key], values[key], f"{name}, {other}", tolerance)
            train(again, second, range(3, 4))
            if not goes_on(options, others):
                with (
                    bmt.CheckpointManager(pathlib.Path(folder, name)) as checkpoints,
                    pytest.raises(CheckpointError, match="other moments or master_weights"),
                ):
                    checkpoints.restore(again, second)


def goes_on(saved: dict[str, str], own: dict[str, str]) -> bool:
    """In the same form; weights without masters are masters that are rounded already."""
    if saved.get("moments") != own.get("moments"):
        return False
    kinds = saved.get("master_weights", "fp32"), own.get("master_weights", "fp32")
    return kinds[0] == kinds[1] or kinds == ("none", "fp32")


def test_states_of_other_forms(tmp_path: pathlib.Path) -> None:
    run_ranks(other_forms, 2, str(tmp_path))


def deep_copied() -> None:
    """Copies of model and optimizer go their own way, from the same state."""
    for options in SMALL.values():
        model = net()
        manager, optimizer = make(model, **options)
        train(model, manager, range(2))
        again, second = copy.deepcopy((model, optimizer))
        other = OptimManager()
        other.add_optimizer(second)
        train(again, other, range(2, 4))
        train(model, manager, range(2, 4))
        assert_equal(found(again, other), found(model, manager))


def test_deep_copies() -> None:
    run_ranks(deep_copied, 2)


def skipped() -> None:
    """A step whose gradients are not finite changes nothing, not even what is drawn next."""
    for options in SMALL.values():
        kept = []
        for is_disturbed in (False, True):
            model = net()
            manager, _ = make(model, **options)
            train(model, manager, range(2))
            if is_disturbed:
                manager.zero_grad()
                manager.backward(grow(model, 2) * float("inf"))
                manager.step()
                assert manager.skipped_steps == 1
            train(model, manager, range(2, 4))
            kept.append(found(model, manager))
        assert_equal(*kept)


def test_skipped_steps() -> None:
    run_ranks(skipped, 2)


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(16, 24, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def columns(options: dict[str, str]) -> tuple[nn.Module, OptimManager]:
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(Columns())
    bmt.init_parameters(model)
    optimizer = AdamOptimizer(model.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    return model, manager


def columns_step(model: nn.Module, manager: OptimManager) -> None:
    manager.zero_grad()
    manager.backward(model(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().sum())
    manager.step()


def save_parts(folder: str) -> tuple[dict[str, torch.Tensor], Any]:
    model, manager = columns(SMALL["8bit and split"])
    columns_step(model, manager)
    with bmt.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, model, manager)
    state = found(model, manager)
    columns_step(model, manager)
    return state[0], (state[1], found(model, manager))


def load_parts(folder: str, is_same: bool, weights: Any, kept: Any) -> None:
    model, manager = columns(SMALL["8bit and split"])
    with bmt.CheckpointManager(folder) as checkpoints:
        if not is_same:
            with pytest.raises(CheckpointError, match="exp_avg_scales"):
                checkpoints.restore(model, manager)
            return
        assert checkpoints.restore(model, manager) is not None
    assert_equal(found(model, manager), (weights, kept[0]))
    columns_step(model, manager)
    assert_equal(found(model, manager), kept[1])


def test_tensor_parallel_blocks(tmp_path: pathlib.Path) -> None:
    """Blocks are those of a rank's part: they come back at the same number of parts, on any number
    of ranks, and are refused at another.
    """
    left = run_ranks(save_parts, 2, str(tmp_path), init={"tp_size": 2})[0]
    for ranks, tp_size in ((2, 2), (4, 2), (2, 1), (1, 1)):
        is_same = tp_size == 2
        if ranks == 4:  # sums over more ranks are others: only the restore is compared
            continue
        run_ranks(load_parts, ranks, str(tmp_path), is_same, *left, init={"tp_size": tp_size})


def refused() -> None:
    """Each before anything is made."""
    params = [nn.Parameter(torch.ones(3))]
    for options, expected in (
        ({"moments": "4bit"}, "one of fp32, 8bit"),
        ({"moments": 8}, "one of fp32, 8bit"),
        ({"master_weights": None}, "one of fp32, split, none"),
        ({"master_weight": "split"}, "master_weights"),
    ):
        with pytest.raises((ConfigurationError, TypeError), match=expected):
            AdamOptimizer(params, **options)
    for dtype, options in (
        (torch.float64, SMALL["8bit"]),
        (torch.float16, SMALL["split"]),
        (torch.float16, SMALL["none"]),
    ):
        with pytest.raises(ConfigurationError, match=str(dtype)):
            AdamOptimizer([nn.Parameter(torch.ones(3, dtype=dtype))], **options)  # type: ignore[arg-type]
    optimizer = AdamOptimizer(params, master_weights="none")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3).half())]})
    with pytest.raises(ConfigurationError, match="float16"):
        optimizer.step()


def test_what_is_refused() -> None:
    run_ranks(refused, 1)
