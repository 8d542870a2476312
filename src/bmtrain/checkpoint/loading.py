"""load: each rank reads its own slices, after all names and shapes have been checked."""

from __future__ import annotations

import dataclasses
import math
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from bmtrain.checkpoint.entries import Entry, entries, extra_states, selected
from bmtrain.checkpoint.reading import Read, read_all
from bmtrain.checkpoint.source import Source
from bmtrain.checkpoint.sources import Collected, open_source, without_prefix
from bmtrain.checkpoint.writer import Writer
from bmtrain.distributed.agreement import attempt, told_apart
from bmtrain.errors import CheckpointError
from bmtrain.optim.saved import described
from bmtrain.runtime import log, world
from bmtrain.runtime.arguments import with_nearest
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.cut import Cut
from bmtrain.shard.parameter import DistributedParameter

SHOWN = 8  # names listed in a message
SAMPLED = 64  # values of a tensor that are compared where ranks read files of other names


class LoadResult(NamedTuple):
    """The names that did not match, in the form that torch's load_state_dict returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a load will copy, and the modules whose state beside tensors it sets, by the name in the
    file; and the names that do not match.
    """

    copies: Mapping[str, Entry]
    extra: Mapping[str, torch.nn.Module]
    missing: list[str]
    unexpected: list[str]


def load(
    model: torch.nn.Module,
    file_name: str | os.PathLike[str],
    strict: bool = True,
    *,
    only: Collection[str] | None = None,
) -> LoadResult:
    """Load all parameters, persistent buffers and extra states of `model` from `file_name`.
    Collective.

    Reads files written by `save`, by BMTrain and ModelCenter, any state dict of `torch.save`,
    .safetensors files, and folders of either, with or without an index. Each rank reads only its
    own slices, so the file may come from a run of any world size. Values are converted to the
    model's dtypes, with a warning where that loses precision. For tied parameters one of the names
    is enough. If all names in the file share a prefix that the model lacks, `module.` for example,
    it is dropped, with a warning. Some models of transformers have other names and shapes in their
    files: `model_center.weights.load_transformers` reads these.

    Args:
        model: any module, its parameters distributed or not.
        file_name: a file or a folder.
        strict: whether missing and unexpected names are errors.
        only: names of the tensors to load, of tied ones the first; None for all. With `strict` the
            file holds these alone.

    Returns the names that are missing from the file and the names that the model does not have.

    Raises:
        CheckpointError: on every rank, with the file and the names, shapes or reason. The model is
            unchanged unless a read failed halfway.
    """
    return load_from(lambda shapes: open_source(file_name), model, strict, only)


def load_from(
    open_file: Callable[[Mapping[str, tuple[int, ...]]], Source],
    model: torch.nn.Module,
    strict: bool = True,
    only: Collection[str] | None = None,
) -> LoadResult:
    """`load` from what `open_file` opens, given the shapes of the model's tensors by name."""
    current = world.current("load")
    axis = current.mesh.world
    current.service(Writer).settle()
    targets = attempt(lambda: selected(entries(model), only), axis)
    shapes = {name: entry.shape for entry in targets for name in entry.names}
    source = attempt(lambda: without_prefix(open_file(shapes), shapes), axis)
    extra = extra_states(model) if only is None else {}
    if extra and not source.has_extra:
        if current.rank == 0:
            log.warn(
                f"{source.path} is of an earlier version, which kept no extra states of modules: "
                f"{next(iter(extra))!r} for example stays as it is."
            )
        extra = {}
    plan = attempt(lambda: make_plan(targets, source, strict=strict, extra=extra), axis)
    _check_same_everywhere(plan, source, axis)
    attempt(lambda: fill(plan, source), axis)
    if current.rank == 0:
        _warn(plan, source)
    return LoadResult(plan.missing, plan.unexpected)


def _check_same_everywhere(plan: Plan, source: Source, axis: Axis) -> None:
    """CheckpointError unless all ranks are about to load the same tensors with the same values.

    Each reads its own slices: of other files they would make a model that is in none. Paths may
    differ, as each machine may have a copy of its own; then some values of each tensor are
    compared. Collective.
    """
    headers = [(name, source.headers[name]) for name in plan.copies]
    names = [entry.name for entry in plan.copies.values()]
    where = os.path.abspath(source.path)
    is_elsewhere = told_apart(where, axis, "the place of a file") is not None
    values = attempt(lambda: _sampled(plan, source) if is_elsewhere else 0, axis)
    others = described([source.others.get(name) for name in plan.extra])
    content, shown = f"{names} {headers} {values} {others}", f"{len(names)} tensors of {where}"
    told = told_apart(content, axis, "what a file holds", shown)
    if told is not None:
        raise CheckpointError(
            f"load got different arguments on the ranks ({told}), and each rank reads a part: "
            "nothing was loaded. Give all ranks the same file, names (only) and strict, found by "
            "rank 0 for example: bmtrain.distributed.broadcast, or "
            "torch.distributed.broadcast_object_list."
        )


