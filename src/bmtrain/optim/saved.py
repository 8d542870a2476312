"""States of optimizers and managers that leave a run and come back: full tensors, and this rank's
slices of them, cut by this library or by BMTrain.

All of a saved state is looked at, on all ranks, before anything is changed.
"""

from __future__ import annotations

import dataclasses
import operator
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import Figures, agree, are_near, look, told_apart
from bmtrain.errors import CheckpointError
from bmtrain.kernels.bf16 import are_neighbours
from bmtrain.optim.flat import parameters_of
from bmtrain.runtime import world
from bmtrain.runtime.arguments import AMOUNT, COUNT, Rule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded
from bmtrain.shard.slices import local_of
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole

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
States = dict[int, dict[str, Any]]
# BMTrain's name for the fp32 weights of half-precision parameters, and the name used here.
THEIR_NAMES = {"_param_fp32": "master"}
# 0-dim states of torch's optimizers that are never element-wise, even for parameters of one
# element.
NUMBERS = ("step", "mu_product", "eta", "mu")

# Of exchanges between the ranks.
_WHAT = "a state of an optimizer"


def check_manager_state(
    state: Any, schedules: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Refuse what is no state of an OptimManager, before anything is changed. Collective.

    Args:
        schedules: of the manager, one for each optimizer; None where that has none.
        optimizers: of the manager.

    Raises:
        CheckpointError: on every rank, if any has been given such a state, or another one than the
            others; states of optimizers are not compared here.
    """
    _agree(_problem_of_manager(state, schedules, optimizers))
    text = "; ".join(f"{name} {described(state.get(name))}" for name in OF_ALL_RANKS)
    axis = world.current("load_state_dict").mesh.world
    told = told_apart(text, axis, "OptimManager.load_state_dict")
    if told is not None:
        raise CheckpointError(
            f"load_state_dict got states that differ between ranks ({told}): give all of them the "
            "same, that of one file for example."
        )


def check_adam_state(state: Any, known: Collection[str], optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is no state of an optimizer, and the state of another one, of which Adam would
    take what it knows, before anything is changed. Collective.

    Args:
        known: names of a parameter's states that Adam can take over.
        optimizer: this Adam.

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
    _agree(problem or problem_of_settings([state], [optimizer]))


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


def problem_of_settings(
    saved: Sequence[Mapping[str, Any]], optimizers: Sequence[torch.optim.Optimizer]
) -> str | None:
    """Why these optimizers cannot go on with the saved settings of groups, or None.

    Torch's would take them, and miss their own in the next step. What is None or a flag torch adds
    to the settings of its earlier versions, and Adam of ours has `hold_steps` alone. Programs and
    schedules add names of their own to groups: they tell of no other optimizer.
    """
    for number, (state, own) in enumerate(zip(saved, optimizers, strict=True)):
        needed = {
            name for name, value in own.defaults.items() if type(value) in (int, float, tuple)
        }
        known = {*own.defaults, "initial_lr"}.union(*own.param_groups)
        for group in state["param_groups"]:
            missing = needed - {*group, "hold_steps"}
            if missing and group.keys() - known:
                return (
                    f"the state of another optimizer for optimizer {number}, without "
                    f"{', '.join(sorted(missing))} of {type(own).__name__}; make the one that was "
                    "saved, or load the weights alone"
                )
    return None


def _problem_of_manager(
    state: Any, schedules: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> str | None:
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
    problem = next(filter(None, problems), None)
    return problem or problem_of_settings(state["optimizers"], optimizers)


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
    if isinstance(state, Mapping):
        return "".join(f"{key!r}:{described(state[key])}," for key in sorted(state, key=repr))
    if isinstance(state, list | tuple):
        return f"[{''.join(f'{described(member)},' for member in state)}]"
    if isinstance(state, torch.Tensor):
        return f"{state.dtype} {tuple(state.shape)} {_digest(state)}"
    if isinstance(state, bool | int | float | str | bytes | None):
        return repr(state)
    return type(state).__name__


NOTHING = FileState((0,), torch.float32)


def local_values(states: States) -> States:
    """The same states with this rank's 1-D slices in place of sharded tensors."""
    return {
        index: {
            name: value.local if isinstance(value, Sharded) else value
            for name, value in state.items()
        }
        for index, state in states.items()
    }


def gather_states(params: Sequence[torch.nn.Parameter], states: States) -> States:
    """`states` by parameter index, with every element-wise slice gathered. Collective.

    The results are CPU tensors of the parameter's shape.
    """
    # What is no slice is copied; of a slice the dtype stays, until it is gathered.
    whole: States = {
        index: {
            name: value.dtype
            if isinstance(value, Sharded)
            else value.detach().cpu().clone()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }
        for index, state in states.items()
    }
    by_storage: dict[Storage, dict[int, int]] = {}
    for index, param in enumerate(params):
        if isinstance(param, DistributedParameter):
            by_storage.setdefault(param.storage_of, {})[index] = param.index_in_storage
    for storage, slots in by_storage.items():
        stage = storage.placement.stage
        if stage is not None:  # only its ranks have states
            own = {index: whole.pop(index) for index in slots if index in whole}
            whole |= collectives.broadcast_object(
                own, stage, storage.engine.mesh.pipe, "state_dict"
            )
        # One flat buffer for each name: the dtypes of one are the same.
        members: dict[str, list[int]] = {}
        for index in slots:
            for name, value in whole.get(index, {}).items():
                if isinstance(value, torch.dtype):
                    members.setdefault(name, []).append(index)
        for name, indices in members.items():
            dtype = whole[indices[-1]][name]
            shard = torch.zeros(storage.shard.numel(), dtype=dtype, device=storage.shard.device)
            for index in indices if storage.is_here else ():
                piece = storage.cuts[slots[index]].piece
                shard[piece.begin : piece.end].copy_(states[index][name].local)
            gathered = Whole(storage, shard)
            for index in indices:
                whole[index][name] = gathered[slots[index]].cpu().clone()
    return dict(sorted(whole.items()))


def local_states(groups: list[dict[str, Any]], saved: dict[str, Any]) -> States:
    """This rank's state by parameter index, from `saved`, an optimizer's state dict. Collective.

    A state may be full, in the parameter's shape or flat, or a 1-D slice, where each rank passes
    its own. Slices are consecutive parts of the flattened tensor in rank order; their bounds may be
    this library's or others, such as BMTrain's.

    Args:
        groups: of the optimizer.
        saved: that has been checked (see saved.py).

    Raises:
        CheckpointError: on every rank, naming the parameter's index, what each rank has of it and
            the remedy; also for states that should be the same on all ranks and are not.
    """
    axis = world.current("load_state_dict").mesh.world
    params = parameters_of(groups)
    ours, theirs = (
        [len(group["params"]) for group in each] for each in (groups, saved["param_groups"])
    )
    error = ""
    if ours != theirs:
        error = (
            f"the saved optimizer has groups of {theirs} parameters, this one of {ours}: make the "
            "optimizer with the same groups."
        )
    states = {} if error else local_values(saved["state"])
    own = {
        index: {THEIR_NAMES.get(n, n): v for n, v in state.items()}
        for index, state in states.items()
    }
    # what this rank's file holds, without the values of element-wise tensors
    outline = {
        index: {
            name: FileState.of(value, params[index])
            if _is_element_wise(params[index], name, value)
            else value
            for name, value in state.items()
        }
        for index, state in own.items()
    }
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]
    ]
    found = collectives.gather_objects((error, outline, described(settings)), axis, _WHAT)
    errors, everyone, texts = zip(*found, strict=True)
    _raise_first(*errors)
    slots = {
        index: param
        for index, param in enumerate(params)
        if isinstance(param, DistributedParameter)
    }
    problems = [_misfit(index, param, everyone) for index, param in slots.items()]
    problem = next(filter(None, problems), "")
    _raise_first(*collectives.gather_objects(problem, axis, _WHAT), difference(params, everyone))
    if len(set(texts)) > 1:
        _raise_first(
            "the settings of parameter groups (param_groups) differ between ranks: give all of "
            "them the same state."
        )
    local = {index: dict(state) for index, state in own.items() if index not in slots}
    for index, param in slots.items():
        on_axis = [everyone[rank].get(index, {}) for rank in param.storage_of.axis.ranks]
        state = _local_state(param, own.get(index, {}), on_axis)
        if state:
            local[index] = state
    return dict(sorted(local.items()))


