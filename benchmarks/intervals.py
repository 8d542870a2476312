"""Arithmetic of time intervals: (begin, end) pairs of numbers, in any one unit."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, as intervals in order that neither touch nor overlap; empty ones vanish."""
    result: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def intersection(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The points that lie in both, as `union` gives them."""
    left, right = union(some), union(others)
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            result.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def covered(intervals: Iterable[Interval]) -> float:
    """Length of what they cover, overlaps counted once."""
    return sum(end - begin for begin, end in union(intervals))
