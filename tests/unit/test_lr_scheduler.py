"""Schedules against their formulas written out, over any torch optimizer."""

import math

import pytest
import torch

from bmtrain.errors import ConfigurationError
from bmtrain.lr_scheduler import Cosine, Exponential, Linear, Noam, NoDecay, WarmupLRScheduler

S, W, E = 0.3, 4, 12
# iteration -> learning rate, worked out by hand from the definitions
TABLES = {
    Noam: {0: 0.0, 1: 0.3 / 8, 3: 0.9 / 8, 4: 0.15, 9: 0.1, 16: 0.075, 100: 0.03},
    NoDecay: {0: 0.0, 1: 0.075, 3: 0.225, 4: 0.3, 12: 0.3, 1000: 0.3},
    Linear: {0: 0.0, 1: 0.075, 4: 0.3, 6: 0.225, 8: 0.15, 12: 0.0, 13: 0.0, 99: 0.0},
    Cosine: {0: 0.0, 2: 0.15, 4: 0.3, 6: 0.15 * (1 + math.sqrt(0.5)), 8: 0.15, 12: 0.0},
    Exponential: {0: 0.0, 3: 0.225, 4: 0.3, 5: 0.285, 6: 0.27075, 12: 0.3 * 0.95**8},
}
all_schedules = pytest.mark.parametrize("schedule", TABLES)


def optimizer():
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 7.0} for _ in range(2)]
    return torch.optim.SGD(groups, lr=9.0)


def rates(target):
    return [group["lr"] for group in target.param_groups]


@all_schedules
def test_formula(schedule):
    """By construction and by steps; without a warm-up from the top."""
    for iteration, expected in TABLES[schedule].items():
        target = optimizer()
        scheduler = schedule(target, S, W, E, num_iter=iteration)
        assert scheduler.current_lr == pytest.approx(expected, rel=1e-12, abs=1e-16)
        assert rates(target) == [scheduler.current_lr] * 2
    scheduler = schedule(target, S, W, E)
    for iteration in range(E + 3):
        assert scheduler.num_iter == iteration
        assert rates(target) == [schedule(optimizer(), S, W, E, iteration).current_lr] * 2
        scheduler.step()
    scheduler.step(num_iter=5)
    assert scheduler.num_iter == 5
    assert rates(target) == [schedule(optimizer(), S, W, E, 5).current_lr] * 2
    scheduler = schedule(optimizer(), S, 0, E)
    assert scheduler.current_lr == S
    scheduler.step()
    assert 0 < scheduler.current_lr <= S


@pytest.mark.parametrize("schedule", [Noam, NoDecay, Exponential])
def test_no_end(schedule):
    ending = schedule(optimizer(), S, W, E, 500)
    for end in (-1, None, -2):
        endless = schedule(optimizer(), S, W, end, 500)
        assert endless.current_lr == ending.current_lr > 0
        endless.load_state_dict(endless.state_dict())


@all_schedules
def test_resume(schedule):
    """A state that is refused changes nothing."""
    saved = schedule(optimizer(), S, W, E)
    for _ in range(7):
        saved.step()
    target = optimizer()
    resumed = schedule(target, 99.0, 1, 1000)
    resumed.load_state_dict(saved.state_dict())
    assert rates(target)[0] == saved.current_lr
    for _ in range(10):
        saved.step()
        resumed.step()
        before = resumed.state_dict()
        with pytest.raises(ConfigurationError, match="warmup_iter"):
            resumed.load_state_dict({**before, "start_lr": 2 * S, "warmup_iter": -1})
        assert resumed.state_dict() == before == saved.state_dict()
        assert rates(target) == [saved.current_lr] * 2 == [resumed.current_lr] * 2


def test_gamma_is_saved_and_may_be_absent():
    saved = Exponential(optimizer(), S, W, E, gamma=0.5)
    resumed = Exponential(optimizer(), S, W, E, gamma=0.9)
    for other in (saved, NoDecay(optimizer(), S, W, E)):
        resumed.load_state_dict(other.state_dict())
        assert resumed.gamma == 0.5


def test_a_learning_rate_kept_in_a_tensor_stays_that_tensor():
    lr = torch.tensor(1.0)
    target = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=lr)
    NoDecay(target, 0.25, 0, -1)
    assert rates(target)[0] is lr and lr.item() == 0.25


def test_own_schedule_overrides_both_parts():
    class Stairs(WarmupLRScheduler):
        def get_lr_warmup(self, num_iter):
            return 1.0

        def get_lr_decay(self, num_iter):
            return 2.0 + num_iter

    scheduler = Stairs(optimizer(), 0.0, 2, -1)
    seen = [scheduler.current_lr]
    for _ in range(3):
        scheduler.step()
        seen.append(scheduler.current_lr)
    assert seen == [1.0, 1.0, 4.0, 5.0]


REFUSED = """
Linear(optimizer(), S, 5, 5) => end_iter|got 5|warmup_iter=5|NoDecay
Cosine(optimizer(), S, 5, 4) => end_iter|got 4|warmup_iter=5
Cosine(optimizer(), S, 0, -1) => end_iter|got -1
NoDecay(optimizer(), -S, 0, 1) => start_lr|is -0.3|from 0 on
NoDecay(optimizer(), math.nan, 0, 1) => start_lr|is nan
Noam(optimizer(), S, -1, 1) => warmup_iter|is -1|from 0 on
Linear(optimizer(), S, 5, None) => end_iter|got None|NoDecay
Noam(optimizer(), S, 0, 9, -3) => num_iter|is -3
Noam(optimizer(), S, 0, 9).step(-3) => num_iter|is -3
Exponential(optimizer(), S, 0, 9, gamma=-1.0) => gamma|is -1.0
Exponential(optimizer(), S, 0, 9, gamma=2.0).step(9999) => iteration 9999: lr is|finite
Exponential(optimizer(), S, 0, 9, gamma=math.inf) => gamma|is inf|finite
Noam(optimizer(), S, 0, 9).load_state_dict({"num_iter": 3}) => state_dict|num_iter|start_lr
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_makes_no_schedule_is_refused(line):
    call, words = line.split(" => ")
    with pytest.raises(ConfigurationError) as caught:
        eval(call, globals())
    assert all(word in str(caught.value) for word in words.split("|")), caught.value
