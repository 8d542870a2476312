"""Names, order and shapes of recorded tensors across ranks. Integers and text only."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable


@dataclasses.dataclass(frozen=True)
class Key:
    """The identity of a recorded tensor, the same on all ranks that record it.

    Attributes:
        group, name: as given to `record_tensor`.
        segment, stage: where it was recorded (see `Position`).
        count: its index among the records of equal group, name, segment and stage.
    """

    group: str | None
    name: str
    segment: int
    stage: int
    count: int

    @property
    def is_pipelined(self) -> bool:
        """Whether it was recorded in a pipelined pass: odd segments are passes."""
        return self.segment % 2 == 1

    def text(self, index: int) -> str:
        """`[group.]index.name`."""
        return full_name(self.name, self.group, index)


def full_name(name: str, group: str | None, index: int) -> str:
    """`[group.]index.name`."""
    return f"{index}.{name}" if group is None else f"{group}.{index}.{name}"


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Each key once, sorted by segment and stage and otherwise in the order given."""
    return sorted(dict.fromkeys(keys), key=lambda key: (key.segment, key.stage))


def number(keys: Iterable[Key]) -> dict[Key, int]:
    """Number the keys of each name and group from 0, in the order given."""
    counts: dict[tuple[str | None, str], int] = {}
    numbers: dict[Key, int] = {}
    for key in keys:
        numbers[key] = counts.get((key.group, key.name), 0)
        counts[key.group, key.name] = numbers[key] + 1
    return numbers


def shape_of_all(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of all ranks' tensors concatenated along dim 0; -1 for dims in which they differ.

    A 0-dim tensor counts as one row.
    """
    rows = [shape or (1,) for shape in shapes]
    if len({len(shape) for shape in rows}) > 1:
        return (-1,)
    first, *others = zip(*rows, strict=True)
    return (sum(first), *(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in others))
