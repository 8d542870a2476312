"""Which block recomputes how much, as arithmetic: whole numbers of bytes and seconds in, one option
per block out.

A training step keeps something of every block from forward to backward, and backward frees it
again, last block first. So memory is fullest at the turn (all blocks have kept theirs, the loss
computes) or in the backward pass of some block (what it and all before it have kept, and what it
needs itself). Both have been measured once with every block at the `base` option; a plan changes
them by what its options keep more or less.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Option:
    """One way for a block to run, and its price.

    kept: bytes from its forward to its backward pass.
    peak: most bytes at any time of its backward pass beyond what was there before its forward pass.
    seconds: its forward and backward pass together.
    """

    kept: int
    peak: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step with every block at option number `base` needs beyond what is there before it:
    bytes.

    turn: most from the beginning to where backward starts. backward: the places of blocks (their
    forward passes are numbered from 0) in the order in which backward comes to them, each
        with the most while it passes through.
    """

    base: int
    turn: int
    backward: tuple[tuple[int, int], ...]


Options = Sequence[Option]  # of one block; the same number means the same way everywhere


def need(blocks: Sequence[Options], step: Step, choice: Sequence[int]) -> int:
    """The most bytes beyond those of before the step, when each block runs at the option of
    `choice`.
    """
    more = [
        options[number].kept - options[step.base].kept
        for options, number in zip(blocks, choice, strict=True)
    ]
    kept = sum(more)
    most = step.turn + kept
    for place, own in step.backward:
        kept -= more[place]
        most = max(
            most, own + kept + blocks[place][choice[place]].peak - blocks[place][step.base].peak
        )
    return most


def seconds(blocks: Sequence[Options], choice: Sequence[int]) -> float:
    """Forward and backward passes of all blocks."""
    return sum(options[number].seconds for options, number in zip(blocks, choice, strict=True))


def choose(blocks: Sequence[Options], step: Step, room: int) -> list[int]:
    """The option of each block, for little time within `room` bytes; where nothing fits, what needs
    least.

    Every block starts at its smallest option. The changes that save time are then made in the order
    of the time they save per byte, as long as they fit; of equal blocks that to which backward
    comes first goes first, because what it keeps is the first to be freed. Changes that another one
    beats are left out (options that count lie on the convex hull of all), so this is the best plan
    if the room happens to end between two changes, and else misses it by at most one change: the
    bound of the greedy solution of a knapsack. What room is left then goes to any change that fits.
    """
    order = [place for place, _ in step.backward]
    # a block to which backward does not come stays as it was measured
    choice = [step.base] * len(blocks)
    for place in order:
        choice[place] = _smallest(blocks[place])
    changes = [
        (_rate(blocks[place][old], blocks[place][new]), place, new)
        for place in order
        for old, new in itertools.pairwise(_hull(blocks[place]))
    ]
    # stable: equal ones stay in the order of backward
    for _, place, new in sorted(changes, key=lambda change: -change[0]):
        _change(blocks, step, room, choice, place, new)
    for place in order:
        for new in sorted(range(len(blocks[place])), key=lambda n: blocks[place][n].seconds):
            _change(blocks, step, room, choice, place, new)
    return choice


def _smallest(options: Options) -> int:
    return min(
        range(len(options)), key=lambda number: (options[number].kept, options[number].seconds)
    )


def _change(
    blocks: Sequence[Options], step: Step, room: int, choice: list[int], place: int, new: int
) -> None:
    """Give a block option `new` if that saves time and fits."""
    old = choice[place]
    if blocks[place][new].seconds >= blocks[place][old].seconds:
        return
    choice[place] = new
    if need(blocks, step, choice) > room:
        choice[place] = old


def _rate(old: Option, new: Option) -> float:
    """Seconds that `new` saves per byte more than `old`."""
    return (old.seconds - new.seconds) / max(new.kept - old.kept, 1)


def _hull(options: Options) -> list[int]:
    """Numbers of the options that no mixture of others beats, by growing memory and falling
    time.
    """
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
    """What the plan takes more than every block at its fastest, as a part of that."""
    least = sum(min(option.seconds for option in options) for options in blocks)
    return seconds(blocks, choice) / least - 1 if least else 0.0


def describe(names: Sequence[str], choice: Sequence[int]) -> str:
    """How many blocks run at which option, in words: "28 blocks nothing, 12 norms and
    activations".
    """
    counts = [(choice.count(number), name) for number, name in enumerate(names) if number in choice]
    first, *others = [f"{count} {name}" for count, name in counts]
    number, _, name = first.partition(" ")
    return ", ".join([f"{number} block{'' if number == '1' else 's'} {name}", *others])
