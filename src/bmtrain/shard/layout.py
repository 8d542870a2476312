"""Where parameters lie in a flat buffer and which part of each a rank owns. Integers only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

# Slots start at multiples of this many elements: matrix kernels want 16-byte aligned operands, and shard borders that are
# multiples of it keep every rank's slice aligned as well.
ALIGNMENT = 64


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter in the full buffer: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank owns of one parameter.

    Elements [begin, end) of the rank's shard are elements [start, start + end - begin) of the flattened parameter.
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

    @property
    def numel(self) -> int:
        """Length of the full buffer, padding included."""
        return self.shard_numel * self.num_shards

    @classmethod
    def build(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], num_shards: int) -> Layout:
        """Place parameters one after another in the order given."""
        slots, used = [], 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), round_up(used, ALIGNMENT))
            slots.append(slot)
            used = slot.end
        return cls(tuple(slots), num_shards, round_up(used, num_shards * ALIGNMENT) // num_shards)

    def piece(self, index: int, shard: int) -> Piece:
        """The part of slot `index` that lies in shard number `shard`; empty where it has none."""
        slot, base = self.slots[index], shard * self.shard_numel
        begin = min(max(slot.offset, base), base + self.shard_numel)
        end = min(max(slot.end, begin), base + self.shard_numel)
        return Piece(begin - base, end - base, min(max(begin - slot.offset, 0), slot.numel))
