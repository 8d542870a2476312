"""Whether what a file has held is a state of an optimizer or a manager, and the same on all ranks.

All is looked at before anything is changed.
"""

from __future__ import annotations

import dataclasses
import operator
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from bmtrain.distributed.agreement import Figures, agree, are_near, look, told_apart
from bmtrain.errors import CheckpointError
from bmtrain.kernels.bf16 import are_neighbours
from bmtrain.runtime import world
from bmtrain.runtime.arguments import AMOUNT, COUNT, Rule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of

# In the state of a manager, beside optimizers' states, which may be slices.
OF_ALL_RANKS = (
    *("lr_schedulers", "loss_scale", "loss_scale_enabled", "loss_scale_state"),
    *("num_steps", "num_skipped"),
)
MOMENTS = {"exp_avg", "exp_avg_sq"}
# Elements of a whole tensor that are compared exactly: so many consecutive ones at so many places.
# The whole state of a large model is more than a CPU can look at in the time of reading it.
PLACES, LENGTH = 64, 4096
_SCALE = Rule("a loss scale", lambda value: AMOUNT.holds(value) and value < 2**200)


def check_manager_state(state: Any, schedules: Sequence[Any]) -> None:
    """Refuse what is no state of an OptimManager, before anything is changed. Collective.

    Args:
        schedules: of the manager, one for each optimizer; None where that has none.

    Raises:
        CheckpointError: on every rank, if any has been given such a state, or another one than the
            others; states of optimizers are not compared here.
    """
    _agree(_problem_of_manager(state, schedules))
    text = "; ".join(f"{name} {described(state.get(name))}" for name in OF_ALL_RANKS)
    axis = world.current("load_state_dict").mesh.world
    told = told_apart(text, axis, "OptimManager.load_state_dict")
    if told is not None:
        raise CheckpointError(
            f"load_state_dict got states that differ between ranks ({told}): give all of them the "
            "same, that of one file for example."
        )


def check_adam_state(state: Any, known: Collection[str]) -> None:
    """Refuse what is no state of an optimizer, and the state of another one, of which Adam would
    take what it knows, before anything is changed. Collective.

    Args:
        known: names of a parameter's states that Adam can take over.

    Raises:
        CheckpointError: on every rank, if any has been given such a state.
    """
    problem = _problem_of_optimizer(state)
    for index, one in state["state"].items() if problem is None else ():
        names = {str(name) for name in one} - {"step"}
        if names and not (MOMENTS <= names <= {*known}):
            problem = (
                f"the state of another optimizer, with {', '.join(sorted(names))} of parameter "
                f"{index}; Adam's are {', '.join(sorted(MOMENTS))}"
            )
            break
    _agree(problem)


