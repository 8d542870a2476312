"""Reading weights: each rank its own slices, and nothing without values in silence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

import bmtrain as bmt
from bmtrain.checkpoint.entries import entries
from bmtrain.checkpoint.loading import fill, make_plan
from bmtrain.checkpoint.source import Source
from bmtrain.checkpoint.sources import open_source, without_prefix
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.runtime import log
from bmtrain.runtime.arguments import with_nearest
from model_center.errors import WeightsError
from model_center.layer.parameter import PlainParameter
from model_center.weights.keymap import KeyMap, TensorPart
from model_center.weights.matching import (
    MappedSource,
    Match,
    check_coverage,
    match,
    under_any_prefix,
)

SHOWN = 8  # names listed in a message
SAMPLE = 4096  # elements compared of tensors that should be the same
VOCABULARY = re.compile(r"(input_embedding|output_projection|lm_head\.decoder)\.(weight|bias)$")


class LoadReport(NamedTuple):
    """What did not match.

    Attributes:
        missing: our tensors that the file does not have.
        unexpected: names in the file that are none of ours.
        newly_initialised: those of the missing that have their first values now: all, as others are
            an error.
    """

    missing: list[str]
    unexpected: list[str]
    newly_initialised: list[str]


class OpenCheckpoint(NamedTuple):
    """A checkpoint under our names."""

    source: MappedSource
    unexpected: list[str]
    notes: list[str]  # what the user should know of how it is read


def load_weights(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    key_map: KeyMap | None = None,
    *,
    strict: bool = True,
) -> LoadReport:
    """Give parameters and persistent buffers of `model` the values in `folder`. Collective.

    The folder (or file) has ModelCenter's names or those of `key_map`; which, its names tell. Each
    rank reads its own slices, converted to the model's dtype. Heads that `key_map` allows to be new
    and the file does not have get their first values, and if not `strict` all that it does not
    have. One warning names them, one names what the
    file has beyond the model; both come on rank 0.

    Raises:
        WeightsError: on every rank, with the file and the names or shapes: nothing has been changed
            then, unless reading itself failed half-way.
    """
    axis = everyone()
    targets = entries(model)
    shapes = {name: entry.shape for entry in targets for name in entry.names}
    opened = attempt(lambda: open_weights(folder, shapes, key_map), axis, WeightsError)
    missing = attempt(
        lambda: check(shapes, [entry.names for entry in targets], opened, key_map, strict),
        axis,
        WeightsError,
    )
    plan = attempt(
        lambda: make_plan(targets, opened.source, strict=False, extra={}), axis, WeightsError
    )
    _initialise(model, missing)
    attempt(lambda: fill(plan, opened.source), axis, WeightsError)
    report = LoadReport(missing, opened.unexpected, missing)
    if bmt.rank() == 0:
        _tell(report, opened)
    return report


def open_weights(
    folder: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]], key_map: KeyMap | None
) -> OpenCheckpoint:
    """Open a folder under our names.

    Args:
        folder: or a file.
        shapes: of the model's tensors, by name.
        key_map: of the model; None where Hugging Face does not have it.

    Raises:
        CheckpointError, WeightsError: for files that cannot be read, or tensors that are not what
            the key map says.
    """
    source = open_source(folder)
    plain = without_prefix(source, shapes.keys())
    direct = match(KeyMap({}), shapes, plain.headers)
    if key_map is None:
        return _under_own_names(plain, direct, shapes)
    theirs = under_any_prefix(source, key_map)
    found = match(key_map, shapes, theirs.headers)
    if len(direct.pieces) > len(found.pieces):
        return _under_own_names(plain, direct, shapes)
    check_coverage(theirs, found.pieces)
    _check_copies(theirs, found)
    return OpenCheckpoint(MappedSource(theirs, found.pieces), found.unexpected, [])


def _under_own_names(
    source: Source, found: Match, shapes: Mapping[str, tuple[int, ...]]
) -> OpenCheckpoint:
    """A file in ModelCenter's names.

    Its GPT-2 embeddings have a row of zeros more than the vocabulary, which is left out.
    """
    pieces, notes = dict(found.pieces), []
    name = "input_embedding.weight"
    if name in pieces and name in shapes:
        (rows, *width), there = shapes[name], source.headers[name].shape
        if there == (rows + 1, *width):
            pieces[name] = TensorPart(name, rows=(0, rows))
            notes.append(
                f"{source.path}: {name!r} has {rows + 1} rows, the model {rows}; the last, "
                "for padding, was left out."
            )
    return OpenCheckpoint(MappedSource(source, pieces), found.unexpected, notes)


def _check_copies(source: Source, found: Match) -> None:
    """Tensors that the model's configuration ties must not differ in the file."""
    for copy, kept in found.copies:
        if not _are_equal(source, copy, kept):
            raise WeightsError(
                f"{copy!r} and {kept!r} differ in {source.path}, but the model's configuration "
                "makes them one tensor: load it with tied=False."
            )


