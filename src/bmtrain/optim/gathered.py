"""Optimizer state as whole tensors, independent of the world size, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import CheckpointError
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.storage import Storage

States = dict[int, dict[str, Any]]


def gather_states(params: Sequence[torch.nn.Parameter], states: States) -> States:
    """`states` by parameter number, with every element-wise slice made whole: CPU tensors of the parameter's shape. Collective."""
    whole: States = {index: dict(state) for index, state in states.items()}
    by_storage: dict[Storage, list[int]] = {}
    for index, param in enumerate(params):
        if isinstance(param, DistributedParameter) and index in states:
            by_storage.setdefault(param.storage_of, []).append(index)
        elif index in states:
            whole[index] = {
                name: value.detach().cpu().clone() if _is_tensor(value) else value for name, value in states[index].items()
            }
    for storage, members in by_storage.items():
        names = dict.fromkeys(name for index in members for name, value in states[index].items() if _is_slice(params[index], value))
        for name in names:
            _gather_one(storage, [index for index in members if name in states[index]], name, params, states, whole)
    return whole


def _gather_one(
    storage: Storage, members: list[int], name: str, params: Sequence[torch.nn.Parameter], states: States, whole: States
) -> None:
    """One state of all members of a storage travels as one flat buffer."""
    like = states[members[0]][name]
    shard = torch.zeros(storage.layout.shard_numel, dtype=like.dtype, device=storage.shard.device)
    slots = {index: _index_of(params[index]) for index in members}
    for index, slot in slots.items():
        piece = storage.piece(slot)
        shard[piece.begin : piece.end].copy_(states[index][name])
    axis = storage.engine.axis
    full = collectives.all_gather(shard, axis).view(-1) if axis.size > 1 else shard
    for index, slot in slots.items():
        place = storage.layout.slots[slot]
        whole[index][name] = full[place.offset : place.end].view(place.shape).cpu().clone()


def slice_states(params: Sequence[torch.nn.Parameter], states: States) -> States:
    """The inverse of `gather_states` for this rank.

    Raises:
        CheckpointError: naming the parameter's number and both shapes, when a state does not fit its parameter.
    """
    local: States = {}
    for index, state in states.items():
        param = params[index]
        if not isinstance(param, DistributedParameter):
            local[index] = dict(state)
            continue
        local[index] = {}
        for name, value in state.items():
            if not _is_tensor(value) or (value.dim() == 0 and param._original_shape != torch.Size([])):
                local[index][name] = value
                continue
            if value.shape != param._original_shape:
                raise CheckpointError(
                    f"optimizer state {name!r} of parameter {index} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(param._original_shape)}: the state belongs to another model."
                )
            local[index][name] = param.storage_of.slice_of(param.index_in_storage, value)
    return local


def check_groups(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    """CheckpointError unless the saved groups have as many parameters as the optimizer's."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        raise CheckpointError("this is no optimizer state: expected a dict with 'state' and 'param_groups'.")
    ours, saved = [len(g["params"]) for g in groups], [len(g["params"]) for g in state_dict["param_groups"]]
    if ours != saved:
        raise CheckpointError(
            f"the saved optimizer has groups of {saved} parameters, this one of {ours}: make the optimizer with the same groups."
        )


def _index_of(param: torch.nn.Parameter) -> int:
    if not isinstance(param, DistributedParameter):
        raise TypeError("only distributed parameters have a slot")
    return param.index_in_storage


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_slice(param: torch.nn.Parameter, value: object) -> bool:
    """State that goes element by element with the parameter, as opposed to a step count."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == param.numel()
