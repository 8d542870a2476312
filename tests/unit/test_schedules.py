"""Steps of schedules that are taken back: as if they had never been, whatever the schedule keeps."""

from collections import deque
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as of_torch

from bmtrain.lr_scheduler import Cosine
from bmtrain.optim.schedules import step_schedules


class Table:
    """Rates looked up in a table; it counts its calls, and holds what must not be copied."""

    def __init__(self):
        self.calls, self.rates, self.model = 0, [1 / (1 + step) for step in range(40)], Heavy()

    def __call__(self, step):
        self.calls += 1
        return self.rates[step] + self.calls / 1000


class Heavy:
    """A model, say."""

    def __deepcopy__(self, memo):
        raise AssertionError("a schedule is no reason to copy a model")

    __copy__ = __deepcopy__


class Historian:
    """A schedule that writes into what it keeps, in places of all kinds."""

    def __init__(self, optimizer):
        self.optimizer, self.number, self.seen = optimizer, 0, set[int]()
        self.kept: Any = [[], ([], {"deep": [[]]}), deque(maxlen=3), torch.zeros(2)]

    def step(self):
        self.number += 1
        few, (nested, deep), queue, tensor = self.kept
        for place in (few, nested, deep["deep"][0], queue):
            place.append(self.number)
        self.seen.add(self.number)
        tensor.add_(self.number)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.number)

    def state_dict(self):
        return {"kept": self.kept, "number": self.number, "seen": self.seen}

    def load_state_dict(self, state):
        vars(self).update(state)


SCHEDULES = """
LambdaLR(optimizer, Table())
MultiStepLR(optimizer, [2, 5, 5])
OneCycleLR(optimizer, 0.1, total_steps=30)
SequentialLR(optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [2, 4])], [4])
ChainedScheduler([ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)])
Cosine(optimizer, 0.1, 3, 10)
Historian(optimizer)
""".strip().splitlines()


def make(schedule):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    made = eval(schedule, vars(of_torch) | globals(), {"optimizer": optimizer, "Cosine": Cosine})
    optimizer.step()  # torch wants it before the first step of a schedule
    return optimizer, made


def numbers(optimizer, schedule):
    held = [*optimizer.param_groups, schedule.state_dict()]
    skipped = ("params", "lr_lambdas")
    return repr([{name: x for name, x in each.items() if name not in skipped} for each in held])


# a sequence of schedules of torch 2.8 uses it itself
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_taken_back_leaves_nothing(name):
    """A schedule that takes every step twice, once to be taken back, against one that does not."""
    (plain_optimizer, plain), (optimizer, schedule) = make(name), make(name)
    for _ in range(9):
        step_schedules([schedule], [optimizer])()
        assert numbers(optimizer, schedule) == numbers(plain_optimizer, plain)
        step_schedules([schedule], [optimizer])
        plain.step()
        assert numbers(optimizer, schedule) == numbers(plain_optimizer, plain)


def test_kinds_stay_and_functions_go_back_too():
    """What the program has written in between stays."""
    optimizer, schedule = make(SCHEDULES[0])
    table = schedule.lr_lambdas[0]
    calls = table.calls
    take_back = step_schedules([schedule], [optimizer])
    optimizer.param_groups[1]["lr"] = 7.0
    take_back()
    assert table.calls == calls and isinstance(table.model, Heavy)
    assert optimizer.param_groups[1]["lr"] == 7.0
    optimizer, schedule = make(SCHEDULES[1])
    before = dict(schedule.milestones), type(schedule.milestones)
    step_schedules([schedule], [optimizer])()
    assert (dict(schedule.milestones), type(schedule.milestones)) == before
