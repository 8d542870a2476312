"""Gather order as data: what came next last time will come next again."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Phase(enum.Enum):
    """Forward passes and backward passes (with the recomputation inside them) have orders of their own."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Schedule(Generic[Item]):
    """Learns which item is gathered after which, per phase; before it knows, backward is forward reversed.

    A wrong guess costs one gather. Items met again within one pass start a new pass, so that the last item of one
    forward is never followed by the first of the next: parameters may change in between.
    """

    def __init__(self) -> None:
        self._next: dict[Phase, weakref.WeakKeyDictionary[Item, weakref.ref[Item]]] = {
            phase: weakref.WeakKeyDictionary() for phase in Phase
        }
        self._previous: weakref.WeakKeyDictionary[Item, weakref.ref[Item]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Item] | None = None
        self._seen: weakref.WeakSet[Item] = weakref.WeakSet()
        self._phase = Phase.FORWARD

    def plan(self, order: Sequence[Item]) -> None:
        """Tell the forward order of some items before the first pass."""
        for item, following in itertools.pairwise(order):
            self._learn(Phase.FORWARD, item, following)

    def begins_pass(self, item: Item, phase: Phase) -> bool:
        """True if gathering `item` now starts another pass over the model."""
        return phase is not self._phase or item in self._seen or not self._seen

    def observe(self, item: Item, phase: Phase) -> Item | None:
        """`item` is gathered now: the item to gather next, if one is known."""
        if self.begins_pass(item, phase):
            self.restart(phase)
        last = self._last() if self._last is not None else None
        if last is not None:
            self._learn(phase, last, item)
        self._last = weakref.ref(item)
        self._seen.add(item)
        return self.following(item, phase)

    def following(self, item: Item, phase: Phase) -> Item | None:
        """What `item` is expected to be followed by."""
        known = self._next[phase].get(item)
        if known is None and phase is Phase.BACKWARD:
            known = self._previous.get(item)
        return known() if known is not None else None

    def restart(self, phase: Phase = Phase.FORWARD) -> None:
        """The next item begins a pass."""
        self._phase, self._last = phase, None
        self._seen.clear()

    def _learn(self, phase: Phase, item: Item, following: Item) -> None:
        self._next[phase][item] = weakref.ref(following)
        if phase is Phase.FORWARD:
            self._previous[following] = weakref.ref(item)
