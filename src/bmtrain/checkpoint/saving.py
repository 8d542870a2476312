"""save: the whole model in one file, gathered storage by storage, written by rank 0."""

from __future__ import annotations

import functools
import io
import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from bmtrain.checkpoint.entries import Entry, entries, extra_states, named_tensors, selected
from bmtrain.checkpoint.writer import Writer, Writing, write_file
from bmtrain.checkpoint.writing import as_bytes
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.errors import CheckpointError
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.storage import Storage
from bmtrain.shard.whole import Whole

Take = Callable[[Entry, torch.Tensor], None]


def save(
    model: torch.nn.Module,
    file_name: str | os.PathLike[str],
    non_blocking: bool = False,
    *,
    only: Collection[str] | None = None,
) -> Writing:
    """Save all parameters and persistent buffers of `model` as full CPU tensors, and the values of
    `get_extra_state`. Collective.

    Rank 0 writes `<file_name>.tmp`, flushes it to disk and renames it: after a crash at any point,
    `file_name` is either the old checkpoint or the new one, both complete. The values are those of
    the call. Rank 0 needs host memory for the full model. Every rank needs memory for one
    gathered storage at a time.

    Args:
        model: any module, its parameters distributed or not.
        file_name: a name ending in .safetensors selects that format (a tied tensor is written under
            one name, the others go into the metadata); any other name gives a dict of `torch.save`.
            The folder must exist.
        non_blocking: return as soon as the values are in host memory. Rank 0 writes them in a
            background thread, which the interpreter joins at exit.
        only: names of the tensors to save; None for all, and for what `get_extra_state` returns. Of
            a tied tensor the first name counts, and all are written.

    Returns a handle whose `wait()` returns once the file is complete. A failure in the background
    is printed at once, and raised by `wait()` or by the next save or load.

    Raises:
        CheckpointError: on every rank, if the file cannot be written, for a name in `only` that no
            tensor has, or for extra states that no load would read; the previous file is intact.
    """
    current = world.current("save")
    axis = current.mesh.world
    writer = current.service(Writer)
    writer.settle()
    path = pathlib.Path(os.path.realpath(file_name))
    attempt(lambda: _check_target(path) if axis.index == 0 else None, axis)
    tensors: dict[str, Any] = collect(model, keep=axis.index == 0, only=only)

    def take_extra() -> None:
        modules = extra_states(model) if only is None else {}
        states = {name: module.get_extra_state() for name, module in modules.items()}
        if states and axis.index == 0:  # copies, of what `load` takes
            file = io.BytesIO(as_bytes(states))
            tensors.update(torch.load(file, map_location="cpu", weights_only=True))

    attempt(take_extra, axis)
    step = (lambda: write_file(path, tensors)) if axis.index == 0 else None
    return writer.begin(Writing(path, step, axis), background=non_blocking)


def _check_target(path: pathlib.Path) -> None:
    """Check the path before the gather, which takes minutes for a large model."""
    if path.is_dir():
        problem = "it is a folder; expected the name of a file"
    elif not path.parent.is_dir():
        problem = f"the folder {path.parent} does not exist; create it first"
    elif not os.access(path.parent, os.W_OK):
        problem = f"the folder {path.parent} is not writable"
    else:
        return
    raise CheckpointError(f"cannot save to {path}: {problem}.")


def visit(
    model: torch.nn.Module,
    take: Take,
    kind: type[Exception] = CheckpointError,
    *,
    only: Collection[str] | None = None,
) -> None:
    """Call `take(entry, full tensor)` for every parameter and persistent buffer. Collective.

    With `only`, for those of these names, as `selected` finds them.

    Gathers one storage at a time. The tensor may be a view of the gathered buffer: `take` must copy
    what it keeps, or the buffer stays resident.

    Raises:
        kind: on every rank, at the first storage for which `take` fails on any rank.
    """
    for module in model.modules():
        if isinstance(module, DistributedModule):
            module.settle_buffers()
    axis = everyone()
    plain: list[Entry] = []
    groups: dict[Storage, list[tuple[Entry, int]]] = {}
    for entry in attempt(lambda: selected(entries(model), only), axis, kind):
        if isinstance(entry.tensor, DistributedParameter):
            groups.setdefault(entry.tensor.storage_of, []).append(
                (entry, entry.tensor.index_in_storage)
            )
        else:
            plain.append(entry)

    def take_plain() -> None:
        for entry in plain:
            take(entry, entry.tensor.detach())

    def take_storage(whole: Whole, members: Sequence[tuple[Entry, int]]) -> None:
        for entry, index in members:
            take(entry, whole[index])

    attempt(take_plain, axis, kind)
    for storage, members in groups.items():
        step = functools.partial(take_storage, Whole(storage), members)
        attempt(step, axis, kind)
        del step  # holds the gathered buffer: without this, two would be resident at a time


def collect(
    model: torch.nn.Module, *, keep: bool, only: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """CPU copies of all tensors, or `only` of some, one per tied tensor; empty unless `keep`.

    Collective.
    """
    found: dict[str, torch.Tensor] = {}

    def take(entry: Entry, tensor: torch.Tensor) -> None:
        if keep:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
            found.update(dict.fromkeys(entry.names, copy))

    visit(model, take, only=only)
    return {name: found[name] for name, _ in named_tensors(model) if name in found}
