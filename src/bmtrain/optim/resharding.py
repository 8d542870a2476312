"""Optimizer states that leave a run and come back: full tensors, and this rank's slices of them.

A saved state may be full tensors, or slices cut by this library or by BMTrain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import CheckpointError
from bmtrain.optim.flat import parameters_of
from bmtrain.optim.saved import FileState, described, difference
from bmtrain.runtime import world
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole

States = dict[int, dict[str, Any]]
# BMTrain's name for the fp32 weights of half-precision parameters, and the name used here.
NAMES = {"_param_fp32": "master"}
# 0-dim states of torch's optimizers that are never element-wise, even for parameters of one
# element.
NUMBERS = ("step", "mu_product", "eta", "mu")

# Of exchanges between the ranks.
_WHAT = "a state of an optimizer"

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
                piece = storage.piece(slots[index])
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
    own = {index: {NAMES.get(n, n): v for n, v in state.items()} for index, state in states.items()}
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
            mine = param.cut.own_of_whole(mine.reshape(param._tp_original_shape))
        else:
            own_part = mine.reshape(-1).to("cpu", value.dtype)
            whole = collectives.all_gather_rows(own_part, sizes, storage.axis)
            mine = storage.slice_of(slot, whole)
        out[name] = Sharded(mine, param.cut)
    return out


def _raise_first(*errors: str) -> None:
    for error in filter(None, errors):
        raise CheckpointError(error)
