"""Moments of 8 bits, split master weights and none: the same values on any number of ranks, after
any kind of resume, and with weights that the program writes; refused where they would not be.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ConfigurationError, ParameterError
from bmtrain.nn.parallel_linear import ColumnParallelLinear
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.shard.sharded import Sharded

SMALL = {
    "8bit": {"moments": "8bit"},
    "split": {"master_weights": "split"},
    "none": {"master_weights": "none"},
    "8bit and split": {"moments": "8bit", "master_weights": "split"},
    "8bit and none": {"moments": "8bit", "master_weights": "none"},
}
FORMS = {"fp32": {}, **SMALL}
SIZES = ((7,), (5, 64), (33, 31), (), (129,))
long = pytest.mark.long
REFUSALS = (ParameterError, CheckpointError)


class Net(nn.Module):
    """Parameters of all lengths, in two dtypes."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for place, size in enumerate(SIZES):
            values = torch.randn(size, generator=generator)
            self.register_parameter(f"half{place}", nn.Parameter(values.bfloat16()))
            self.register_parameter(f"full{place}", nn.Parameter(values.clone()))


class Run:
    """A model, one of its parameters not sharded, and its optimizer."""

    def __init__(self, options, kind=AdamOptimizer, copied=None):
        self.options, self.kind = options, kind
        if copied is None:
            model = bmt.BMTrainModelWrapper(Net())
            model.replicated = nn.Parameter(torch.linspace(-1, 1, 70).bfloat16())
            params = [param for _, param in sorted(model.named_parameters())]
            groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2]}]
            copied = model, kind(groups, lr=1e-2, betas=(0.8, 0.95), **options)
        self.model, self.optimizer = copied
        self.manager = OptimManager()
        self.manager.add_optimizer(self.optimizer)

    def train(self, *steps, factor=1.0):
        """The loss is linear in the weights: its gradients, small whole numbers, are the same on
        any number of ranks.
        """
        for step in steps:
            generator, total = torch.Generator().manual_seed(step), torch.zeros(())
            for _, param in sorted(self.model.named_parameters()):
                factors = torch.randint(-8, 9, param.shape, generator=generator) / 8
                total = total + (param.float() * factors).sum()
            self.manager.zero_grad()
            self.manager.backward(total * (factor * bmt.world_size() if bmt.rank() == 0 else 0))
            self.manager.step()
        return self

    def copy(self):
        return Run(self.options, self.kind, copy.deepcopy((self.model, self.optimizer)))

    def resume(self, weights, state, weights_first=True):
        """A new run from a saved state, in place of this one."""
        new = Run(self.options, self.kind).train(9)
        if weights_first:
            new.model.load_state_dict(weights)
        new.manager.load_state_dict(state)
        if not weights_first:
            new.model.load_state_dict(weights)
        return new

    @property
    def weights(self):
        return models.cloned_state(self.model)

    @property
    def found(self):
        state = self.manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
        return self.weights, state

    def fill(self, value):
        with torch.no_grad():
            for param in self.model.parameters():
                param.fill_(value)
        return self

    def check_near(self, value):
        for name, x in self.weights.items():
            assert (x.float() - value).abs().max() < 0.1, f"{self.options}: {name}"

    def checkpoint(self, folder):
        with bmt.CheckpointManager(folder) as checkpoints:
            checkpoints.save(2, self.model, self.manager)
        return self

    def restore(self, folder):
        with bmt.CheckpointManager(folder) as checkpoints:
            restored = checkpoints.restore(self.model, self.manager)
        assert restored is not None and restored.step == 2
        return self


def kind_of(name):
    return AdamOffloadOptimizer if "8bit" in name else AdamOptimizer


def leave(folder, names):
    """Four steps, with everything that can be kept after two of them."""
    out = {}
    for name in names:
        run = Run(SMALL[name], kind_of(name)).train(0, 1)
        weights, whole = run.weights, run.manager.state_dict(gather_opt=True)
        own = copy.deepcopy(run.manager.state_dict())
        skipping = run.copy().train(2, factor=float("inf"))
        assert skipping.manager.skipped_steps == 1
        others = [run.copy(), skipping, run.resume(weights, own)]
        end = run.checkpoint(folder / name).train(2, 3).found
        for other in others:
            models.assert_equal(other.train(2, 3).found, end)
        out[name] = weights, whole, end
    return out


def come_back(folder, kept):
    for name, (weights, whole, end) in kept.items():
        options = SMALL[name]
        run = Run(options, kind_of(name))
        for other in (
            run.resume(weights, whole),
            Run(options, kind_of(name)).train(9).restore(folder / name),
            # split masters refuse the other order
            *([] if "split" in name else [run.resume(weights, whole, weights_first=False)]),
        ):
            models.assert_equal(other.train(2, 3).found, end)


@pytest.mark.parametrize(
    "names",
    [["8bit and split", "none"], pytest.param(["8bit", "split", "8bit and none"], marks=long)],
    ids=str,
)
def test_resumed_at_any_number_of_ranks(names, tmp_path):
    """Bit by bit, from a rank's own state, a copy, gathered states loaded before or after the
    weights, and a checkpoint of shards; a step that is skipped leaves nothing.
    """
    kept = run_ranks(leave, 3, tmp_path, names)[0]
    run_ranks(come_back, 2, tmp_path, kept)


