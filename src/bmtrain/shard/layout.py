"""Where parameters lie in a flat buffer, and which part of each a rank owns. Integers only."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

# In elements. Slots and shards start at its multiples: matrix kernels need 16-byte aligned
# operands, on every rank's slice too.
ALIGNMENT = 64


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Split:
    """Part number `index` of a whole tensor that is cut into `count` equal parts along `dim`."""

    dim: int
    index: int
    count: int

    def span(self, part: Sequence[int], start: int, stop: int) -> tuple[int, int, int]:
        """Where elements [start, stop) of the flattened part lie in the flattened whole.

        Both are seen as matrices whose rows are cut at `dim`. Returns (first, last, width): the
        elements are in rows [first, last), and a row of the part has `width` elements, which start
        at index * width in a row of count * width.
        """
        width = math.prod(part[self.dim :])
        return start // width, -(-stop // width), width


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter in the full buffer: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    split: Split | None = None  # of a tensor-parallel parameter: `shape` is its part's

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def end(self) -> int:
        return self.offset + self.numel

    @functools.cached_property
    def stride(self) -> tuple[int, ...]:
        """Of the parameter as a contiguous tensor."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank owns of one parameter.

    Elements [begin, end) of the rank's shard are elements [start, start + end - begin) of the
    flattened parameter.
    """

    begin: int
    end: int
    start: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclasses.dataclass(frozen=True)
class Layout:
    """All slots of a storage, cut into `num_shards` equal contiguous shards."""

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int

    @functools.cached_property
    def numel(self) -> int:
        """Length of the full buffer, padding included."""
        return self.shard_numel * self.num_shards

    @classmethod
    def build(
        cls,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        num_shards: int,
        splits: Sequence[Split | None] | None = None,
    ) -> Layout:
        """Place parameters one after another in the given order."""
        slots: list[Slot] = []
        used = 0
        for name, shape in shapes:
            split = None if splits is None else splits[len(slots)]
            slot = Slot(name, tuple(shape), round_up(used, ALIGNMENT), split)
            slots.append(slot)
            used = slot.end
        return cls(tuple(slots), num_shards, round_up(used, num_shards * ALIGNMENT) // num_shards)

    def piece(self, index: int, shard: int) -> Piece:
        """The part of slot `index` that lies in shard number `shard`; may be empty."""
        slot, base = self.slots[index], shard * self.shard_numel
        begin = min(max(slot.offset, base), base + self.shard_numel)
        end = min(max(slot.end, begin), base + self.shard_numel)
        return Piece(begin - base, end - base, min(max(begin - slot.offset, 0), slot.numel))
