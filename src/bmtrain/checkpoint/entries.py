"""The tensors of a model that a checkpoint holds: parameters and persistent buffers, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch

from bmtrain.errors import CheckpointError
from bmtrain.shard.parameter import DistributedParameter


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of the model and its names: more than one if the tensor is tied."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor, before ZeRO sharding and the tensor-parallel split."""
        tensor = self.tensor
        return tuple(
            tensor._tp_original_shape if isinstance(tensor, DistributedParameter) else tensor.shape
        )


def entries(model: torch.nn.Module) -> list[Entry]:
    """Every parameter and persistent buffer in state dict order, each tied tensor once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _named(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [Entry(tuple(found), tensors[key]) for key, found in names.items()]


def selected(found: Sequence[Entry], only: Collection[str] | None) -> list[Entry]:
    """The entries whose first name is in `only`; all if that is None.

    Raises:
        CheckpointError: for a name that is no entry's first.
    """
    if only is None:
        return list(found)
    unknown = sorted(set(only) - {entry.name for entry in found})
    if unknown:
        raise CheckpointError(
            f"no tensor of the model has the name {unknown[0]!r}: expected names of parameters and "
            "persistent buffers, of tied ones the first."
        )
    return [entry for entry in found if entry.name in only]


def names_in_order(model: torch.nn.Module) -> list[str]:
    """Every name in state dict order, all names of a tied tensor included."""
    return [name for name, _ in _named(model)]


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = path + "." if path else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer
