"""Folding of names: `layers.0.weight` to `layers.39.weight` become `layers.[0-39].weight`."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Settings = TypeVar("Settings", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Folded(Generic[Settings]):
    """A folded name, the number of names that it stands for, and their common settings."""

    name: str
    count: int
    settings: Settings


def fold(named: Iterable[tuple[str, Settings]]) -> list[Folded[Settings]]:
    """Fold dotted names of equal settings that differ only in numbers, in order of appearance.

    Inner numbers are folded before outer ones, so the members of an outer range are equal at all
    inner levels.
    """
    rows = [Folded(name, 1, settings) for name, settings in named]
    depth = max((row.name.count(".") + 1 for row in rows), default=0)
    for place in reversed(range(depth)):
        groups: dict[Hashable, list[Folded[Settings]]] = {}
        for row in rows:
            words = row.name.split(".")
            is_number = place < len(words) and words[place].isdecimal()
            key = (*words[:place], None, *words[place + 1 :]) if is_number else row.name
            groups.setdefault((key, row.settings), []).append(row)
        rows = [_merged(members, place) for members in groups.values()]
    return rows


def _merged(members: Sequence[Folded[Settings]], place: int) -> Folded[Settings]:
    """Merge members that differ only in the number at `place` into one row."""
    first = members[0]
    if len(members) == 1:
        return first
    words = first.name.split(".")
    words[place] = f"[{ranges(int(row.name.split('.')[place]) for row in members)}]"
    return Folded(".".join(words), sum(row.count for row in members), first.settings)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3 and 7."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
