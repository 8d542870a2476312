"""Steps of learning-rate schedules that can be undone."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bmtrain.errors import ConfigurationError

_ATOMS = frozenset((int, float, bool, str, type(None)))


def check_steps_alone(schedule: Any) -> None:
    """Refuse a schedule that an OptimManager cannot step, before its first step is half done.

    Raises:
        ConfigurationError: for one whose `step` has an argument without a default, as that of
            torch's ReduceLROnPlateau.
    """
    try:
        inspect.signature(schedule.step).bind()
    except TypeError as error:
        raise ConfigurationError(
            f"add_optimizer got {type(schedule).__name__}, whose step() is {error}: leave it out, "
            "and call its step yourself, with the same values on all ranks."
        ) from None


def step_schedules(
    schedules: Sequence[Any], optimizers: Iterable[torch.optim.Optimizer]
) -> Callable[[], None]:
    """Step all schedules. Returns a function that undoes the steps.

    Values that the program has written in between are kept.

    Args:
        schedules: each with `step()`, `state_dict` and `load_state_dict`.
        optimizers: whose hyperparameters the schedules write.
    """
    if not schedules:
        return lambda: None
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    states, before = [_kept(schedule.state_dict()) for schedule in schedules], _numbers(groups)
    for schedule in schedules:
        schedule.step()
    written = _numbers(groups)

    def take_back() -> None:
        now = _numbers(groups)
        for schedule, state in zip(schedules, states, strict=True):
            schedule.load_state_dict(state)
        for group, old, ours, present in zip(groups, before, written, now, strict=True):
            for name, value in present.items():
                new, written_here = value, ours.get(name)
                if isinstance(value, torch.Tensor) and isinstance(written_here, torch.Tensor):
                    is_ours = torch.equal(value, written_here)
                else:
                    is_ours = type(value) is type(written_here) and bool(value == written_here)
                if name in old and is_ours:
                    new = old[name]
                # A tensor is written in place, since others may refer to it.
                if isinstance(new, torch.Tensor) and isinstance(group[name], torch.Tensor):
                    group[name].copy_(new)
                else:
                    group[name] = new

    return take_back


def _kept(state: Any) -> Any:
    """A copy of a schedule's counters: numbers, tensors, and containers of them.

    Other objects are shared, not copied: this runs in every step, and a function that gives the
    rates may hold a table or the whole model.
    """
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        copied = copy.copy(state)  # keeps the type: milestones are a Counter
        for key, value in state.items():
            copied[key] = _kept(value)
        return copied
    if type(state) in (list, tuple) and not _ATOMS.issuperset(map(type, state)):
        return type(state)(map(_kept, state))
    return copy.copy(state) if isinstance(state, list | set | deque) else state


def _numbers(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of all hyperparameters of the groups."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in groups
    ]