def _sampled(plan: Plan, source: Source) -> int:
    """A checksum of some values in the middle of each tensor."""
    checksum = 0
    for name in plan.copies:
        numel = math.prod(source.headers[name].shape)
        first = max(numel // 2 - SAMPLED // 2, 0)
        values = source.part(name, first, min(first + SAMPLED, numel)).contiguous()
        checksum = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def make_plan(
    targets: Sequence[Entry], source: Source, *, strict: bool, extra: Mapping[str, torch.nn.Module]
) -> Plan:
    """Match the model's tensors, and its `extra_states`, to those of the file.

    Raises:
        CheckpointError: listing every mismatch.
    """
    available = source.headers.keys()
    copies: dict[str, Entry] = {}
    missing: list[str] = []
    for entry in targets:
        found = [name for name in entry.names if name in available]
        if found:
            copies[found[-1]] = entry  # the last tied name wins, as in torch
        else:
            missing += entry.names
    held = {name: extra[name] for name in extra if name in available or name in source.others}
    missing += extra.keys() - held.keys()
    wanted = {*extra, *(name for entry in targets for name in entry.names)}
    unexpected = [name for name in (*available, *source.others) if name not in wanted]
    problems = [text for copy in copies.items() if (text := _mismatch(*copy, source))]
    for name in missing:
        if name in source.others:
            kind = type(source.others[name]).__name__
            problems.append(f"{name!r} is a {kind} in the file, expected a tensor")
    if strict:
        problems += _report("missing from the file", missing, unexpected, available)
        problems += _report("unexpected in the file", unexpected, missing, wanted)
    if problems:
        remedy = (
            " Use strict=False to load what fits; for a model of transformers, some of which have "
            "other names in files, model_center.weights.load_transformers."
            if strict and (missing or unexpected)
            else " Use strict=False and only=[...] to load the others."
        )
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(
            f"{source.path} does not fit the model; nothing was loaded.{remedy}{lines}"
        )
    return Plan(copies, held, missing, unexpected)


def _mismatch(name: str, entry: Entry, source: Source) -> str:
    """The reason why this tensor cannot be copied; empty if it can."""
    header = source.headers[name]
    if entry.shape != header.shape:
        flat = ""
        if len(header.shape) == 1 < len(entry.shape):
            flat = "; it holds one rank's flat slices, not whole tensors; bmtrain.save writes those"
        return (
            f"{name!r} has shape {entry.shape} in the model and {header.shape} in "
            f"{source.file_of(name)}{flat}"
        )
    if entry.tensor.is_meta:
        return (
            f"{name!r} is on the meta device in the model: shard it or call "
            "to_empty(device=bmtrain.device())"
        )
    if header.dtype.is_complex and not entry.tensor.dtype.is_complex:
        return (
            f"{name!r} is {entry.tensor.dtype} in the model and {header.dtype} in "
            f"{source.file_of(name)}"
        )
    return ""


def _report(
    what: str, names: Sequence[str], unmatched: Collection[str], others: Collection[str]
) -> list[str]:
    """One line per name, with the closest name of `unmatched`, without any of `others`."""
    lines = [f"{what}: {with_nearest(name, unmatched or others)}" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        lines.append(f"{what}: {len(names) - SHOWN} more")
    return lines


def fill(plan: Plan, source: Source) -> None:
    """Carry out the plan on this rank.

    An error leaves tensors partly filled, on this rank alone: call it under `attempt`, so that all
    ranks raise.
    """
    reads: list[Read | None] = []
    for name, entry in plan.copies.items():
        tensor = entry.tensor
        if isinstance(tensor, DistributedParameter):
            reads.append(read_of(tensor.local, tensor.cut, source, name))
        elif (values := tensor.detach()).is_contiguous():
            reads.append(Read(values.view(-1), name, 0, values.numel()))
        else:
            values.copy_(source.whole(name))
    read_all(reads, source)
    for entry in plan.copies.values():
        if isinstance(entry.tensor, DistributedParameter):
            entry.tensor.mark_written()
    for name, module in plan.extra.items():
        is_tensor = name in source.headers
        module.set_extra_state(source.whole(name) if is_tensor else source.others[name])


def read_of(values: torch.Tensor, cut: Cut, source: Source, name: str) -> Read | None:
    """The contiguous read that fills this rank's slice `values` of a tensor.

    None if the values are not contiguous in the file: these are copied here.
    """
    split, piece, begin = cut.split, cut.piece, 0
    if split is not None and piece.numel > 0:
        if split.dim > 0:
            # Whole rows are read, the columns of the other tensor-parallel ranks included.
            first, last, width = split.span(cut.shape, piece.start, piece.stop)
            row, left = width * split.count, width * split.index
            rows = source.part(name, first * row, last * row).view(last - first, row)
            own = rows[:, left : left + width].reshape(-1)
            values.copy_(own[piece.start - first * width : piece.stop - first * width])
            return None
        begin = cut.shape.numel() * split.index
    return Read(values, name, begin + piece.start, begin + piece.stop)


def _warn(plan: Plan, source: Source) -> None:
    """Of a prefix that was left out, and of precision that was lost."""
    if isinstance(source, Collected) and source.prefix:
        log.warn(
            f"{source.path}: all names begin with {source.prefix!r} and none is the "
            "model's; they were read without it."
        )
    dtypes = [(name, source.headers[name].dtype, x.tensor.dtype) for name, x in plan.copies.items()]
    lost = [one for one in dtypes if _loses(*one[1:])]
    if lost:
        name, stored, own = lost[0]
        log.warn(
            f"{source.path}: {len(lost)} of {len(plan.copies)} tensors lost precision on the way "
            f"into the model, {name!r} for example from {stored} to {own}."
        )


def _loses(stored: torch.dtype, own: torch.dtype) -> bool:
    """Whether converting `stored` to `own` may lose precision or overflow."""
    if stored.is_floating_point and own.is_floating_point:
        before, after = torch.finfo(stored), torch.finfo(own)
        return after.eps > before.eps or after.max < before.max
    if stored.is_floating_point:
        return not own.is_complex
    return torch.promote_types(stored, own) != own
