"""Names, order and shapes of recorded tensors over all ranks. No tensors here."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable


@dataclasses.dataclass(frozen=True)
class Key:
    """One recorded tensor: the `count`-th of its name in its group, among those of a segment and a
    stage (see `Position`).
    """

    group: str | None
    name: str
    segment: int
    stage: int
    count: int

    @property
    def is_pipelined(self) -> bool:
        """Whether other stages have records of the same segment."""
        return self.segment % 2 == 1

    def text(self, index: int) -> str:
        """`[group.]index.name`."""
        return full_name(self.name, self.group, index)


def full_name(name: str, group: str | None, index: int) -> str:
    """`[group.]index.name`."""
    return f"{index}.{name}" if group is None else f"{group}.{index}.{name}"


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Each key once: by segment and stage, otherwise as given."""
    return sorted(dict.fromkeys(keys), key=lambda key: (key.segment, key.stage))


def number(keys: Iterable[Key]) -> dict[Key, int]:
    """Count the keys of each name and group, in the order given."""
    counts: dict[tuple[str | None, str], int] = {}
    numbers: dict[Key, int] = {}
    for key in keys:
        numbers[key] = counts.get((key.group, key.name), 0)
        counts[key.group, key.name] = numbers[key] + 1
    return numbers


def shape_of_all(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the tensors of all ranks one below the other: a number is a row, and a dim in
    which they differ is -1.
    """
    rows = [shape or (1,) for shape in shapes]
    if len({len(shape) for shape in rows}) > 1:
        return (-1,)
    first, *others = zip(*rows, strict=True)
    return (sum(first), *(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in others))
