"""Our tensors put together as theirs: the inverse of reading through a key map."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from bmtrain.checkpoint.source import Header
from model_center.errors import WeightsError
from model_center.weights.extras import NOTHING, FolderExtras
from model_center.weights.keymap import KeyMap, TensorPart
from model_center.weights.safetensors_writer import SafetensorsWriter


@dataclasses.dataclass(frozen=True)
class Target:
    """One of their tensors: what it is made of."""

    header: Header
    pieces: Mapping[str, TensorPart]  # by our names

    @property
    def is_whole(self) -> bool:
        """Whether it is one tensor of ours as it is."""
        return len(self.pieces) == 1 and all(
            piece.rows is None and not piece.transpose for piece in self.pieces.values()
        )


def with_dtype(content: Mapping[str, Any], headers: Mapping[str, Header]) -> dict[str, Any]:
    """A config.json with the dtype that holds all of these tensors, as transformers loads."""
    floats = {header.dtype for header in headers.values() if header.dtype.is_floating_point}
    if not floats:
        return dict(content)
    name = "dtype" if "dtype" in content else "torch_dtype"  # as of transformers 5, and before
    dtype = functools.reduce(torch.promote_types, floats)
    return {**content, name: str(dtype).removeprefix("torch.")}


def targets_of(key_map: KeyMap, headers: Mapping[str, Header]) -> dict[str, Target]:
    """Their tensors, by name, for all of ours with these shapes and dtypes.

    Raises:
        WeightsError: if pieces of a tensor are missing or do not fit together.
    """
    groups: dict[str, dict[str, TensorPart]] = {}
    for name in headers:
        piece = key_map.pieces.get(name, TensorPart(name))
        groups.setdefault(piece.name, {})[name] = piece
    for name, piece in key_map.pieces.items():
        if piece.name in groups and name not in headers:
            raise WeightsError(
                f"{piece.name!r} cannot be written: it needs {name!r}, which the model "
                "does not have."
            )
    _check_complete(key_map, headers)
    return {name: Target(_header(name, pieces, headers), pieces) for name, pieces in groups.items()}


def _check_complete(key_map: KeyMap, ours: Collection[str]) -> None:
    """See that the model has what theirs is made of, unless a new head replaces another.

    Raises:
        WeightsError: naming what is missing: transformers would draw it at random.
    """
    missing = [name for name in key_map.pieces if name not in ours and not key_map.may_be_new(name)]
    if missing and not any(key_map.may_be_new(name) for name in ours):
        raise WeightsError(
            "the model has no "
            f"{missing[0]!r}{f', and {len(missing) - 1} more,' if len(missing) > 1 else ''} to be "
            f"written as {key_map.pieces[missing[0]].name!r}: merge adapters first "
            "(merge_and_unload), or save with format='model_center'."
        )


def _header(name: str, pieces: Mapping[str, TensorPart], headers: Mapping[str, Header]) -> Header:
    """Shape and dtype of their tensor `name`."""
    own = [headers[ours] for ours in pieces]
    rows = _num_rows(name, pieces)
    shape = own[0].shape if rows is None else (rows, *own[0].shape[1:])
    for (ours, piece), header in zip(pieces.items(), own, strict=True):
        start, stop = piece.rows or (0, rows)
        expected = shape if stop is None else (stop - start, *shape[1:])
        if (header.shape, header.dtype) != (expected, own[0].dtype):
            got = f"{ours!r}, a part of {name!r}, has shape {header.shape} and {header.dtype}"
            raise WeightsError(f"{got}: expected {expected} and {own[0].dtype}.")
    return Header(
        shape[::-1] if any(piece.transpose for piece in pieces.values()) else shape, own[0].dtype
    )


def _num_rows(name: str, pieces: Mapping[str, TensorPart]) -> int | None:
    """Rows, after turning, of a tensor of which pieces are rows; None if they are all of it."""
    spans = sorted({piece.rows for piece in pieces.values() if piece.rows is not None})
    end = 0
    for start, stop in spans:
        if start != end:
            raise WeightsError(
                f"{name!r} cannot be written: the model has none of its rows [{end}, {start}), or "
                "has them twice."
            )
        end = stop
    return end if spans else None


def written(names: Sequence[str], key_map: KeyMap) -> list[str]:
    """Which of a tied tensor's names go into files: those the key map lists, or else the first."""
    return [name for name in names if name in key_map.pieces] or [names[0]]


class Exporter:
    """Takes our tensors one by one and writes each of theirs when it is complete."""

    def __init__(
        self,
        key_map: KeyMap,
        targets: Mapping[str, Target],
        writer: SafetensorsWriter,
        origin: FolderExtras = NOTHING,
    ) -> None:
        self._key_map, self._targets, self._writer = key_map, targets, writer
        self._origin = origin
        self._begun: dict[str, _Assembly] = {}

    def put(self, names: Sequence[str], tensor: torch.Tensor) -> None:
        """Our tensor of these names, whole, on any device.

        Raises:
            WeightsError: if it is to be the same as one that came before, and is not.
        """
        for name in written(names, self._key_map):
            piece = self._key_map.pieces.get(name, TensorPart(name))
            target = self._targets[piece.name]
            if target.is_whole:
                self._write(piece.name, tensor)
                continue
            assembly = self._begun.setdefault(piece.name, _Assembly(target))
            assembly.put(name, piece, tensor)
            if assembly.is_complete:
                self._write(piece.name, assembly.tensor)
                del self._begun[piece.name]

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        for spelled in self._origin.spelled(name):
            self._writer.write(spelled, tensor)


class _Assembly:
    """One of their tensors while its pieces come in."""

    def __init__(self, target: Target) -> None:
        self.tensor = torch.empty(target.header.shape, dtype=target.header.dtype, device="cpu")
        self._missing = set(target.pieces)
        self._there: dict[tuple[int, int] | None, str] = {}

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def put(self, name: str, piece: TensorPart, tensor: torch.Tensor) -> None:
        turned = self.tensor.t() if piece.transpose else self.tensor
        place = turned if piece.rows is None else turned[slice(*piece.rows)]
        before = self._there.setdefault(piece.rows, name)
        if before == name:
            place.copy_(tensor)
        elif not torch.equal(place, tensor.detach().to("cpu")):
            raise WeightsError(
                f"{name!r} and {before!r} are one tensor, {piece.name!r}, in Hugging Face's "
                "format, but differ: it cannot hold this model. Save it with format='model_center'."
            )
        self._missing.discard(name)
