"""This rank's part of a checkpoint as the bytes of one file."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from bmtrain.checkpoint.manifest import BLOCK, DTYPES, Piece, TensorFacts, num_blocks
from bmtrain.errors import CheckpointError
from bmtrain.shard.cut import Cut
from bmtrain.shard.layout import round_up

_ALIGNMENT = 64  # bytes: of the first element of each tensor in the file


@dataclasses.dataclass(frozen=True)
class Part:
    """What this rank writes of one tensor.

    Attributes:
        section, name: of the tensor in the manifest.
        values: 1-D; the training's own memory, or a copy.
        cut: how the tensor is cut into slices, of which `values` is this rank's; None for all of a
            tensor, of shape `shape`.
    """

    section: str
    name: str
    values: torch.Tensor
    cut: Cut | None = None
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if str(self.values.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(
                f"{self.name!r} has dtype {self.values.dtype}: checkpoints hold "
                f"{', '.join(DTYPES)}."
            )

    def facts(self, file: str, offset: int) -> TensorFacts:
        """As the manifest says it, with this rank's piece alone."""
        numel = self.values.numel()
        if self.cut is None:
            pieces = (Piece(file, offset, 0, numel),)
            return TensorFacts(self.shape, self.values.dtype, -1, 1, pieces)
        split, start = self.cut.split, self.cut.piece.start
        dim, part, count = (0, 0, 1) if split is None else (split.dim, split.index, split.count)
        piece = Piece(file, offset, start, start + numel, part)
        return TensorFacts(
            tuple(self.cut.whole_shape), self.values.dtype, dim, count, (piece,) if numel else ()
        )


class Image:
    """The file that holds the parts of this rank, one after another.

    Attributes:
        parts: with their values.
        size: bytes.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        sizes = [round_up(part.values.nbytes, _ALIGNMENT) for part in parts]
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        self.size = self._offsets[-1]
        self._bytes = [part.values.detach().reshape(-1).view(torch.uint8) for part in parts]

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.size)

    def length(self, number: int) -> int:
        """Bytes of block `number`: BLOCK, or fewer of the last one."""
        return min(BLOCK, self.size - number * BLOCK)

    def fill(self, number: int, block: torch.Tensor) -> None:
        """Copy the bytes of block `number` into `block`, uint8 (BLOCK,) on the CPU.

        From a GPU on the current stream; the host does not wait if `block` is page-locked.
        """
        filled = 0
        for values, place in self._segments(number):
            if place > filled:
                block[filled:place].zero_()
            filled = place + values.numel()
            block[place:filled].copy_(values, non_blocking=True)
        if filled < self.length(number):
            block[filled : self.length(number)].zero_()

    def _segments(self, number: int) -> Iterator[tuple[torch.Tensor, int]]:
        """The bytes of the parts in a block, and their places in it."""
        begin, end = number * BLOCK, number * BLOCK + self.length(number)
        first = bisect.bisect_right(self._offsets, begin) - 1
        for offset, values in zip(self._offsets[first:], self._bytes[first:], strict=False):
            if offset >= end:
                return
            low, high = max(begin - offset, 0), min(end - offset, values.numel())
            if low < high:
                yield values[low:high], offset + low - begin

    def tensors(self, file: str) -> dict[str, dict[str, TensorFacts]]:
        """What the manifest says of the parts in this file, by section and name."""
        found: dict[str, dict[str, TensorFacts]] = {}
        for part, offset in zip(self.parts, self._offsets, strict=False):
            found.setdefault(part.section, {})[part.name] = part.facts(file, offset)
        return found