def _check_ties(source: MappedSource, ties: Sequence[Sequence[str]]) -> None:
    """Tensors that are always one in the model must not differ in the file."""
    for names in ties:
        first, *others = [name for name in names if name in source.headers] or [""]
        for other in others:
            if source.pieces[other] != source.pieces[first] and not _are_equal(
                source, first, other
            ):
                raise WeightsError(
                    f"{first!r} and {other!r} differ in {source.path}, but are one tensor "
                    "in the model."
                )


def _are_equal(source: Source, one: str, other: str) -> bool:
    """Whether two tensors of a file are equal; of large ones the ends are compared."""
    shape = source.headers[one].shape
    numel = torch.Size(shape).numel()
    ends = ((0, min(SAMPLE, numel)), (max(numel - SAMPLE, 0), numel))
    return shape == source.headers[other].shape and all(
        torch.equal(source.part(one, *end), source.part(other, *end)) for end in ends
    )


def check(
    shapes: Mapping[str, tuple[int, ...]],
    ties: Sequence[Sequence[str]],
    opened: OpenCheckpoint,
    key_map: KeyMap | None,
    strict: bool = True,
) -> list[str]:
    """Names of ours that the file does not have, if `strict` all of them heads that may be new.

    Args:
        shapes: of the model's tensors, by name.
        ties: the names of each tensor, of which one is enough.

    Raises:
        WeightsError: listing what does not match.
    """
    source, key_map = opened.source, key_map or KeyMap({})
    problems = [text for name, shape in shapes.items() if (text := _mismatch(name, shape, source))]
    if problems:
        raise WeightsError(
            _listing(f"{source.path} does not fit the model; nothing was loaded:", problems)
        )
    _check_ties(source, ties)
    missing = [
        name
        for names in ties
        if not any(name in source.headers for name in names)
        for name in names
    ]
    lost = [name for name in missing if strict and not key_map.may_be_new(name)]
    if len(missing) == len(shapes):
        held = ", ".join(opened.unexpected[:3]) or "nothing"
        raise WeightsError(
            f"{source.path} holds no tensor of this model, but {held}: it belongs to another model."
        )
    if lost:
        lines = [f"missing: {_expected(name, source, key_map)}" for name in lost]
        raise WeightsError(
            _listing(f"{source.path} lacks tensors of the model; nothing was loaded:", lines)
        )
    return missing


def _mismatch(name: str, shape: tuple[int, ...], source: MappedSource) -> str:
    """Why this tensor cannot take what the file has under its name; empty if it can."""
    if name not in source.headers or source.headers[name].shape == shape:
        return ""
    there, theirs = source.headers[name].shape, source.pieces[name].name
    stored = (
        ""
        if theirs == name
        else f" (there {theirs!r}{', turned' if source.pieces[name].transpose else ''})"
    )
    hint = ""
    if VOCABULARY.search(name) and there[1:] == shape[1:]:
        hint = f"; for that vocabulary set vocab_size={there[0]} in the configuration"
    return (
        f"{name!r} has shape {shape} in the model and {there} in "
        f"{source.file_of(name)}{stored}{hint}"
    )


def _expected(name: str, source: MappedSource, key_map: KeyMap) -> str:
    piece = key_map.pieces.get(name)
    theirs = f"; in their names {piece.name!r}" if piece is not None else ""
    return f"{with_nearest(name, source.headers)}{theirs}"


def _listing(opening: str, lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join([opening, *lines[:SHOWN], *more])


def _initialise(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Give tensors that no file has their first values. Collective in a process group."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        if any(isinstance(param, bmt.DistributedParameter) for param in modules[path].parameters()):
            bmt.init_parameters(modules[path])
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in names and isinstance(param, PlainParameter) and param.init_method is not None:
            param.init_method(param.detach())


def _tell(report: LoadReport, opened: OpenCheckpoint) -> None:
    for note in opened.notes:
        log.warn(note)
    if report.newly_initialised:
        log.warn(
            f"{opened.source.path} does not have {_some(report.newly_initialised)}: newly "
            "initialised, to be trained."
        )
    if report.unexpected:
        log.warn(
            f"{opened.source.path}: {_some(report.unexpected)} of it is not used: the "
            "model has no place for it."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )
