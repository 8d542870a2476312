"""Gather order as data: what came next last time will come next again."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Phase(enum.Enum):
    """Forward passes and backward passes (with the recomputation inside them) have orders of their
    own.
    """

    FORWARD = "forward"
    BACKWARD = "backward"


class Schedule(Generic[Item]):
    """Learns which item is gathered after which, per phase; before it knows, backward is forward
    reversed.

    A wrong guess costs one gather, once: a successor that did not come is forgotten. Items met
    again within one pass start a new pass, so that the last item of one forward is never followed
    by the first of the next: parameters may change in between. Items are kept alive on purpose: all
    ranks must guess alike, whenever each of them drops a model.
    """

    def __init__(self) -> None:
        self._next: dict[Phase, dict[Item, Item]] = {phase: {} for phase in Phase}
        self._previous: dict[Item, Item] = {}
        self._last: Item | None = None
        self._seen: set[Item] = set()
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
        if self._last is not None:
            self._learn(phase, self._last, item)
        self._last = item
        self._seen.add(item)
        return self.following(item, phase)

    def following(self, item: Item, phase: Phase) -> Item | None:
        """What `item` is expected to be followed by."""
        known = self._next[phase].get(item)
        return self._previous.get(item) if known is None and phase is Phase.BACKWARD else known

    def interrupt(self) -> None:
        """What is gathered next must not be gathered early: it does not follow what came last.

        Other ranks may have to receive something from this one before they come to that gather.
        """
        self._last = None

    def restart(self, phase: Phase = Phase.FORWARD) -> None:
        """The next item begins a pass; nothing came after the last of the pass before."""
        if self._last is not None:
            following = self._next[self._phase].pop(self._last, None)
            if following is not None and self._previous.get(following) is self._last:
                del self._previous[following]
        self._phase, self._last = phase, None
        self._seen.clear()

    def _learn(self, phase: Phase, item: Item, following: Item) -> None:
        self._next[phase][item] = following
        if phase is Phase.FORWARD:
            self._previous[following] = item
