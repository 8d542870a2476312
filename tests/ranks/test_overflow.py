"""Steps that are left out: the host learns of them later than the device, and nothing of them
stays. That training goes on as without them is in test_optim.py.
"""

import contextlib
import copy
import functools
import io
import types
import warnings
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.pairs import Pair, late_verdicts
from tests.ranks.runner import on_ranks, run_ranks
from tests.ranks.test_optim import SCHEDULES
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, NonFiniteError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager

HALF = torch.float16
ours = SCHEDULES["ours"]


def numbers(pair):
    """What a step counts, as it is now: read without settling."""
    counts = [state["step"] for state in pair.optimizer.state.values()]
    rates = [(group["lr"], group["betas"]) for group in pair.optimizer.param_groups]
    schedule = pair.schedules[0]
    return copy.deepcopy(
        [rates, schedule and schedule.state_dict(), counts, pair.manager._num_steps]
    )


ASK = {
    "backward": lambda pair: pair.backward(0),
    "loss_scale": lambda pair: pair.manager.loss_scale,
    "scale_loss": lambda pair: pair.manager.scale_loss(torch.ones(())),
    "clip": lambda pair: pair.manager.clip_grad_norm([], 1.0),
    "state": lambda pair: pair.manager.state_dict(),
    "optimizer state": lambda pair: pair.optimizer.state_dict(),
    "copy": lambda pair: copy.deepcopy((pair.model, pair.manager)),
    "skipped_steps": lambda pair: pair.manager.skipped_steps,
    "0.1.x scale": lambda pair: pair.optimizer.scale,
    "0.1.x loss": lambda pair: pair.optimizer.loss_scale(torch.ones(())),
}


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("adam", "cycle"), ("offload", "ours"), ("adam", "chain"), ("offload", "none")],
)
@on_ranks(2)
def test_a_step_left_out_is_taken_back_whoever_asks(kind, schedule):
    """Weights, masters, moments; step counts, hyperparameters, schedules, number of steps."""
    # a sequence of schedules of torch 2.8 uses it itself
    warnings.filterwarnings("ignore", message="The epoch parameter")
    pair = Pair(kind, HALF, schedule=SCHEDULES[schedule], scale=2.0**14, growth=100).run(3)
    for place, (how, ask) in enumerate(ASK.items()):
        before = numbers(pair)
        with late_verdicts():
            pair.run(range(place, place + 1), ("inf", "nan", "gradient")[place % 3])
            assert (numbers(pair)[:2] != before[:2]) == (schedule != "none"), (
                f"{how}: schedules go on until the verdict is asked for"
            )
            ask(pair)
            assert numbers(pair) == before, how
            pair.check(how, with_gradients=False)
            pair.train(range(place, place + 1))
        assert numbers(pair) != before, f"{how}: a good step counts"


@on_ranks(1)
def test_what_the_program_has_written_since_stays():
    """A rate set by hand between step and verdict is not the schedule's to take back."""
    with late_verdicts():
        pair = Pair(dtype=HALF, schedule=ours, scale=64.0).run(1)
        before = pair.schedules[0].num_iter
        pair.run(range(1, 2), "inf")
        first, second = pair.optimizer.param_groups
        second["lr"], first["weight_decay"], first["name"] = 0.125, 0.25, "first"
        assert pair.manager.loss_scale == 32 and pair.schedules[0].num_iter == before
        assert first["lr"] == pair.schedules[0].current_lr and second["lr"] == 0.125
        assert first["weight_decay"] == 0.25 and first["name"] == "first"


class Counter:
    """A schedule that cannot go back."""

    steps = 0

    def step(self):
        self.steps += 1


class Counted(AdamOptimizer):
    """A program's own step, with BMTrain's arguments."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.counted: list[bool] = []

    def step(self, closure=None, scale=1):  # type: ignore[override]  # no `verdict`, as there
        self.counted.append(True)
        return super().step(closure, scale=scale)


def exchange(optimizer, counted):
    """As BMCook's pruning does."""
    before = optimizer.step

    def step(self, *args, **kwargs):
        counted.append(True)
        return before(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)


