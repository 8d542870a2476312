"""Schedules against their formulas written out, over any torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bmtrain.errors import ConfigurationError
from bmtrain.lr_scheduler import Cosine, Exponential, Linear, Noam, NoDecay, WarmupLRScheduler

S, W, E = 0.3, 4, 12
SCHEDULES: list[type[WarmupLRScheduler]] = [Noam, NoDecay, Linear, Cosine, Exponential]

# iteration -> learning rate, worked out by hand from the definitions
TABLES: dict[type[WarmupLRScheduler], dict[int, float]] = {
    Noam: {0: 0.0, 1: 0.3 / 8, 3: 0.9 / 8, 4: 0.15, 9: 0.1, 16: 0.075, 100: 0.03},
    NoDecay: {0: 0.0, 1: 0.075, 3: 0.225, 4: 0.3, 12: 0.3, 1000: 0.3},
    Linear: {0: 0.0, 1: 0.075, 4: 0.3, 6: 0.225, 8: 0.15, 12: 0.0, 13: 0.0, 99: 0.0},
    Cosine: {0: 0.0, 2: 0.15, 4: 0.3, 6: 0.15 * (1 + math.sqrt(0.5)), 8: 0.15, 12: 0.0},
    Exponential: {
        0: 0.0,
        3: 0.225,
        4: 0.3,
        5: 0.285,
        6: 0.27075,
        12: 0.3 * 0.95**8,
        20: 0.3 * 0.95**16,
    },
}


def optimizer(num_groups: int = 2) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 7.0} for _ in range(num_groups)]
    return torch.optim.SGD(groups, lr=9.0)


@pytest.mark.parametrize(
    ("schedule", "iteration"), [(s, n) for s, table in TABLES.items() for n in table]
)
def test_formula(schedule: type[WarmupLRScheduler], iteration: int) -> None:
    expected = TABLES[schedule][iteration]
    target = optimizer()
    scheduler = schedule(target, S, W, E, num_iter=iteration)
    assert scheduler.current_lr == pytest.approx(expected, rel=1e-12, abs=1e-16)
    assert [group["lr"] for group in target.param_groups] == [scheduler.current_lr] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_reach_what_construction_reaches(schedule: type[WarmupLRScheduler]) -> None:
    target = optimizer()
    scheduler = schedule(target, S, W, E)
    for iteration in range(E + 3):
        assert scheduler.num_iter == iteration
        assert target.param_groups[1]["lr"] == schedule(optimizer(), S, W, E, iteration).current_lr
        scheduler.step()
    scheduler.step(num_iter=5)
    assert scheduler.num_iter == 5
    assert target.param_groups[0]["lr"] == schedule(optimizer(), S, W, E, 5).current_lr


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_warmup_starts_at_the_top(schedule: type[WarmupLRScheduler]) -> None:
    scheduler = schedule(optimizer(), S, 0, E)
    assert scheduler.current_lr == S
    scheduler.step()
    assert 0 < scheduler.current_lr <= S


@pytest.mark.parametrize("schedule", [Noam, NoDecay, Exponential])
def test_no_end(schedule: type[WarmupLRScheduler]) -> None:
    ending = schedule(optimizer(), S, W, E, 500)
    for end in (-1, None, -2):
        endless = schedule(optimizer(), S, W, end, 500)
        assert endless.current_lr == ending.current_lr > 0
        endless.load_state_dict(endless.state_dict())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resume(schedule: type[WarmupLRScheduler]) -> None:
    saved = schedule(optimizer(), S, W, E)
    for _ in range(7):
        saved.step()
    target = optimizer()
    resumed = schedule(target, 99.0, 1, 1000)
    resumed.load_state_dict(saved.state_dict())
    assert target.param_groups[0]["lr"] == saved.current_lr
    for _ in range(10):
        saved.step()
        resumed.step()
        assert resumed.current_lr == saved.current_lr == target.param_groups[1]["lr"]
    assert resumed.state_dict() == saved.state_dict()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_state_that_is_refused_changes_nothing(schedule: type[WarmupLRScheduler]) -> None:
    target = optimizer()
    scheduler = schedule(target, S, W, E, 3)
    before, rates = scheduler.state_dict(), [group["lr"] for group in target.param_groups]
    with pytest.raises(ConfigurationError, match="warmup_iter"):
        scheduler.load_state_dict({**before, "start_lr": 2 * S, "warmup_iter": -1})
    assert scheduler.state_dict() == before
    assert [group["lr"] for group in target.param_groups] == rates


def test_gamma_is_saved_and_may_be_absent() -> None:
    saved = Exponential(optimizer(), S, W, E, gamma=0.5)
    resumed = Exponential(optimizer(), S, W, E, gamma=0.9)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.gamma == 0.5
    resumed.load_state_dict(NoDecay(optimizer(), S, W, E).state_dict())
    assert resumed.gamma == 0.5


def test_a_learning_rate_kept_in_a_tensor_stays_that_tensor() -> None:
    lr = torch.tensor(1.0)
    target = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=lr)
    NoDecay(target, 0.25, 0, -1)
    assert target.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


def test_own_schedule_overrides_both_parts() -> None:
    class Stairs(WarmupLRScheduler):
        def get_lr_warmup(self, num_iter: int) -> float:
            return 1.0

        def get_lr_decay(self, num_iter: int) -> float:
            return 2.0 + num_iter

    scheduler = Stairs(optimizer(), 0.0, 2, -1)
    seen = [scheduler.current_lr]
    for _ in range(3):
        scheduler.step()
        seen.append(scheduler.current_lr)
    assert seen == [1.0, 1.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Linear(optimizer(), S, 5, 5), ["end_iter", "got 5", "warmup_iter=5", "NoDecay"]),
        (lambda: Cosine(optimizer(), S, 5, 4), ["end_iter", "got 4", "warmup_iter=5"]),
        (lambda: Cosine(optimizer(), S, 0, -1), ["end_iter", "got -1"]),
        (lambda: NoDecay(optimizer(), -S, 0, 1), ["start_lr", "is -0.3", "0 or more"]),
        (lambda: NoDecay(optimizer(), math.nan, 0, 1), ["start_lr", "is nan"]),
        (lambda: Noam(optimizer(), S, -1, 1), ["warmup_iter", "is -1", "no warm-up"]),
        (lambda: Linear(optimizer(), S, 5, None), ["end_iter", "got None", "NoDecay"]),
        (lambda: Noam(optimizer(), S, 0, 9, -3), ["num_iter", "is -3"]),
        (lambda: Noam(optimizer(), S, 0, 9).step(-3), ["num_iter", "is -3"]),
        (lambda: Exponential(optimizer(), S, 0, 9, gamma=-1.0), ["gamma", "got -1.0"]),
        (
            lambda: Noam(optimizer(), S, 0, 9).load_state_dict({"num_iter": 3}),
            ["state_dict", "num_iter", "start_lr"],
        ),
    ],
)
def test_what_makes_no_schedule_is_refused(make: Callable[[], object], named: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert not [words for words in named if words not in str(caught.value)], str(caught.value)
