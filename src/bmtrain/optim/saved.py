"""Whether a state that a file has held is one of an optimizer or a manager at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
MOMENTS = {"exp_avg", "exp_avg_sq"}
SAVED = "expected what state_dict() returned"


def check_manager_state(state: Any, schedules: Sequence[Any]) -> None:
    """Refuse what is no state of an OptimManager, before anything is changed. Collective.

    Args:
        schedules: of the manager, one for each optimizer; None where that has none.

    Raises:
        CheckpointError: on every rank, if any has been given such a state, or another one than the
            others; states of optimizers are not compared here.
    """
    _agree(_problem_of_manager(state, schedules))
    rest = {name: described(state.get(name)) for name in OF_ALL_RANKS}
    everyone = collectives.gather_objects(
        rest, world.current("load_state_dict").mesh.world, "OptimManager.load_state_dict"
    )
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


def check_adam_state(state: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse the state of another optimizer, of which Adam would take what it knows. Collective.

    Args:
        known: names of a parameter's states that Adam can take over.

    Raises:
        CheckpointError: on every rank, if any has been given such a state.
    """
    problem = None
    for index, one in state["state"].items():
        names = {str(name) for name in one} - {"step"}
        if names and not (MOMENTS <= names <= {*known}):
            problem = (
                f"the state of another optimizer, with {', '.join(sorted(names))} of parameter "
                f"{index}; Adam's are {', '.join(sorted(MOMENTS))}"
            )
            break
    _agree(problem)


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


def problem_of_schedules(saved: Sequence[Any], schedules: Sequence[Any]) -> str | None:
    """Why these schedules cannot go on from their saved states, or None.

    A schedule without a saved state would begin at 0 in the middle of a run, and the rate of a run
    that has left its schedule out would stay as it is.
    """
    for number, (state, own) in enumerate(zip(saved, schedules, strict=True)):
        if not isinstance(state, Mapping | None):
            return f"a {type(state).__name__} as the state of a schedule"
        name = f"lr_schedulers[{number}]"
        if own is None and state is not None:
            return (
                f"the state of a schedule for optimizer {number}, which has none here: add it "
                f"(add_optimizer(optimizer, schedule)). To go on without it, set {name} of the "
                "manager to None after loading"
            )
        if own is not None and state is None:
            return (
                f"no state of a schedule for optimizer {number}, and {type(own).__name__} here "
                f"would begin at 0. To have that, or to begin at a step of your own, set {name} "
                "of the manager to None, load, then put the schedule there"
            )
        if state is not None and _settings(state) != _settings(own.state_dict()):
            return (
                f"the state of another schedule for optimizer {number}, with "
                f"{', '.join(sorted(_settings(state)))}; {type(own).__name__} has "
                f"{', '.join(sorted(_settings(own.state_dict())))}"
            )
    return None


def _settings(state: Mapping[Any, Any]) -> set[str]:
    """Names in a schedule's state, but for those that not all versions of torch have."""
    return {str(name) for name in state if not str(name).startswith("_")} - {"verbose"}


def _problem_of_manager(state: Any, schedules: Sequence[Any]) -> str | None:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    for name in ("optimizers", "lr_schedulers"):
        if not isinstance(state.get(name), list | tuple):
            return f"no list of {name}"
        if len(state[name]) != len(schedules):
            return (
                f"a state that has {len(state[name])} {name}, this manager {len(schedules)}; add "
                "the same ones first"
            )
    problems = [
        *map(_problem_of_optimizer, state["optimizers"]),
        problem_of_schedules(state["lr_schedulers"], schedules),
        _problem_of_counts(state),
        _problem_of_scale(state),
    ]
    return next((problem for problem in problems if problem is not None), None)


def _problem_of_counts(state: Mapping[str, Any]) -> str | None:
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
