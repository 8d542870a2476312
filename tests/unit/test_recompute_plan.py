"""The plan of recomputation: pure arithmetic, against tables and against trying everything."""

import itertools
import random

from bmtrain.recompute.plan import Option, Step, choose, describe, need, seconds


def step_of(blocks, turn=30):
    """A step at option 2 in which the loss needs `turn` bytes beyond the inputs of the blocks."""
    kept = list(itertools.accumulate((options[2].kept for options in blocks), initial=0))
    backward = [(place, kept[place] + options[2].peak) for place, options in enumerate(blocks)]
    return Step(2, (*kept[1:-1], kept[-1] + turn), tuple(reversed(backward)))


def test_equal_blocks():
    """Cheap things are computed again everywhere before anything dear is, and that only as often as it
    takes. What is kept is kept by the last blocks.
    """
    # everything kept, cheap things computed again, the whole block, the whole block with its input on
    # the host
    block = Option(15, 20, 3.0), Option(10, 20, 3.05), Option(1, 20, 4.0), Option(0, 22, 4.01)
    blocks = [block] * 10
    for room, counts in {
        180: [10, 0, 0, 0],  # 150 kept and 30 at the turn
        179: [9, 1, 0, 0],
        130: [0, 10, 0, 0],
        129: [1, 8, 1, 0],  # 10 too many for all: one goes, and what is over serves another
        # the room of three inputs, away on the host, makes space for what they hold up
        100: [0, 7, 0, 3],
        40: [0, 1, 0, 9],
        30: [0, 0, 0, 10],
        5: [0, 0, 0, 10],  # nothing fits: what needs least
    }.items():
        choice = choose(blocks, step_of(blocks), room)
        assert [choice.count(number) for number in range(4)] == counts
        assert choice == sorted(choice, reverse=True)


def test_peaks_elsewhere_than_at_the_turn():
    """The backward pass of the first block may need what the last ones have freed by then; what the
    first to be freed keeps is in nobody's way, wherever it stands in the forward pass; and memory may
    be freed in forward: gradients that are cleared, for example.
    """
    wide = Option(0, 100, 2.0), Option(40, 100, 1.0)
    for order, choice in (((2, 1, 0), [0, 0, 1]), ((0, 2, 1), [1, 0, 0])):
        step = Step(0, (0, 0, 60), tuple((place, 100) for place in order))
        assert choose([wide] * 3, step, 100) == choice
        # what block 1 kept would still be there in the backward of the first
        assert need([wide] * 3, step, [0, 1, 0]) == 140
    block = Option(0, 20, 2.0), Option(40, 60, 1.0)
    step = Step(0, (90, 50, 30), ((2, 20), (1, 20), (0, 20)))
    for choice, bytes_ in (([0, 0, 1], 90), ([0, 1, 1], 110), ([1, 0, 0], 130)):
        assert need([block] * 3, step, choice) == bytes_
    assert choose([block] * 3, step, 109) == [0, 0, 1]
    assert choose([block] * 3, step, 110) == [0, 1, 1]


def test_never_more_than_the_room_and_at_most_one_change_from_the_best():
    """Against every possible plan, for blocks of all kinds."""
    draw = random.Random(3)
    for _ in range(150):
        blocks = []
        for _ in range(draw.randint(1, 5)):
            kept = sorted((draw.randint(0, 30) for _ in range(3)), reverse=True)
            times = sorted(draw.random() for _ in range(3))
            pairs = zip(kept, times, strict=True)
            blocks.append(tuple(Option(k, kept[0] + 5, t) for k, t in pairs))
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


def test_an_option_that_is_no_faster_is_never_chosen():
    """Recomputing cheap things may even save time: then nothing else is kept, whatever the room."""
    block = Option(15, 20, 3.0), Option(10, 20, 2.9), Option(1, 20, 4.0)
    assert choose([block] * 4, step_of([block] * 4), 1000) == [1] * 4
    same = Option(1, 20, 3.0), Option(15, 20, 3.0), Option(15, 20, 4.0)
    assert choose([same] * 4, step_of([same] * 4), 1000) == [0] * 4
    names = ("nothing", "norms and activations", "everything")
    assert describe(names, [1, 0, 0]) == "2 blocks nothing, 1 norms and activations"
    assert describe(names, [2]) == "1 block everything"