def at_once():
    recording = functools.partial(AdamOffloadOptimizer, record_delta=True)
    for make in (None, recording, torch.optim.SGD, Counted, AdamOptimizer):
        pair = Pair(dtype=HALF, schedule=ours if make else lambda _: Counter(), scale=64.0)
        steps = []
        if make:
            second: Any = make(nn.Linear(1, 1).parameters(), lr=0.1)
            if make is Counted:
                steps = second.counted
            if make is AdamOptimizer:
                exchange(second, steps)
                torch.optim.lr_scheduler.StepLR(second, 1)  # exchanges the method once more
            pair.manager.add_optimizer(second)
        else:
            pair.optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(True))
        pair.run(1, "inf")
        assert pair.manager._num_steps == 0 and not steps
        assert (pair.schedules[0].num_iter if make else pair.schedules[0].steps) == 0
        pair.check("skipped", with_gradients=False)
        pair.train(range(1, 3))
        counts = make not in (recording, torch.optim.SGD)
        assert pair.manager._num_steps == 2 and len(steps) == 2 * counts


@on_ranks(2)
def test_who_cannot_go_back_waits():
    """Schedules without a state, hooks, steps of the program's own, torch's optimizers, what records
    changes: the host decides before anything steps.
    """
    with late_verdicts():
        at_once()


def said():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), late_verdicts():
        Pair(dtype=HALF, scale=64.0).run(1, "inf").check("", with_gradients=False)
        pair = Pair(limit=2)
        for step, fault in enumerate(("nan", "", "alone", "nan")):
            pair.run(range(step, step + 1), fault)
        pair.zero_grad()
        pair.backward(5)
        with pytest.raises(NonFiniteError, match="2 steps in a row were skipped") as raised:
            pair.manager.step()
    pair.check("nothing has changed")
    assert (pair.manager.skipped_steps, pair.manager.skipped_in_a_row) == (3, 2)
    pair.manager.load_state_dict(pair.manager.state_dict())  # as from a checkpoint
    pair.train(range(6, 8))
    return out.getvalue(), str(raised.value)


def test_it_is_said_and_ends():
    """By rank 0; after `max_skipped_steps` in a row all ranks raise, and nothing has changed."""
    (text, error), (silent, same_error) = run_ranks(said, 2)
    start = (
        "the loss or a gradient is not finite, or so large that Adam's second moment would be "
        "infinite for good: the step is skipped on all ranks"
    )
    assert text.splitlines() == [
        "gradient overflow: loss scale 64 -> 32, the step is skipped",
        *(f"{start} ({row} in a row, {count} in all)" for row, count in ((1, 1), (1, 2), (2, 3))),
    ]
    assert silent == "" and error == same_error


def too_large(kind):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        pair = Pair(kind, schedule=ours).train(2)
        pair.zero_grad()
        for param in pair.optimizer.param_groups[0]["params"][:1]:
            pair.manager.backward(param.sum() * 1e25)
        pair.manager.step()
        pair.num_skipped += 1
        pair.zero_grad()
        pair.check("a gradient whose square is infinite")
        pair.train(range(2, 4))
        group = pair.optimizer.param_groups[0]
        for rate in (float("nan"), float("inf")):
            before, group["lr"] = group["lr"], rate
            pair.backward(4)
            with pytest.raises(ConfigurationError, match=f"group 0: lr is {rate}: expected"):
                pair.manager.step()
            group["lr"] = before
            pair.zero_grad()
            pair.check("a learning rate that is not finite")
        pair.train(range(4, 6))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["adam", "offload"])
def test_what_adam_cannot_come_back_from(kind):
    """A finite gradient with an infinite square would freeze a parameter for good: the step is
    skipped, and that is told. A learning rate that is not finite is refused.
    """
    text = run_ranks(too_large, 2, kind)[0]
    assert "so large that Adam's second moment would be infinite" in text