@on_ranks(2)
def test_forms_agree():
    """Split masters are those of fp32 bit by bit; 8 bits are close; without masters, weights are
    theirs up to the rounding of each step. Bytes of state are as documented.
    """
    got = {name: Run(options).train(*range(6)).found for name, options in FORMS.items()}
    weights, states = got["fp32"]
    models.assert_equal(got["split"][1], states, "split")
    for index, state in states.items():
        quantised = got["8bit"][1][index]
        for name in ("exp_avg", "exp_avg_sq"):
            # six roundings by up to a code, 1/64 of the largest value, that mostly cancel out
            models.assert_same(quantised[name], state[name], name, 0.05)
        assert "master" not in got["none"][1][index]
    for name, tolerance in (("split", 2.0**-8), ("8bit", 0.02), ("none", 0.04)):
        models.assert_same_dicts(got[name][0], weights, name, tolerance)
    models.assert_same_dicts(got["8bit and none"][0], weights, "8bit and none", 0.04)
    assert not all(torch.equal(value, weights[name]) for name, value in got["none"][0].items())
    offload = Run(SMALL["8bit"], AdamOffloadOptimizer).train(*range(6))
    models.assert_same_dicts(offload.weights, got["8bit"][0], "offload", 0.0)
    for options, expected in zip(FORMS.values(), (12, 6.125, 10, 8, 4.125, 2.125), strict=True):
        model = bmt.BMTrainModelWrapper(nn.Linear(64, 64, bias=False).bfloat16())
        optimizer = AdamOptimizer(model.parameters(), **options)  # type: ignore[arg-type]
        (found,) = optimizer.sharded_state_dict()["state"].values()
        size = sum(x.local.nbytes for x in found.values() if isinstance(x, Sharded))
        assert size == expected * 64 * 64 / bmt.world_size()


def saved_and_loaded(run, folder, *, gather):
    return run.resume(run.weights, run.manager.state_dict(gather_opt=gather))


def checkpointed(run, folder):
    run.checkpoint(folder)
    return Run(run.options).train(9).restore(folder)


WAYS: Any = (
    lambda run, _: run,
    lambda run, _: run.copy(),
    functools.partial(saved_and_loaded, gather=False),
    functools.partial(saved_and_loaded, gather=True),
    checkpointed,
)


def written(folder):
    for name, options in list(FORMS.items())[:4]:
        for number, way in enumerate(WAYS if name in ("fp32", "split") else WAYS[::3]):
            run, place = Run(options).train(0, 1), folder / f"{name} {number}"
            weights, state = run.weights, run.manager.state_dict(gather_opt=True)
            end = run.copy().train(2).found
            run.fill(3.0)
            if "split" not in name:
                way(run, place).train(2).check_near(3.0)
                continue
            with pytest.raises(REFUSALS, match="written since the last step"):
                way(run, place).train(2)
            for value in run.weights.values():
                assert (value == 3).all(), "changed by a refused step"
            run.model.load_state_dict(weights)
            run.manager.load_state_dict(state)
            models.assert_equal(run.train(2).found, end)
    run = Run(SMALL["split"])
    run.manager.state_dict()
    run.fill(6.0).train(0).check_near(6.0)  # before the first step


def test_weights_that_the_program_writes_count(tmp_path):
    """Whether the run goes straight on, or by way of a copy or a file; remainders of other weights
    are refused, and as the error says the run goes on.
    """
    run_ranks(written, 2, tmp_path)


@on_ranks(2)
def test_loads_in_any_order():
    """A state that was loaded, and weights that come before it, after it, or of elsewhere."""
    run = Run({}).train(0, 1, 2)
    weights, state = run.weights, run.manager.state_dict(gather_opt=True)
    end = run.train(3).weights
    for options in ({}, SMALL["split"]):
        models.assert_same_dicts(
            Run(options).resume(weights, state).train(3).weights, end, "in order", 0.0
        )
    models.assert_same_dicts(
        Run({}).resume(weights, state, weights_first=False).train(3).weights, end, "last", 0.0
    )
    run = Run({}).fill(3.0)
    run.manager.load_state_dict(state)
    run.train(3).check_near(3.0)
    run = Run(SMALL["split"])
    before = run.weights
    with pytest.raises(CheckpointError, match="load the weights first"):
        run.manager.load_state_dict(state)
    models.assert_same_dicts(run.weights, before, "as it was", 0.0)
    run.model.load_state_dict(weights)
    run.manager.load_state_dict(state)
    models.assert_same_dicts(run.copy().train(3).weights, end, "as the error says", 0.0)
    with pytest.raises(ParameterError, match="load the weights first"):
        run.fill(3.0).train(3)
    # other optimizers of the same storages: to each only its own weights matter
    kept = []
    for options in ({}, SMALL["split"]):
        run = Run(options)
        params = list(run.model.parameters())
        run.manager = OptimManager()
        run.manager.add_optimizer(AdamOptimizer(params[::3], **options))  # type: ignore[arg-type]
        run.manager.add_optimizer(AdamOptimizer(params[1::3], **options))  # type: ignore[arg-type]
        run.manager.add_optimizer(torch.optim.SGD(params[2::3], lr=1e-3))
        kept.append(run.train(0, 1, 2).weights)
    models.assert_same_dicts(kept[0], kept[1], "of one storage", 2.0**-7)
    with torch.no_grad():
        params[2].add_(1)
    run.train(3)
    run = Run(SMALL["split"]).train(0)
    next(run.model.parameters()).local.add_(1)  # by hand, into this rank's slice
    with pytest.raises(ParameterError, match="written since the last step"):
        run.train(1)


