"""A checkpoint of shards as a source: elements come from the files of the ranks that had them."""

from __future__ import annotations

import math
import os
import pathlib

import torch

from bmtrain.checkpoint.manifest import MODEL, TensorFacts, read_into, read_manifest
from bmtrain.checkpoint.source import Header, Source
from bmtrain.errors import CheckpointError


class ShardedCheckpoint(Source):
    """The tensors of one section of a checkpoint, whole or in part, whatever ranks wrote them.

    Attributes:
        manifest: of the checkpoint.
    """

    def __init__(self, folder: pathlib.Path, section: str = MODEL) -> None:
        self.manifest, self._section = read_manifest(folder), section
        self._tensors = dict(self.manifest.tensors.get(section, {}))
        for name, kept in self.manifest.ties.get(section, {}).items():
            self._tensors[name] = self._tensors[kept]
        headers = {name: Header(one.shape, one.dtype) for name, one in self._tensors.items()}
        super().__init__(folder, headers, {})

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        facts = self._tensors[name]
        if facts.count > 1:
            return super().read(name, start, stop, scratch)
        values = scratch[: (stop - start) * facts.dtype.itemsize].view(facts.dtype)
        self._fill(values, facts, 0, start)
        return values

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        facts = self._tensors[name]
        if start == stop:
            return torch.empty(0, dtype=facts.dtype, device="cpu")
        width = math.prod(facts.part_shape[facts.dim :]) if facts.count > 1 else 1
        row = width * facts.count
        first, last = start // row, -(-stop // row)
        if facts.count > 1 and last - first > 1:
            return self._rows(facts, first, last, width)[start - first * row : stop - first * row]
        values = torch.empty(stop - start, dtype=facts.dtype, device="cpu")
        if facts.count == 1:
            self._fill(values, facts, 0, start)
            return values
        for part in range(facts.count):  # one row, cut into parts
            begin = first * row + part * width
            low, high = max(start, begin), min(stop, begin + width)
            if low < high:
                own = values[low - start : high - start]
                self._fill(own, facts, part, first * width + low - begin)
        return values

    def is_cut(self, name: str) -> bool:
        """Whether ranks had slices of the tensor, and not each all of it."""
        return self._tensors[name].dim >= 0

    def mapped(self, name: str) -> torch.Tensor:
        return self.whole(name)

    def all(self) -> dict[str, torch.Tensor]:
        """All tensors by all names; tied ones are one object."""
        found = {name: self.whole(name) for name in self.manifest.tensors.get(self._section, {})}
        ties = self.manifest.ties.get(self._section, {})
        return found | {name: found[kept] for name, kept in ties.items()}

    def _rows(self, facts: TensorFacts, first: int, last: int, width: int) -> torch.Tensor:
        """Rows [first, last) of a tensor that is cut along another dim than the first."""
        rows = torch.empty(last - first, facts.count, width, dtype=facts.dtype, device="cpu")
        for part in range(facts.count):
            own = torch.empty((last - first) * width, dtype=facts.dtype, device="cpu")
            self._fill(own, facts, part, first * width)
            rows[:, part] = own.view(-1, width)
        return rows.view(-1)

    def _fill(self, values: torch.Tensor, facts: TensorFacts, part: int, start: int) -> None:
        """Fill `values`, 1-D, with the elements of a part from `start` on."""
        stop, size = start + values.numel(), facts.dtype.itemsize
        memory = memoryview(values.view(torch.uint8).numpy().data)
        for piece in facts.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if piece.part == part and low < high:
                self._read(
                    memory[(low - start) * size : (high - start) * size],
                    self.path / piece.file,
                    piece.offset + (low - piece.start) * size,
                )

    def _read(self, memory: memoryview, path: pathlib.Path, offset: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                read_into(descriptor, memory, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot load {path}: {error.strerror or error}.") from error