@on_ranks(2)
def test_a_loss_scale_that_can_fall_is_no_fault():
    """Only steps that are skipped at the smallest scale count towards the end; the loop of 0.1
    skips without a scale, too.
    """
    pair = Pair(dtype=HALF, scale=4.0, limit=3)
    for step in range(5):
        smallest = pytest.warns(UserWarning, match="smallest loss scale")
        with smallest if step > 1 else contextlib.nullcontext():
            pair.run(range(step, step + 1), "gradient")
    assert pair.manager.loss_scale == 1
    assert (pair.manager.skipped_steps, pair.manager.skipped_in_a_row) == (5, 3)
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        pair.manager.step()
    pair = Pair("offload", api="old", schedule=ours).train(2)
    pair.backward(2, "inf")
    with pytest.warns(UserWarning, match="optim_step: a gradient is not finite"):
        bmt.optim_step(pair.optimizer, pair.schedules[0])
    pair.zero_grad()
    pair.check("skipped without a loss scale")
    pair.train(range(3, 5))


@on_ranks(1)
def test_loading_comes_after_the_verdict():
    """What is loaded is not taken back."""
    for kind in ("adam", "offload"):
        with late_verdicts():
            pair = Pair(kind, HALF, schedule=ours, scale=64.0).run(1)
            saved = copy.deepcopy(pair.manager.state_dict())
            before = numbers(pair)
            pair.run(range(1, 2)).run(range(2, 3), "inf")
            pair.manager.load_state_dict(saved)
            assert numbers(pair) == before and pair.manager.loss_scale == 64
            pair.run(range(2, 3), "inf")
            rate = pair.optimizer.param_groups[0]["lr"]  # as the schedule has written it
            saved["optimizers"][0]["param_groups"][0]["lr"] = rate
            pair.optimizer.load_state_dict(saved["optimizers"][0])
            assert pair.manager.loss_scale == 32
            assert pair.optimizer.param_groups[0]["lr"] == rate
            assert {state["step"] for state in pair.optimizer.state.values()} == {1}
            pair.run(range(2, 3), "inf").optimizer.justify_scale(16.0)
            assert pair.manager.loss_scale == 16


@on_ranks(3)
def test_sparse_gradients():
    """Beside a dense layer, in an optimizer of its own, as in one process; rows that occur twice
    count as their sum.
    """
    nets = []
    kinds = (torch.optim.SparseAdam, torch.optim.SGD)
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Embedding(9, 7, sparse=True), nn.Linear(7, 5)))
    nets[0][1] = bmt.Block(nets[0][1])
    mine, theirs = (
        [kind(part.parameters(), lr=0.1) for kind, part in zip(kinds, net, strict=True)]
        for net in nets
    )
    manager = OptimManager()
    for optimizer in mine:
        manager.add_optimizer(optimizer)
    ids = torch.tensor([[1, 4], [4, 4], [7, 1], [2, 4], [1, 1], [1, 8]])
    for step, factor in enumerate((1.0, float("nan"), 1.0, 1.0)):
        manager.zero_grad()
        nets[1].zero_grad()
        own = models.own(ids)
        manager.backward(nets[0](own).square().mean() * factor)
        (nets[1](ids).square().mean() * factor).backward()
        grads = [grad_of(param).coalesce() for param in (nets[0][0].weight, nets[1][0].weight)]
        torch.testing.assert_close(grads[0], grads[1], equal_nan=True)
        norm = manager.clip_grad_norm(nets[0].parameters(), float("inf"))
        whole = [grad_of(param).to_dense().reshape(-1) for param in nets[1].parameters()]
        torch.testing.assert_close(norm, torch.cat(whole).norm(), equal_nan=True)
        manager.step()
        assert manager.skipped_steps == (step > 0)
        for optimizer in theirs if factor == 1 else ():
            optimizer.step()
        models.assert_same_state(nets[0], nets[1], "weights")
