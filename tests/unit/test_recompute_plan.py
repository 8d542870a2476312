"""The plan of recomputation: pure arithmetic, against tables and against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from bmtrain.recompute.plan import Option, Options, Step, choose, describe, need, seconds

GIB = 2**30
# Per block: everything kept, cheap things computed again, the whole block, the whole block with its
# input on the host.
BLOCK: Options = (
    Option(15, 20, 3.0),
    Option(10, 20, 3.05),
    Option(1, 20, 4.0),
    Option(0, 22, 4.01),
)


def step_of(blocks: list[Options], turn: int = 30) -> Step:
    """A step at option 2 in which the loss needs `turn` bytes beyond the inputs of the blocks."""
    kept = list(itertools.accumulate((options[2].kept for options in blocks), initial=0))
    backward = [(place, kept[place] + options[2].peak) for place, options in enumerate(blocks)]
    return Step(2, (*kept[1:-1], kept[-1] + turn), tuple(reversed(backward)))


@pytest.mark.parametrize(
    ("room", "counts"),
    [
        (180, (10, 0, 0, 0)),  # 150 kept and 30 at the turn
        (179, (9, 1, 0, 0)),
        (130, (0, 10, 0, 0)),
        (129, (1, 8, 1, 0)),  # 10 too many for all: one goes, and what is over serves another
        # the room of three inputs, away on the host, makes space for what they hold up
        (100, (0, 7, 0, 3)),
        (40, (0, 1, 0, 9)),
        (30, (0, 0, 0, 10)),
        (5, (0, 0, 0, 10)),  # nothing fits: what needs least
    ],
)
def test_equal_blocks(room: int, counts: tuple[int, ...]) -> None:
    """Cheap things are computed again everywhere before anything dear is, and that only as often as
    it takes.
    """
    choice = choose([BLOCK] * 10, step_of([BLOCK] * 10), room)
    assert tuple(choice.count(number) for number in range(4)) == counts
    assert choice == sorted(choice, reverse=True), "what is kept is kept by the last blocks"


def test_blocks_at_the_front_recompute() -> None:
    """The backward pass of the first block may need what the last ones have freed by then."""
    wide = Option(0, 100, 2.0), Option(40, 100, 1.0)
    step = Step(0, (0, 0, 60), ((2, 100), (1, 100), (0, 100)))
    # what block 1 kept would still be there in the backward of block 2
    assert choose([wide] * 3, step, 100) == [0, 0, 1]
    assert need([wide] * 3, step, [0, 1, 0]) == 140


def test_backward_in_another_order() -> None:
    """What the first to be freed keeps is in nobody's way, wherever it stands in the forward
    pass.
    """
    wide = Option(0, 100, 2.0), Option(40, 100, 1.0)
    step = Step(0, (0, 0, 60), ((0, 100), (2, 100), (1, 100)))
    assert choose([wide] * 3, step, 100) == [1, 0, 0]


def test_a_peak_early_in_forward_is_in_the_way_of_the_blocks_before_it_only() -> None:
    """Memory may be freed in forward: gradients that are cleared, for example."""
    block = Option(0, 20, 2.0), Option(40, 60, 1.0)
    step = Step(0, (90, 50, 30), ((2, 20), (1, 20), (0, 20)))
    assert need([block] * 3, step, [0, 0, 1]) == 90
    assert need([block] * 3, step, [0, 1, 1]) == 110
    assert need([block] * 3, step, [1, 0, 0]) == 130
    assert choose([block] * 3, step, 109) == [0, 0, 1]
    assert choose([block] * 3, step, 110) == [0, 1, 1]


def test_never_more_than_the_room_and_at_most_one_change_from_the_best() -> None:
    """Against every possible plan, for blocks of all kinds."""
    draw = random.Random(3)
    for _ in range(150):
        blocks: list[Options] = []
        for _ in range(draw.randint(1, 5)):
            kept = sorted((draw.randint(0, 30) for _ in range(3)), reverse=True)
            times = sorted(draw.random() for _ in range(3))
            blocks.append(
                tuple(Option(k, kept[0] + 5, t) for k, t in zip(kept, times, strict=True))
            )
        step, room = step_of(blocks, 10), draw.randint(10, 120)
        choice = choose(blocks, step, room)
        plans = list(itertools.product(range(3), repeat=len(blocks)))
        fitting = [plan for plan in plans if need(blocks, step, plan) <= room]
        if not fitting:
            assert need(blocks, step, choice) == min(need(blocks, step, plan) for plan in plans)
            continue
        assert need(blocks, step, choice) <= room
        largest = max(options[2].seconds - options[0].seconds for options in blocks)
        assert seconds(blocks, choice) <= min(seconds(blocks, plan) for plan in fitting) + largest


def test_an_option_that_is_no_faster_is_never_chosen() -> None:
    """Recomputing cheap things may even save time: then nothing else is kept, whatever the room."""
    block = Option(15, 20, 3.0), Option(10, 20, 2.9), Option(1, 20, 4.0)
    assert choose([block] * 4, step_of([block] * 4), 1000) == [1] * 4


def test_words() -> None:
    names = ("nothing", "norms and activations", "everything")
    assert describe(names, [1, 0, 0]) == "2 blocks nothing, 1 norms and activations"
    assert describe(names, [2]) == "1 block everything"
