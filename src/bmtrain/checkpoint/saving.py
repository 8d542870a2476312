"""save: the whole model in one file, gathered storage by storage, written by rank 0."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import torch

from bmtrain.checkpoint.agreement import attempt
from bmtrain.checkpoint.entries import Entry, entries, names_in_order
from bmtrain.checkpoint.writer import Writer, Writing
from bmtrain.errors import CheckpointError
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole


def save(model: torch.nn.Module, file: str | os.PathLike[str], non_blocking: bool = False) -> Writing:
    """Write all parameters and persistent buffers of `model` as full CPU tensors under plain names. Collective.

    Rank 0 writes `<file>.tmp` beside the file and renames it when every byte is on the disk: whatever happens, `file`
    is either the old one or the new one. The values are those of the moment of the call. Rank 0 needs host memory for
    the whole model, the other ranks for one storage.

    Args:
        model: any module, its parameters distributed or not.
        file: a name ending in .safetensors gives that format (of tied names one is written, the others in its
            metadata); any other a `torch.save`d dict. Its folder must exist.
        non_blocking: return once the values are copied to host memory; rank 0 writes them in the background, and the
            interpreter waits for it at its end.

    Returns a handle whose `wait()` returns when the file is there. A failure in the background is printed at once and
    raised by `wait()` or by the next save or load.

    Raises:
        CheckpointError: on every rank, if the file cannot be written; the previous one is intact.
    """
    current = world.current("save")
    axis = current.mesh.world
    writer = current.service(Writer)
    writer.settle()
    path = pathlib.Path(os.path.realpath(file))
    attempt(lambda: _check_target(path) if axis.index == 0 else None, axis)
    tensors = _collect(model, keep=axis.index == 0)
    return writer.write(path, tensors, background=non_blocking)


def _check_target(path: pathlib.Path) -> None:
    """Find out what cannot work before minutes of gathering."""
    if path.is_dir():
        raise CheckpointError(f"cannot save to {path}: it is a folder; expected the name of a file.")
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot save to {path}: the folder {path.parent} does not exist; create it first.")
    if not os.access(path.parent, os.W_OK):
        raise CheckpointError(f"cannot save to {path}: the folder {path.parent} is not writable.")


def _collect(model: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Copies of all tensors on the CPU, tied names sharing one; empty unless `keep`. Collective."""
    for module in model.modules():
        if isinstance(module, DistributedModule):
            module.settle_buffers()
    found: dict[str, torch.Tensor] = {}
    groups: dict[Storage, list[Entry]] = {}
    for entry in entries(model):
        if isinstance(entry.tensor, DistributedParameter):
            groups.setdefault(entry.tensor.storage_of, []).append(entry)
        elif keep:
            copy = _to_host(entry.tensor.detach())
            found.update(dict.fromkeys(entry.names, copy))
    for storage, members in groups.items():
        found.update(_gather(storage, members, keep=keep))
    return {name: found[name] for name in names_in_order(model)} if keep else {}


def _gather(storage: Storage, members: Sequence[Entry], *, keep: bool) -> dict[str, torch.Tensor]:
    """The full tensors of one storage; its gathered buffer is gone when this returns."""
    whole = Whole(storage)
    found: dict[str, torch.Tensor] = {}
    if keep:
        for entry in members:
            if isinstance(entry.tensor, DistributedParameter):
                found.update(dict.fromkeys(entry.names, _to_host(whole[entry.tensor.index_in_storage])))
    return found


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
