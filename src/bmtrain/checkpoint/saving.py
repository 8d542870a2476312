"""save: the whole model in one file, gathered storage by storage, written by rank 0."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import torch

from bmtrain.checkpoint.entries import Entry, entries, names_in_order
from bmtrain.checkpoint.writer import Writer, Writing
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.errors import CheckpointError
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole

Take = Callable[[Entry, torch.Tensor], None]


def save(
    model: torch.nn.Module, file: str | os.PathLike[str], non_blocking: bool = False
) -> Writing:
    """Write all parameters and persistent buffers of `model` as full CPU tensors under plain names.
    Collective.

    Rank 0 writes `<file>.tmp` beside the file and renames it when every byte is on the disk:
    whatever happens, `file` is either the old one or the new one. The values are those of the
    moment of the call. Rank 0 needs host memory for the whole model, the other ranks for one
    storage.

    Args:
        model: any module, its parameters distributed or not.
        file: a name ending in .safetensors gives that format (of tied names one is written, the
            others in its metadata); any other a `torch.save`d dict. Its folder must exist.
        non_blocking: return once the values are copied to host memory; rank 0 writes them in the
            background, and the interpreter waits for it at its end.

    Returns a handle whose `wait()` returns when the file is there. A failure in the background is
    printed at once and raised by `wait()` or by the next save or load.

    Raises:
        CheckpointError: on every rank, if the file cannot be written; the previous one is intact.
    """
    current = world.current("save")
    axis = current.mesh.world
    writer = current.service(Writer)
    writer.settle()
    path = pathlib.Path(os.path.realpath(file))
    attempt(lambda: _check_target(path) if axis.index == 0 else None, axis)
    tensors = collect(model, keep=axis.index == 0)
    return writer.write(path, tensors, background=non_blocking)


def _check_target(path: pathlib.Path) -> None:
    """Find out what cannot work before minutes of gathering."""
    if path.is_dir():
        raise CheckpointError(
            f"cannot save to {path}: it is a folder; expected the name of a file."
        )
    if not path.parent.is_dir():
        raise CheckpointError(
            f"cannot save to {path}: the folder {path.parent} does not exist; create it first."
        )
    if not os.access(path.parent, os.W_OK):
        raise CheckpointError(f"cannot save to {path}: the folder {path.parent} is not writable.")


def visit(
    model: torch.nn.Module, take: Take | None, kind: type[Exception] = CheckpointError
) -> None:
    """Call `take(entry, whole tensor)` for every parameter and persistent buffer, gathering one
    storage at a time. Collective.

    The tensor is a view of a gathered buffer, which is gone when the call is over. Ranks that want
    nothing give None.

    Raises:
        kind: on every rank, at the first storage with which `take` fails on any.
    """
    for module in model.modules():
        if isinstance(module, DistributedModule):
            module.settle_buffers()
    axis = everyone()
    plain: list[Entry] = []
    groups: dict[Storage, list[tuple[Entry, int]]] = {}
    for entry in entries(model):
        if isinstance(entry.tensor, DistributedParameter):
            groups.setdefault(entry.tensor.storage_of, []).append(
                (entry, entry.tensor.index_in_storage)
            )
        else:
            plain.append(entry)
    attempt(lambda: _each(take, ((entry, entry.tensor.detach()) for entry in plain)), axis, kind)
    for storage, members in groups.items():
        step = functools.partial(_take_storage, take, Whole(storage), members)
        attempt(step, axis, kind)
        del step  # and with it the gathered buffer, before the next is gathered


def _take_storage(take: Take | None, whole: Whole, members: Sequence[tuple[Entry, int]]) -> None:
    _each(take, ((entry, whole[index]) for entry, index in members))


def _each(take: Take | None, tensors: Iterator[tuple[Entry, torch.Tensor]]) -> None:
    if take is not None:
        for entry, tensor in tensors:
            take(entry, tensor)


def collect(model: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Copies of all tensors on the CPU, tied names sharing one; empty unless `keep`. Collective."""
    found: dict[str, torch.Tensor] = {}

    def take(entry: Entry, tensor: torch.Tensor) -> None:
        found.update(dict.fromkeys(entry.names, _to_host(tensor)))

    visit(model, take if keep else None)
    return {name: found[name] for name in names_in_order(model)} if keep else {}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