def _is_element_wise(param: torch.nn.Parameter, name: str, value: object) -> bool:
    if not isinstance(value, torch.Tensor) or name in NUMBERS:
        return False
    whole = param._tp_original_shape if isinstance(param, DistributedParameter) else param.shape
    if (
        value.dim() == len(whole) > 1
        and value.shape != whole
        and all(a in (1, b) for a, b in zip(value.shape, whole, strict=True))
    ):
        # row or column statistics, as in Adafactor: full on every rank
        return False
    return value.dim() > 0 or whole == torch.Size([])


def _misfit(index: int, param: DistributedParameter, everyone: Sequence[States]) -> str:
    """Why the states of a parameter cannot be used; empty if they can."""
    if not param.storage_of.is_here:
        return ""
    whole, part = param._tp_original_shape, param._original_shape.numel()
    states = [everyone[rank].get(index, {}) for rank in param.storage_of.axis.ranks]
    for name in dict.fromkeys(
        name for state in states for name, value in state.items() if isinstance(value, FileState)
    ):
        found = [state.get(name, NOTHING) for state in states]
        for one in found:
            if len(one.shape) > 1 and one.shape != tuple(whole):
                return (
                    f"optimizer state {name!r} of parameter {index} has shape {one.shape}, the "
                    f"parameter {tuple(whole)}: the state belongs to another model."
                )
        sizes = [one.numel for one in found]
        if sum(sizes) != part and set(sizes) != {whole.numel()}:
            return (
                f"optimizer state {name!r} of parameter {index} has {sizes} elements on the ranks: "
                f"expected {part} in all, or all {whole.numel()} on each. It is the state of "
                "another world size or model: load it with as many processes as saved it, or save "
                "it there with state_dict(gather=True) (OptimManager: gather_opt=True), which "
                "fits any number."
            )
    return ""


