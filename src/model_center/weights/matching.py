"""Matching the names of a file to those of a model, and the file seen under the model's names."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Iterable, Mapping

import torch

from bmtrain.checkpoint.source import Header, Source
from bmtrain.checkpoint.sources import without_prefix
from bmtrain.shard.layout import round_up
from model_center.errors import WeightsError
from model_center.weights.keymap import KeyMap, TensorPart


@dataclasses.dataclass(frozen=True)
class Match:
    """Which of a file's tensors are which of ours.

    Attributes:
        pieces: our name to the piece of the file, by the name that the file has for it.
        unexpected: names in the file that are nothing of ours.
        copies: (name, other name) in the file of what the key map takes for the same tensor; the
            other one is read.
    """

    pieces: Mapping[str, TensorPart]
    unexpected: list[str]
    copies: list[tuple[str, str]]


def match(key_map: KeyMap, ours: Iterable[str], theirs: Collection[str]) -> Match:
    """Find each of `ours` among the names `theirs` of a file.

    Those that are not found are not in the result's pieces.
    """
    pieces: dict[str, TensorPart] = {}
    copies: dict[str, str] = {}
    for name in ours:
        piece = key_map.pieces.get(name, TensorPart(name))
        found = key_map.found_in(theirs, piece.name)
        if found:
            pieces[name] = dataclasses.replace(piece, name=found[0])
            copies.update(dict.fromkeys(found[1:], found[0]))
    used = {piece.name for piece in pieces.values()} | copies.keys()
    unexpected = [name for name in theirs if name not in used and not key_map.is_ignored(name)]
    return Match(
        pieces, unexpected, [(copy, kept) for copy, kept in copies.items() if copy != kept]
    )


def under_any_prefix(source: Source, key_map: KeyMap) -> Source:
    """The source, its names without a common prefix that the key map does not know ("module.")."""
    names = {piece.name for piece in key_map.pieces.values()}
    return without_prefix(
        source,
        {
            spelled
            for name in names
            for same in key_map.same_as(name)
            for spelled in key_map.spellings(same)
        },
    )


class MappedSource(Source):
    """A file of theirs under our names: pieces are cut out and turned while they are read."""

    def __init__(self, source: Source, pieces: Mapping[str, TensorPart]) -> None:
        order = {name: place for place, name in enumerate(source.headers)}
        self._source = source
        self.pieces = dict(sorted(pieces.items(), key=lambda item: order[item[1].name]))
        super().__init__(
            source.path,
            {name: self._header(name, piece) for name, piece in self.pieces.items()},
            {},
        )

    def _header(self, name: str, piece: TensorPart) -> Header:
        theirs = self._source.headers[piece.name]
        shape = theirs.shape
        if piece.transpose and len(shape) != 2:
            raise WeightsError(
                f"{piece.name!r} in {self.file_of(name)} has shape {shape}: expected a "
                f"matrix, to turn it into {name!r}."
            )
        turned = shape[::-1] if piece.transpose else shape
        if piece.rows is None:
            return Header(turned, theirs.dtype)
        start, stop = piece.rows
        if not turned or stop > turned[0]:
            raise WeightsError(
                f"{piece.name!r} in {self.file_of(name)} has shape {shape}: too small "
                f"for {name!r}, which is [{start}, {stop}) of "
                f"its {'columns' if piece.transpose else 'rows'}; the file is of "
                "another size than the model's configuration."
            )
        return Header((stop - start, *turned[1:]), theirs.dtype)

    def file_of(self, name: str) -> pathlib.Path:
        return self._source.file_of(self.pieces[name].name)

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        if not self.pieces[name].transpose:
            begin = self._begin(name)
            return self._source.part(self.pieces[name].name, begin + start, begin + stop)
        header, (first, last) = self.headers[name], self._rows_of(name, start, stop)
        size = (last - first) * header.shape[1] * header.dtype.itemsize
        scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.read(name, start, stop, scratch).reshape(-1)

    def mapped(self, name: str) -> torch.Tensor:
        piece = self.pieces[name]
        theirs = self._source.mapped(piece.name)
        turned = theirs.t() if piece.transpose else theirs
        return turned if piece.rows is None else turned[slice(*piece.rows)]

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        if not self.pieces[name].transpose:
            begin = self._begin(name)
            return self._source.read(self.pieces[name].name, begin + start, begin + stop, scratch)
        row = self.headers[name].shape[1]
        first, last = self._rows_of(name, start, stop)
        rows = self._columns(name, first, last, scratch).t()
        is_all = (start, stop) == (first * row, last * row)
        return rows if is_all else rows.reshape(-1)[start - first * row : stop - first * row]

    def _rows_of(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Our rows, first and behind the last, that hold elements [start, stop)."""
        row = self.headers[name].shape[1]
        return (start // row, round_up(stop, row) // row) if stop > start else (0, 0)

    def _begin(self, name: str) -> int:
        """The element of their flattened tensor, not to be turned, with which ours begins."""
        rows = self.pieces[name].rows
        return 0 if rows is None else rows[0] * torch.Size(self.headers[name].shape[1:]).numel()

    def _columns(self, name: str, first: int, last: int, scratch: torch.Tensor) -> torch.Tensor:
        """Our rows [first, last) as they are there, (columns of ours, last - first)."""
        piece, dtype = self.pieces[name], self.headers[name].dtype
        height, width = self._source.headers[piece.name].shape
        if last - first == width:
            return self._source.read(piece.name, 0, height * width, scratch).view(height, width)
        begin = 0 if piece.rows is None else piece.rows[0]
        held = (
            scratch[: height * (last - first) * dtype.itemsize]
            .view(dtype)
            .view(height, last - first)
        )
        return held.copy_(self._source.mapped(piece.name)[:, begin + first : begin + last])


def check_coverage(source: Source, pieces: Mapping[str, TensorPart]) -> None:
    """See that pieces which are rows of a tensor make all of it, if they are in the file.

    Raises:
        WeightsError: naming a tensor of which rows would be left over: the file is of another size
            than the configuration.
    """
    ends: dict[str, tuple[int, int]] = {}
    for piece in pieces.values():
        if piece.rows is not None:
            shape = source.headers[piece.name].shape
            rows = shape[-1 if piece.transpose else 0]
            ends[piece.name] = (max(piece.rows[1], ends.get(piece.name, (0, 0))[0]), rows)
    for name, (stop, rows) in ends.items():
        if stop != rows:
            raise WeightsError(
                f"{name!r} in {source.file_of(name)} has shape "
                f"{source.headers[name].shape}: of {rows} rows or columns the model's "
                f"configuration takes {stop}; it is of another size."
            )
