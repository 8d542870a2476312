"""Chooses how much each block recomputes: bytes and seconds in, one option per block out.

A training step keeps activations of every block from forward to backward, and backward frees them,
last block first. So memory peaks in the forward pass of some block (the last one's includes the
loss), or in the backward pass of some block: each holds its own and those of all blocks before it,
and needs working memory. Both kinds of peaks have been measured once with every block at option
`base`. A plan moves them by what its options keep more or less.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a block, and its cost.

    kept: bytes held from its forward to its backward pass.
    peak: highest bytes during its backward pass, beyond those before its forward pass.
    seconds: of its forward and backward pass together.
    """

    kept: int
    peak: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Step:
    """Peak memory of a step with every block at option `base`, in bytes beyond its start.

    forward: peak of each block from its forward pass until that of the next one, or until backward.
    backward: the blocks in the order of backward, each by its number in the forward pass, from 0,
    with the peak during its backward pass.
    """

    base: int
    forward: tuple[int, ...]
    backward: tuple[tuple[int, int], ...]


Options = Sequence[Option]  # of one block; a number means the same level for all blocks


def need(blocks: Sequence[Options], step: Step, choice: Sequence[int]) -> int:
    """Peak bytes of a step beyond its start, with each block at its option in `choice`."""
    more = [
        options[number].kept - options[step.base].kept
        for options, number in zip(blocks, choice, strict=True)
    ]
    so_far = list(itertools.accumulate(more))
    most = max(map(operator.add, step.forward, so_far), default=0)
    kept = sum(more)
    for place, own in step.backward:
        kept -= more[place]
        most = max(
            most, own + kept + blocks[place][choice[place]].peak - blocks[place][step.base].peak
        )
    return most


def seconds(blocks: Sequence[Options], choice: Sequence[int]) -> float:
    """Seconds of the forward and backward passes of all blocks."""
    return sum(options[number].seconds for options, number in zip(blocks, choice, strict=True))


def choose(blocks: Sequence[Options], step: Step, room: int) -> list[int]:
    """Options for the blocks that take little time and fit into `room` bytes.

    If nothing fits, every block that backward reaches gets the option that keeps least.

    Every block starts at its smallest option. Changes that save time are then made in the order of
    seconds saved per byte, as long as they fit. Among equal blocks the first in backward goes
    first, because its memory is freed first. Only options on the convex hull take part: others are
    beaten by a mix. This is the greedy solution of a knapsack, optimal if `room` ends exactly
    between two changes, else off by at most one change. The slack that is left then goes to any
    change that fits.
    """
    order = [place for place, _ in step.backward]
    # A block that backward does not reach stays as it was measured.
    choice = [step.base] * len(blocks)
    for place in order:
        choice[place] = min((x.kept, x.seconds, n) for n, x in enumerate(blocks[place]))[2]
    changes = [
        (_rate(blocks[place][old], blocks[place][new]), place, new)
        for place in order
        for old, new in itertools.pairwise(_hull(blocks[place]))
    ]
    # Stable: equal rates stay in the order of backward.
    for _, place, new in sorted(changes, key=lambda change: -change[0]):
        _change(blocks, step, room, choice, place, new)
    for place in order:
        for new in sorted(range(len(blocks[place])), key=lambda n: blocks[place][n].seconds):
            _change(blocks, step, room, choice, place, new)
    return choice


def _change(
    blocks: Sequence[Options], step: Step, room: int, choice: list[int], place: int, new: int
) -> None:
    """Give block `place` option `new` if that saves time and fits."""
    old = choice[place]
    if blocks[place][new].seconds >= blocks[place][old].seconds:
        return
    choice[place] = new
    if need(blocks, step, choice) > room:
        choice[place] = old


def _rate(old: Option, new: Option) -> float:
    """Seconds saved per additional byte when going from `old` to `new`."""
    return (old.seconds - new.seconds) / max(new.kept - old.kept, 1)


def _hull(options: Options) -> list[int]:
    """Options on the lower convex hull of (kept, seconds), by growing memory and falling time."""
    hull: list[int] = []
    for number in sorted(range(len(options)), key=lambda n: (options[n].kept, options[n].seconds)):
        if hull and options[number].seconds >= options[hull[-1]].seconds:
            continue
        while len(hull) > 1 and _rate(options[hull[-2]], options[hull[-1]]) <= _rate(
            options[hull[-1]], options[number]
        ):
            hull.pop()
        hull.append(number)
    return hull


def more_time(blocks: Sequence[Options], choice: Sequence[int]) -> float:
    """Time of the plan beyond every block at its fastest option, as a fraction of the latter."""
    least = sum(min(option.seconds for option in options) for options in blocks)
    return seconds(blocks, choice) / least - 1 if least else 0.0


def describe(names: Sequence[str], choice: Sequence[int]) -> str:
    """The number of blocks per option in words: "28 blocks nothing, 12 norms and activations"."""
    counts = [(choice.count(number), name) for number, name in enumerate(names) if number in choice]
    (count, name), *others = counts
    first = f"{count} block{'' if count == 1 else 's'} {name}"
    return ", ".join([first, *[f"{count} {name}" for count, name in others]])
