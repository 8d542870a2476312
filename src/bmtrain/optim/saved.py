"""Whether a state that a file has held is one of an optimizer or a manager at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import agree
from bmtrain.errors import CheckpointError
from bmtrain.optim.alike import described
from bmtrain.runtime import world

# In the state of a manager, beside optimizers' states, which may be slices.
OF_ALL_RANKS = (
    *("lr_schedulers", "loss_scale", "loss_scale_enabled", "loss_scale_state"),
    *("num_steps", "num_skipped"),
)
SAVED = "expected what state_dict() returned"


def check_manager_state(state: Any, counts: Mapping[str, int]) -> None:
    """Refuse what is no state of an OptimManager, before anything is changed. Collective.

    Args:
        counts: of optimizers and schedules that the manager has, by the state's names for them.

    Raises:
        CheckpointError: on every rank, if any has been given such a state, or another one than the
            others; states of optimizers are not compared here.
    """
    _agree(_problem_of_manager(state, counts))
    rest = {name: described(state.get(name)) for name in OF_ALL_RANKS}
    everyone = collectives.gather_objects(rest, world.current("load_state_dict").mesh.world)
    for other in everyone:
        if other != everyone[0]:
            name = next(name for name in OF_ALL_RANKS if other[name] != everyone[0][name])
            raise CheckpointError(
                f"load_state_dict got {name!r} that differs between ranks: give all of them the "
                "same state, that of one file for example."
            )


def check_optimizer_state(state: Any) -> None:
    """Refuse what is no state of an optimizer, before anything is changed. Collective.

    Raises:
        CheckpointError: on every rank, if any has been given such a state.
    """
    _agree(_problem_of_optimizer(state))


def check_masters(foreign: Sequence[int]) -> None:
    """Refuse masters that are not those of the weights, before anything is changed. Collective.

    Args:
        foreign: indices of the parameters that have such masters on this rank.

    Raises:
        CheckpointError: on every rank, if any rank has such masters.
    """
    text = None
    if foreign:
        text = (
            f"load_state_dict got master weights of parameter {foreign[0]} that its weights are "
            "not rounded from, and master_weights='split' keeps their remainder to the weights: "
            "load the weights first, then the optimizer's state, or use master_weights='fp32'."
        )
    agree(text, world.current("load_state_dict").mesh.world, kind=CheckpointError)


def _agree(problem: str | None) -> None:
    text = None if problem is None else f"load_state_dict got {problem}: {SAVED}."
    agree(text, world.current("load_state_dict").mesh.world, kind=CheckpointError)


def _problem_of_manager(state: Any, counts: Mapping[str, int]) -> str | None:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    for name, count in counts.items():
        if not isinstance(state.get(name), list | tuple):
            return f"no list of {name}"
        if len(state[name]) != count:
            return (
                f"a state that has {len(state[name])} {name}, this manager {count}; add the same "
                "ones first"
            )
    for problem in map(_problem_of_optimizer, state["optimizers"]):
        if problem is not None:
            return problem
    return _problem_of_schedules(state) or _problem_of_scale(state)


def _problem_of_schedules(state: Mapping[str, Any]) -> str | None:
    for saved in state["lr_schedulers"]:
        if not isinstance(saved, Mapping | None):
            return f"a {type(saved).__name__} as the state of a schedule"
    for name in ("num_steps", "num_skipped"):
        if not _is_count(state.get(name, 0)):
            return f"{name}={state[name]!r}"
    return None


def _problem_of_scale(state: Mapping[str, Any]) -> str | None:
    """A scale is a number, as BMTrain has it, or what LossScale.state_dict returns."""
    for name in ("loss_scale", "loss_scale_state"):
        saved = state.get(name)
        if isinstance(saved, Mapping) and set(saved) != {"value", "good_steps"}:
            return f"a {name} of {sorted(map(str, saved))}"
        values = saved.values() if isinstance(saved, Mapping) else [saved]
        wrong = [value for value in values if not (value is None or _is_positive(value))]
        if wrong:
            return f"a {name} of {wrong[0]!r}"
    return None


def _problem_of_optimizer(state: Any) -> str | None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return f"no optimizer state but a {type(state).__name__} without 'state' and 'param_groups'"
    groups, states = state["param_groups"], state["state"]
    if not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        return "param_groups that are no dicts with lists of 'params'"
    if not isinstance(states, Mapping):
        return f"a {type(states).__name__} as the states of parameters"
    for index, one in states.items():
        if not isinstance(index, int) or not isinstance(one, Mapping):
            return f"a {type(one).__name__} as the state of parameter {index!r}"
    return None


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**200
