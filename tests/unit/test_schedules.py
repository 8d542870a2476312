"""Steps of schedules that are taken back: as if they had never been, whatever the schedule
keeps.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from bmtrain.lr_scheduler import Cosine
from bmtrain.optim.schedules import step_schedules


class Table:
    """Rates looked up in a table; it counts its calls, and holds what must not be copied."""

    def __init__(self) -> None:
        self.calls, self.rates, self.model = 0, [1 / (1 + step) for step in range(40)], Heavy()

    def __call__(self, step: int) -> float:
        self.calls += 1
        return self.rates[step] + self.calls / 1000


class Heavy:
    """A model, say."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a schedule is no reason to copy a model")

    __copy__ = __deepcopy__


class Historian:
    """A schedule that writes into what it keeps, in places of all kinds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.kept: dict[str, Any] = {
            "list": [],
            "nested": ([], {"deep": [[]]}),
            "set": set(),
            "queue": deque(maxlen=3),
            "tensor": torch.zeros(2),
            "number": 0,
        }

    def step(self) -> None:
        kept = self.kept
        kept["number"] += 1
        for place in (kept["list"], kept["nested"][0], kept["nested"][1]["deep"][0], kept["queue"]):
            place.append(kept["number"])
        kept["set"].add(kept["number"])
        kept["tensor"].add_(kept["number"])
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + kept["number"])

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "table": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Table()),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5]),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 4])],
        milestones=[4],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "ours": lambda optimizer: Cosine(optimizer, 0.1, 3, 10),
    "historian": Historian,
}


def make(schedule: str) -> tuple[torch.optim.Optimizer, Any]:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    made = SCHEDULES[schedule](optimizer)
    optimizer.step()  # torch wants it before the first step of a schedule
    return optimizer, made


def numbers(optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return repr(
        [
            groups,
            {name: value for name, value in schedule.state_dict().items() if name != "lr_lambdas"},
        ]
    )


# a sequence of schedules of torch 2.8 uses it itself
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_taken_back_leaves_nothing(name: str) -> None:
    """A schedule that takes every step twice, once to be taken back, against one that does not."""
    (plain_optimizer, plain), (optimizer, schedule) = make(name), make(name)
    for _ in range(9):
        step_schedules([schedule], [optimizer])()
        assert numbers(optimizer, schedule) == numbers(plain_optimizer, plain)
        step_schedules([schedule], [optimizer])
        plain.step()
        assert numbers(optimizer, schedule) == numbers(plain_optimizer, plain)


def test_functions_with_a_state_go_back_too() -> None:
    optimizer, schedule = make("table")
    table = schedule.lr_lambdas[0]
    calls = table.calls
    step_schedules([schedule], [optimizer])()
    assert table.calls == calls
    assert isinstance(table.model, Heavy)


def test_milestones_stay_counters() -> None:
    optimizer, schedule = make("milestones")
    before = copy.copy(schedule.milestones)
    step_schedules([schedule], [optimizer])()
    assert schedule.milestones == before
    assert type(schedule.milestones) is type(before)
