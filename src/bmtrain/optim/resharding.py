"""Optimizer state from a checkpoint, cut to this rank's slices.

The saved state may be full tensors, or slices cut by this library or by BMTrain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import CheckpointError
from bmtrain.optim.alike import Held, described, difference
from bmtrain.optim.clip import parameters_of
from bmtrain.optim.gathered import States, local_values
from bmtrain.runtime import world
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded

# BMTrain's name for the fp32 weights of half-precision parameters, and the name used here.
NAMES = {"_param_fp32": "master"}
# 0-dim states of torch's optimizers that are never element-wise, even for parameters of one
# element.
NUMBERS = ("step", "mu_product", "eta", "mu")

# Of exchanges between the ranks.
_WHAT = "a state of an optimizer"

NOTHING = Held((0,), torch.float32)


def local_states(groups: list[dict[str, Any]], saved: dict[str, Any]) -> States:
    """This rank's state by parameter index, from `saved`, an optimizer's state dict. Collective.

    A state may be full, in the parameter's shape or flat, or a 1-D slice, where each rank passes
    its own. Slices are consecutive parts of the flattened tensor in rank order; their bounds may be
    this library's or others, such as BMTrain's.

    Raises:
        CheckpointError: on every rank, naming the parameter's index, what each rank has of it and
            the remedy; also for states that should be the same on all ranks and are not.
    """
    axis = world.current("load_state_dict").mesh.world
    params = parameters_of(groups)
    error = _wrong_groups(groups, saved)
    states = {} if error else local_values(saved["state"])
    own = {index: {NAMES.get(n, n): v for n, v in state.items()} for index, state in states.items()}
    everyone = collectives.gather_objects(error or _described(params, own), axis, _WHAT)
    _raise_first([found for found in everyone if isinstance(found, str)])
    slots = {
        index: param
        for index, param in enumerate(params)
        if isinstance(param, DistributedParameter)
    }
    problems = [text for index, param in slots.items() if (text := _misfit(index, param, everyone))]
    _raise_first(
        [text for texts in collectives.gather_objects(problems, axis, _WHAT) for text in texts]
    )
    _raise_first([text for text in [difference(params, everyone)] if text])
    settings = collectives.gather_objects(described(_settings(saved)), axis, _WHAT)
    if len(set(settings)) > 1:
        raise CheckpointError(
            "the settings of parameter groups (param_groups) differ between ranks: give all of "
            "them the same state."
        )
    local = {index: dict(state) for index, state in own.items() if index not in slots}
    for index, param in slots.items():
        state = _local_state(
            param, own.get(index, {}), [found.get(index, {}) for found in _on_axis(param, everyone)]
        )
        if state:
            local[index] = state
    return dict(sorted(local.items()))


def _described(params: Sequence[torch.nn.Parameter], states: States) -> States:
    """The states with a `Held` in place of every element-wise tensor."""
    return {
        index: {
            name: Held.of(v, params[index]) if _goes_along(params[index], name, v) else v
            for name, v in state.items()
        }
        for index, state in states.items()
    }


def _goes_along(param: torch.nn.Parameter, name: str, value: object) -> bool:
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


def _on_axis(param: DistributedParameter, everyone: Sequence[States]) -> list[States]:
    """The states held by the ranks over which the parameter is sharded."""
    return [everyone[rank] for rank in param.storage_of.axis.ranks]


def _misfit(index: int, param: DistributedParameter, everyone: Sequence[States]) -> str:
    """Why the states of a parameter cannot be used; empty if they can."""
    if not param.storage_of.is_here:
        return ""
    whole, part = param._tp_original_shape, param._original_shape.numel()
    states = [found.get(index, {}) for found in _on_axis(param, everyone)]
    for name in {
        name: None for state in states for name, value in state.items() if isinstance(value, Held)
    }:
        held = [state.get(name, NOTHING) for state in states]
        for one in held:
            if len(one.shape) > 1 and one.shape != tuple(whole):
                return (
                    f"optimizer state {name!r} of parameter {index} has shape "
                    f"{one.shape}, the parameter {tuple(whole)}: the state "
                    "belongs to another model."
                )
        sizes = [one.numel for one in held]
        if sum(sizes) != part and set(sizes) != {whole.numel()}:
            return (
                f"optimizer state {name!r} of parameter {index} has {sizes} elements "
                f"on the ranks: expected {part} in all, or all "
                f"{whole.numel()} on each. It is the state of another world size or "
                "model: load it with as many processes as "
                "saved it, or save it there with state_dict(gather=True) "
                "(OptimManager: gather_opt=True), which fits any number."
            )
    return ""


def _local_state(
    param: DistributedParameter, own: dict[str, Any], held: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The state of one parameter on this rank; `held` is that of each rank of its axis."""
    # A rank with no elements of a parameter may have no state of it, not even the step count.
    described = {name: value for state in reversed(held) for name, value in state.items()}
    out: dict[str, Any] = {}
    for name, value in described.items():
        if isinstance(value, Held):
            ranks = [state.get(name, NOTHING) for state in held]
            values = _own_slice(
                param,
                own.get(name, torch.empty(0, dtype=value.dtype, device="cpu")),
                ranks,
                value.dtype,
            )
            out[name] = Sharded(values, param.cut)
        else:
            out[name] = own.get(name, value)
    return out


def _own_slice(
    param: DistributedParameter, value: torch.Tensor, held: Sequence[Held], dtype: torch.dtype
) -> torch.Tensor:
    """This rank's 1-D slice of one state, of which its file holds `value`."""
    storage, slot = param.storage_of, param.index_in_storage
    if not storage.is_here:
        return value.reshape(-1)[:0]
    sizes = [one.numel for one in held]
    if sizes == [storage.layout.piece(slot, place).numel for place in range(storage.axis.size)]:
        return value.reshape(-1)
    if set(sizes) == {param._tp_original_shape.numel()}:
        return storage.slice_of_whole(slot, value.reshape(param._tp_original_shape))
    padded = torch.zeros(max(sizes), dtype=dtype, device="cpu")
    padded[: value.numel()] = value.reshape(-1)
    # Sent as bytes: not every backend supports every dtype.
    rows = (
        collectives.all_gather(padded.view(torch.uint8), storage.axis)
        .view(dtype)
        .view(len(sizes), -1)
    )
    return storage.slice_of(
        slot, torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
    )


def _settings(saved: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in saved["param_groups"]
    ]


def _wrong_groups(groups: list[dict[str, Any]], saved: Any) -> str | None:
    """Why the saved groups do not match the optimizer's, or None."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= set(saved):
        return "this is no optimizer state: expected a dict with 'state' and 'param_groups'."
    ours, theirs = (
        [len(group["params"]) for group in groups],
        [len(group["params"]) for group in saved["param_groups"]],
    )
    if ours != theirs:
        return (
            f"the saved optimizer has groups of {theirs} parameters, this one of "
            f"{ours}: make the optimizer with the same groups."
        )
    return None


def _raise_first(errors: Sequence[str]) -> None:
    if errors:
        raise CheckpointError(errors[0])
