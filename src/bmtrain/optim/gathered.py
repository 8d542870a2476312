"""Optimizer state as full tensors, independent of the world size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole

States = dict[int, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Placeholder for a state that is element-wise with its parameter."""

    dtype: torch.dtype


def gather_states(params: Sequence[torch.nn.Parameter], states: States) -> States:
    """`states` by parameter index, with every element-wise slice gathered. Collective.

    The results are CPU tensors of the parameter's shape.
    """
    whole: States = {}
    by_storage: dict[Storage, dict[int, int]] = {}
    for index, param in enumerate(params):
        if isinstance(param, DistributedParameter):
            by_storage.setdefault(param.storage_of, {})[index] = param.index_in_storage
        elif index in states:
            whole[index] = {name: _copied(value) for name, value in states[index].items()}
    for storage, slots in by_storage.items():
        described = _described(storage, slots, states)
        for index, values in described.items():
            whole[index] = {
                name: value for name, value in values.items() if not isinstance(value, _Slice)
            }
        names = {
            name: value.dtype
            for values in described.values()
            for name, value in values.items()
            if isinstance(value, _Slice)
        }
        for name, dtype in names.items():
            members = {
                index: slots[index]
                for index, values in described.items()
                if isinstance(values.get(name), _Slice)
            }
            for index, value in _gather_one(storage, members, name, dtype, states):
                whole[index][name] = value
    return dict(sorted(whole.items()))


def _described(storage: Storage, slots: Iterable[int], states: States) -> States:
    """A storage's states with placeholders for slices, broadcast from the stage that has it."""
    own = {
        index: {
            name: _Slice(v.dtype) if isinstance(v, Sharded) else _copied(v)
            for name, v in states[index].items()
        }
        for index in slots
        if index in states
    }
    stage = storage.placement.stage
    found: States = (
        own
        if stage is None
        else collectives.broadcast_object(own, stage, storage.engine.mesh.pipe, "state_dict")
    )
    return found


def _gather_one(
    storage: Storage, members: dict[int, int], name: str, dtype: torch.dtype, states: States
) -> Iterator[tuple[int, torch.Tensor]]:
    """Gather one state of the parameters `members` of a storage as one flat buffer.

    Yields (parameter index, full CPU tensor).
    """
    shard = torch.zeros(storage.shard.numel(), dtype=dtype, device=storage.shard.device)
    if storage.is_here:
        for index, slot in members.items():
            piece = storage.piece(slot)
            shard[piece.begin : piece.end].copy_(states[index][name].local)
    whole = Whole(storage, shard)
    for index, slot in members.items():
        yield index, whole[slot].cpu().clone()


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def local_values(states: States) -> States:
    """The same states with this rank's 1-D slices in place of sharded tensors."""
    return {
        index: {
            name: value.local if isinstance(value, Sharded) else value
            for name, value in state.items()
        }
        for index, state in states.items()
    }