@pytest.mark.parametrize("count", [2, pytest.param(6, marks=long)])
@on_ranks(2)
def test_states_of_other_forms(tmp_path, count):
    """A gathered state moves from any form to any; a checkpoint of shards is refused. A step
    updates states where they are.
    """
    for place, (name, options) in enumerate(FORMS.items()):
        run = Run(options).train(0, 1, 2).checkpoint(tmp_path / name)
        weights, state = run.weights, run.manager.state_dict(gather_opt=True)
        views = {
            (param, key): value
            for param, own in run.optimizer.state.items()
            for key, value in own.items()
            if isinstance(value, torch.Tensor)
        }
        run.train(3)
        for (param, key), value in views.items():
            assert run.optimizer.state[param][key] is value, f"{key} was made anew"
        for other, others in (2 * list(FORMS.items()))[place : place + count]:
            again = Run(others).resume(weights, state)
            now = again.found[1]
            for index, values in state["optimizers"][0]["state"].items():
                for key in values.keys() & now[index].keys() - {"step"}:
                    tolerance = 0.01 if "8bit" in other and "8bit" not in name else 0.0
                    if key == "master" and name != other:
                        tolerance = 2.0**-22
                    models.assert_same(now[index][key], values[key], f"{name}, {other}", tolerance)
            again.train(3)
            kinds = [one.get("master_weights", "fp32") for one in (options, others)]
            # weights without masters are masters that are rounded already
            continues = kinds[0] == kinds[1] or kinds == ["none", "fp32"]
            if not continues or options.get("moments") != others.get("moments"):
                with pytest.raises(CheckpointError, match="other moments or master_weights"):
                    again.restore(tmp_path / name)
                again.train(4)


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(16, 24, dtype=torch.bfloat16)

    def forward(self, x):
        return self.up(x)


def columns():
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(Columns())
    bmt.init_parameters(model)
    options: Any = SMALL["8bit and split"]
    return Run(options, copied=(model, AdamOptimizer(model.parameters(), lr=1e-2, **options)))


def columns_step(run):
    run.manager.zero_grad()
    run.manager.backward(run.model(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().sum())
    run.manager.step()
    return run


def save_parts(folder):
    run = columns_step(columns()).checkpoint(folder)
    return [run.found, columns_step(run).found]


def load_parts(folder, kept):
    run = columns().restore(folder)
    models.assert_equal(run.found, kept[0])
    models.assert_equal(columns_step(run).found, kept[1])


def refuse_parts(folder):
    run = columns()
    before = run.found
    with pytest.raises(CheckpointError, match="exp_avg_scales"):
        run.restore(folder)
    models.assert_equal(run.found, before)


def test_tensor_parallel_blocks(tmp_path):
    """Blocks are those of a rank's part: they come back at the same number of parts, and are
    refused at another.
    """
    kept = run_ranks(save_parts, 2, tmp_path, init={"tp_size": 2})[0]
    run_ranks(load_parts, 2, tmp_path, kept, init={"tp_size": 2})
    run_ranks(refuse_parts, 2, tmp_path)


@on_ranks(1)
def test_what_is_refused():
    """Each before anything is made."""
    params = [nn.Parameter(torch.ones(3))]
    known = "one of fp32, 8bit"
    cases = (
        (torch.float32, {"moments": "4bit"}, known),
        (torch.float32, {"moments": 8}, known),
        (torch.float32, {"master_weights": None}, "one of fp32, split, none"),
        (torch.float64, {**SMALL["8bit"]}, "float64"),
        (torch.float16, {**SMALL["split"]}, "float16"),
        (torch.float16, {**SMALL["none"]}, "float16"),
    )
    for dtype, options, expected in cases:
        with pytest.raises(ConfigurationError, match=expected):
            AdamOptimizer([nn.Parameter(torch.ones(3, dtype=dtype))], **options)
    unknown: Any = {"master_weight": "split"}
    with pytest.raises(TypeError, match="'master_weight'"):
        AdamOptimizer(params, **unknown)
    optimizer = AdamOptimizer(params, lr=0.1, master_weights="none")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3).half())]})
    params[0].grad = torch.ones(3)
    with pytest.raises(ConfigurationError, match="float16"):
        optimizer.step()
    optimizer.param_groups.pop()
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((3,), 0.9))