def check_masters(params: Sequence[torch.Tensor], states: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse masters of bf16 weights that are not those of the weights. Collective; before anything
    is changed.

    Args:
        params: of the optimizer.
        states: to be loaded, by the parameter's index: this rank's slices.

    Raises:
        CheckpointError: on every rank, if any rank has such masters.
    """
    foreign = [
        index
        for index, state in states.items()
        if state.get("step")
        and "master" in state
        and params[index].dtype == torch.bfloat16
        and not are_neighbours(
            local_of(state["master"]).reshape(-1), local_of(params[index].detach()).reshape(-1)
        )
    ]
    text = None
    if foreign:
        text = (
            f"load_state_dict got master weights of parameter {foreign[0]} that its weights are "
            "not rounded from, and master_weights='split' keeps their remainder to the weights: "
            "load the weights first, then the optimizer's state, or use master_weights='fp32'."
        )
    agree(text, world.current("load_state_dict").mesh.world)


def _agree(problem: str | None) -> None:
    if problem is not None:
        problem = f"load_state_dict got {problem}: expected what state_dict() returned."
    agree(problem, world.current("load_state_dict").mesh.world)


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
                f"(add_optimizer(optimizer, schedule)). To continue without it, set {name} of the "
                "manager to None after loading"
            )
        if own is not None and state is None:
            return (
                f"no state of a schedule for optimizer {number}, and {type(own).__name__} here "
                f"would begin at 0. To have that, or to begin at a step of your own, set {name} "
                "of the manager to None, load, then put the schedule there"
            )
        if state is not None:
            # but for names that not all versions of torch have
            before, now = (
                {str(key) for key in each if not str(key).startswith("_")} - {"verbose"}
                for each in (state, own.state_dict())
            )
            if before != now:
                return (
                    f"the state of another schedule for optimizer {number}, with "
                    f"{', '.join(sorted(before))}; {type(own).__name__} has "
                    f"{', '.join(sorted(now))}"
                )
    return None


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
    problems = [_problem_of_numbers(state), *map(_problem_of_optimizer, state["optimizers"])]
    problems.append(problem_of_schedules(state["lr_schedulers"], schedules))
    return next(filter(None, problems), None)


def _problem_of_numbers(state: Mapping[str, Any]) -> str | None:
    """Of counts, and of the loss scale: a number, as BMTrain has it, or a LossScale's state."""
    for name in ("num_steps", "num_skipped"):
        if not COUNT.holds(state.get(name, 0)):
            return f"{name}={state[name]!r}"
    for name in ("loss_scale", "loss_scale_state"):
        saved = state.get(name)
        numbers = saved if isinstance(saved, Mapping) else {"value": saved, "good_steps": 0}
        are_known = set(numbers) == {"value", "good_steps"}
        if not are_known or not all(x is None or _SCALE.holds(x) for x in numbers.values()):
            return f"a {name} of {saved!r}"
    return None


def _problem_of_optimizer(state: Any) -> str | None:
    try:
        for group in state["param_groups"]:
            list(group["params"])
        for index, one in state["state"].items():
            operator.index(index)
            one.items()
    except (TypeError, LookupError, AttributeError) as error:
        return f"no optimizer state, which has 'state' and 'param_groups' ({error!r})"
    return None


@dataclasses.dataclass(frozen=True)
class FileState:
    """What one rank's file holds of an element-wise state.

    Attributes:
        shape, dtype: of it.
        digest: of a whole tensor of a sharded parameter, the same on all ranks bit by bit.
        figures: of the tensor of an ordinary parameter, whose replicas may differ by rounding.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int | None = None
    figures: Figures | None = None

    @classmethod
    def of(cls, value: torch.Tensor, param: torch.nn.Parameter) -> FileState:
        """Of a state of this parameter."""
        shape, dtype = tuple(value.shape), value.dtype
        if not isinstance(param, DistributedParameter):
            return cls(shape, dtype, figures=look(value))
        is_whole = value.numel() == param._tp_original_shape.numel()
        return cls(shape, dtype, digest=_digest(value) if is_whole else None)

    @property
    def numel(self) -> int:
        """Elements of it."""
        return torch.Size(self.shape).numel()


def _digest(x: torch.Tensor) -> int:
    flat = x.detach().reshape(-1)
    if flat.numel() > PLACES * LENGTH:
        step = flat.numel() // PLACES
        flat = flat[: step * PLACES].view(PLACES, step)[:, -LENGTH:].reshape(-1)
    return zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def difference(params: Sequence[torch.nn.Parameter], everyone: Sequence[Mapping[int, Any]]) -> str:
    """Which states ranks have been given differently; empty if none.

    Args:
        everyone: for each rank its states by the parameter's index, with `FileState` in the place
            of element-wise tensors. Those of a sharded parameter are all whole, or slices, which
            differ; a rank that has no elements of it may have any step count, and none of a
            parameter of another stage.
    """
    for index, param in enumerate(params):
        states = [found.get(index, {}) for found in everyone]
        if isinstance(param, DistributedParameter):
            if param.storage_of.placement.stage is not None:
                states = [state for state in states if state]
            with_elements = [
                state
                for state in states
                if any(isinstance(x, FileState) and x.numel for x in state.values())
            ]
            states = with_elements or states
        for name in dict.fromkeys(name for state in states for name in state):
            values = [state.get(name) for state in states]
            if any(not _is_same(values[0], value) for value in values[1:]):
                return (
                    f"optimizer state {name!r} of parameter {index} differs between ranks: give "
                    "all of them the same, one file for example."
                )
    return ""


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, FileState) and isinstance(other, FileState):
        if one.figures is not None and other.figures is not None:
            return one.shape == other.shape and are_near(one.figures, other.figures, one.dtype)
        return one.digest == other.digest
    return type(one) is type(other) and described(one) == described(other)


def described(state: Any) -> str:
    """Numbers, texts and tensors of a state, in containers: the same text for the same values.

    Other objects, a schedule's functions for example, count by their type.
    """
    return "".join(_described(state))


def _described(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield f"{key!r}:"
            yield from _described(value[key])
            yield ","
    elif isinstance(value, list | tuple):
        yield "["
        for member in value:
            yield from _described(member)
            yield ","
        yield "]"
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {_digest(value)}"
    elif isinstance(value, bool | int | float | str | bytes | None):
        yield repr(value)
    else:
        yield type(value).__name__