def _local_state(
    param: DistributedParameter, own: dict[str, Any], found: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The state of one parameter on this rank.

    Args:
        own: this rank's.
        found: the outline of what each rank of the parameter's axis has.
    """
    storage, slot, out = param.storage_of, param.index_in_storage, dict[str, Any]()
    # A rank with no elements of a parameter may have no state of it, not even the step count.
    outline = {name: value for state in reversed(found) for name, value in state.items()}
    for name, value in outline.items():
        if not isinstance(value, FileState):
            out[name] = own.get(name, value)
            continue
        mine = own.get(name, torch.empty(0, dtype=value.dtype, device="cpu"))
        sizes = [state.get(name, NOTHING).numel for state in found]
        if not storage.is_here:
            mine = mine.reshape(-1)[:0]
        elif sizes == [storage.layout.piece(slot, at).numel for at in range(storage.axis.size)]:
            mine = mine.reshape(-1)
        elif set(sizes) == {param._tp_original_shape.numel()}:
            mine = param.cut.own(param.cut.part(mine.reshape(param._tp_original_shape)))
        else:
            own_part = mine.reshape(-1).to("cpu", value.dtype)
            whole = collectives.all_gather_rows(own_part, sizes, storage.axis)
            mine = storage.cuts[slot].own(whole)
        out[name] = Sharded(mine, param.cut)
    return out


def _raise_first(*errors: str) -> None:
    for error in filter(None, errors):
        raise CheckpointError(error)
