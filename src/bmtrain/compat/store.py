"""`bmtrain.store`: `save` and `load` of checkpoint/, object collectives of distributed/."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from bmtrain.checkpoint import load, save
from bmtrain.checkpoint.saving import collect
from bmtrain.compat.removed import removed
from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis

_WHOLE = (
    "load_state_dict takes whole tensors on every rank, and bmtrain.load(model, file) "
    "reads a file slice by slice."
)
DistributedStateDictWrapper = removed("bmtrain.store.DistributedStateDictWrapper", _WHOLE)
DistributedTensorWrapper = removed("bmtrain.store.DistributedTensorWrapper", _WHOLE)
async_save_to_file = removed(
    "bmtrain.store.async_save_to_file",
    "bmtrain.save(model, file, non_blocking=True) writes in the background.",
)


def allgather_objects(obj: Any, comm: Axis | None = None) -> list[Any]:
    """Gather every rank's `obj`, which must be picklable, in rank order. Collective."""
    current = world.current("allgather_objects")
    axis = _checked(comm, "allgather_objects") if comm is not None else current.mesh.world
    return collectives.gather_objects(obj, axis, "allgather_objects")


allgather_object = allgather_objects


def broadcast_object(obj: Any, comm: Axis, src: int = 0) -> Any:
    """Broadcast `obj`, which must be picklable, from rank `src` of `comm`. Collective.

    Raises:
        ConfigurationError: for a `comm` that is no communicator, or a `src` outside of it.
    """
    world.current("broadcast_object")
    axis = _checked(comm, "broadcast_object")
    if not 0 <= src < axis.size:
        raise ConfigurationError(
            f"broadcast_object got src={src} of a communicator of {axis.size} ranks: "
            f"expected 0 to {axis.size - 1}."
        )
    return collectives.broadcast_object(obj, src, axis, "broadcast_object")


def _save_to_rank0(
    model: torch.nn.Module,
    destination: OrderedDict[str, torch.Tensor] | None = None,
    prefix: str = "",
) -> OrderedDict[str, torch.Tensor]:
    """The full CPU tensors that `save` would write, on rank 0; none elsewhere. Collective.

    Args:
        model: sharded or not.
        destination: gets the tensors and is returned; None is a new dict.
        prefix: put before their names.
    """
    is_first = world.current("_save_to_rank0").rank == 0
    found = collect(model, keep=is_first)
    out = OrderedDict() if destination is None else destination
    out.update({prefix + name: tensor for name, tensor in found.items()})
    return out


def _checked(comm: Axis, what: str) -> Axis:
    if not isinstance(comm, Axis):
        raise ConfigurationError(
            f"{what} got the communicator {comm!r}: expected one of bmtrain.config such as "
            "config['comm']."
        )
    return comm


__all__ = [
    "DistributedStateDictWrapper",
    "DistributedTensorWrapper",
    "allgather_object",
    "allgather_objects",
    "async_save_to_file",
    "broadcast_object",
    "load",
    "save",
]
