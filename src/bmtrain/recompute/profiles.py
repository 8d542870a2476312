"""Measurements and plans of passes over a model, by the shape of their inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from bmtrain.recompute.level import Level
from bmtrain.recompute.plan import Option, Step

Shape = tuple[int, ...]
NUM_DIMS = 12  # number of dims of the arguments of a call that decide which plan serves it
_MAX_PROFILES = 8
_OFTEN = 4  # a shape gets a plan of its own once it has come this often


@dataclasses.dataclass(frozen=True)
class PassKey:
    """What identifies a pass at its start.

    kind: checksum of the kind of its first call. shape: dims of the first call's inputs, the
    maximum over ranks; the first `num_dims` of them are those of the first input.
    """

    kind: int
    shape: Shape
    num_dims: int


@dataclasses.dataclass
class Profile:
    """Measurements and plan for passes of one kind with inputs up to some shape.

    `kinds`, `shapes`, `options` and `forward` have one entry per call of a pass. `forward` and
    `backward` are peaks, as in `Step`; `loss` is the part of the last one of `forward` that came
    with that call; `choice` is the plan.
    """

    key: PassKey
    kinds: list[object] = dataclasses.field(default_factory=list)
    shapes: list[Shape] = dataclasses.field(default_factory=list)
    options: list[dict[Level, Option]] = dataclasses.field(default_factory=list)
    forward: list[int] = dataclasses.field(default_factory=list)
    loss: int = 0
    backward: dict[int, int] = dataclasses.field(default_factory=dict)  # in backward's order
    measured: frozenset[Level] = frozenset()
    agreed: tuple[list[list[Option]], Step] | None = None
    choice: list[int] | None = None
    told: list[int] | None = None  # the last plan that was printed

    def clear(self) -> None:
        """Drop everything but the key."""
        self.kinds, self.shapes, self.options = [], [], []
        self.forward, self.loss, self.backward = [], 0, {}
        self.measured, self.agreed, self.choice = frozenset(), None, None

    def append(self, kind: object, shape: Shape) -> None:
        """Add the next call."""
        self.kinds.append(kind)
        self.shapes.append(padded(shape))
        self.options.append({})

    def covers(self, number: int, kind: object, shape: Shape) -> bool:
        """Whether call `number` is of the measured kind and no larger."""
        return (
            number < len(self.kinds)
            and self.kinds[number] == kind
            and _is_within(padded(shape), self.shapes[number])
        )

    def figures(self, levels: Sequence[Level], unknown: Option) -> list[float]:
        """All measurements as one flat list, in a fixed order, for a reduction over ranks."""
        dims = [dim for shape in self.shapes for dim in shape]
        options = [calls.get(level, unknown) for calls in self.options for level in levels]
        prices = [x for each in options for x in (each.kept, each.peak, each.seconds)]
        peaks = [*self.forward, self.loss, *self.backward.values()]
        return [*map(float, [*dims, *prices, *peaks])]


class Profiles:
    """At most `_MAX_PROFILES` profiles; the oldest is dropped."""

    def __init__(self) -> None:
        self._profiles: list[Profile] = []
        self._counts: dict[PassKey, int] = {}

    def serving(self, key: PassKey) -> Profile:
        """The profile of the smallest inputs that cover `key` in every dim.

        Makes a new one if none covers it, or if `key` has become frequent.
        """
        serving = [
            p
            for p in self._profiles
            if p.key.kind == key.kind and _is_within(key.shape, p.key.shape)
        ]
        if serving:
            best = min(serving, key=lambda p: math.prod(filter(None, p.key.shape)))
            is_full = len(self._profiles) == _MAX_PROFILES
            if best.key == key or is_full or not self._is_frequent(key):
                return best
        self._profiles = [*self._profiles, Profile(key)][-_MAX_PROFILES:]
        return self._profiles[-1]

    def remove(self, profile: Profile) -> None:
        """Drop a profile that has turned out wrong."""
        self._profiles = [other for other in self._profiles if other is not profile]

    def _is_frequent(self, key: PassKey) -> bool:
        if len(self._counts) > 64 * _MAX_PROFILES:
            self._counts.clear()
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] >= _OFTEN


def padded(shape: Shape) -> Shape:
    """The first NUM_DIMS dims, padded with zeros."""
    return (*shape, *[0] * NUM_DIMS)[:NUM_DIMS]


def _is_within(small: Shape, large: Shape) -> bool:
    return all(a <= b for a, b in zip(small, large, strict=True))
