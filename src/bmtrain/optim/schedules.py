"""Steps of learning-rate schedules that can be undone."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from bmtrain.errors import ConfigurationError

_ATOMS = frozenset((int, float, bool, str, type(None)))


@runtime_checkable
class Restorable(Protocol):
    """A schedule that can return to an earlier state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> object: ...


def check_steps_alone(schedule: Any) -> None:
    """Refuse a schedule that an OptimManager cannot step, before its first step is half done.

    Raises:
        ConfigurationError: for one whose `step` has an argument without a default, as that of
            torch's ReduceLROnPlateau.
    """
    needed = [
        name
        for name, argument in inspect.signature(schedule.step).parameters.items()
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise ConfigurationError(
            f"add_optimizer got {type(schedule).__name__}, whose step() needs {needed[0]!r}: leave "
            f"it out, and call its step({needed[0]}) yourself, with the same value on all ranks."
        )


def step_schedules(
    schedules: Sequence[Any], optimizers: Iterable[torch.optim.Optimizer]
) -> Callable[[], None]:
    """Step all schedules. Returns a function that undoes the steps.

    Values that the program has written in between are kept.

    Args:
        schedules: Restorable, each with a `step()`.
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
                _put(
                    group,
                    name,
                    old[name] if name in old and _equal(value, ours.get(name)) else value,
                )

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


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a hyperparameter; a tensor is written in place, since others may refer to it."""
    if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
        group[name].copy_(value)
    else:
        group[name] = value
