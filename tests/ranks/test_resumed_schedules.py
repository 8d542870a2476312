"""Managers that go on from a checkpoint or a copy; schedules and optimizers other than the saved
ones are refused, before anything is changed.
"""

import copy
import functools

import pytest
import torch
from tests.ranks import models
from tests.ranks.pairs import Pair
from tests.ranks.runner import on_ranks
from tests.ranks.test_optim import SCHEDULES
from torch.optim import lr_scheduler

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ConfigurationError
from bmtrain.optim import OptimManager


def restore(folder, pair):
    with bmt.CheckpointManager(folder) as checkpoints:
        assert checkpoints.restore(pair.model, pair.manager) is not None


def save(folder, pair):
    with bmt.CheckpointManager(folder) as checkpoints:
        checkpoints.save(3, pair.model, pair.manager)


@on_ranks(2)
def test_other_schedules(tmp_path):
    """A refused state has changed nothing: training goes on as in one process."""
    for name, schedule in SCHEDULES.items():
        pair = Pair(schedule=schedule).run(3)
        state = copy.deepcopy(pair.manager.state_dict(gather_opt=True))
        save(tmp_path / name, pair)
        weights = models.cloned_state(pair.model)
        end = models.cloned_state(pair.run(range(3, 5)).model)
        for other, others in SCHEDULES.items():
            new = Pair(schedule=others)
            ways = [
                functools.partial(new.manager.load_state_dict, state),
                functools.partial(restore, tmp_path / name, new),
            ]
            for way in ways:
                if other != name:
                    with pytest.raises(CheckpointError, match="schedule for optimizer 0"):
                        way()
                else:
                    new.model.load_state_dict(weights)
                    way()
                    new.run(range(3, 5))
                    models.assert_same_dicts(models.cloned_state(new.model), end, name, 0.0)
            if other != name:
                new.train(2)


@on_ranks(2)
def test_the_remedies():
    """Of refused schedules, and of those that need to be told a metric. As the errors say: another
    schedule from its start, or none.
    """
    for one, other in (("none", "ours"), ("ours", "none"), ("chain", "ours")):
        state = Pair(schedule=SCHEDULES[one]).run(3).manager.state_dict(gather_opt=True)
        new, schedule = Pair(schedule=SCHEDULES[one]), SCHEDULES[other]
        new.manager.load_state_dict(state)
        new.manager.lr_schedulers[0] = schedule and schedule(new.optimizer)
        rate = new.optimizer.param_groups[0]["lr"]
        new.run(range(3, 4))
        assert (new.optimizer.param_groups[0]["lr"] == rate) is (other == "none")
    pair = Pair()
    plateau = lr_scheduler.ReduceLROnPlateau(pair.optimizer, patience=0)
    manager = OptimManager()
    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau.*'metrics'"):
        manager.add_optimizer(pair.optimizer, plateau)
    assert manager.optimizers == [] and manager.lr_schedulers == []
    for metric in (1.0, 2.0, 3.0):
        pair.run(1)
        plateau.step(metric)
    assert pair.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**2)


KINDS = [
    lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    lambda params: torch.optim.NAdam(params, lr=0.01),
    lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    lambda params: torch.optim.Adagrad(params, lr=0.01),
]


@on_ranks(2)
def test_states_of_other_optimizers():
    for kind in KINDS:
        other, new = Pair((kind,)).run(2), Pair()
        for gather in (False, True):
            with pytest.raises(CheckpointError, match="state of another optimizer"):
                new.manager.load_state_dict(other.manager.state_dict(gather_opt=gather))
        new.train(2)
    for gather in (False, True):  # torch's take any state, and fail in the next step
        new, state = Pair((KINDS[0],)), Pair("adamw").run(2).manager.state_dict(gather_opt=gather)
        with pytest.raises(CheckpointError, match="for optimizer 0, without dampening, momentum"):
            new.manager.load_state_dict(state)
        new.train(2)
    pair, new = Pair("adamw").run(2), Pair()
    new.model.load_state_dict(models.cloned_state(pair.model))
    new.manager.load_state_dict(pair.manager.state_dict(gather_opt=True))
    for one in (pair, new):
        one.run(range(2, 4))
    models.assert_same_dicts(
        models.cloned_state(new.model), models.cloned_state(pair.model), "torch's AdamW", 1e-6
    )


@on_ranks(2)
def test_copies_of_managers():
    """A copy of model and manager goes its own way, from the same state."""
    for schedule in SCHEDULES.values():
        pair = Pair(dtype=torch.float16, schedule=schedule, scale=64.0).run(4)
        again = copy.deepcopy(pair)
        again.reference.__dict__.pop("step", None)  # torch's schedules leave that of the original
        for one in (pair, again):
            one.train(range(4, 6))
            one.backward(6)  # gradients are kept
            one.step()
            one.check("the copy")
        assert again.manager.optimizers[0] is again.optimizer is not pair.optimizer
