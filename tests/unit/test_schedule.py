"""The learned order of gathers; letters stand for residences."""

from bmtrain.shard.engine import Schedule
from bmtrain.shard.label import Phase

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def run(schedule, order, phase=FORWARD):
    """What is prefetched at each gather of a pass; a dash for nothing."""
    return "".join(schedule.observe(item, phase) or "-" for item in order)


def test_the_second_pass_knows_what_comes_next():
    """Forward is learned in one pass; the last item is followed by nothing: parameters may change in
    between, so nothing is gathered ahead across passes.
    """
    schedule = Schedule[str]()
    assert run(schedule, "abc") == "---"
    schedule.restart()
    assert run(schedule, "abc") == "bc-"
    assert run(schedule, "abc") == run(schedule, "abc") == "bc-"
    # a guess that is wrong costs one gather, once
    assert run(schedule, "ab") + run(schedule, "ab") == "bcb-"
    assert run(schedule, "c", BACKWARD) == "-"


def test_backward_is_forward_reversed_until_it_is_known():
    """The first backward is prefetched already; an order of its own replaces the guess."""
    schedule = Schedule[str]()
    run(schedule, "abc")
    assert run(schedule, "cba", BACKWARD) == "ba-"
    for found in "ac":
        schedule.restart()
        run(schedule, "abc")
        assert run(schedule, "bca", BACKWARD)[0] == found


def test_a_plan_serves_the_first_pass():
    """Lists of blocks tell their order beforehand. What is interrupted has no successor."""
    schedule = Schedule[str]()
    schedule.plan("abc")
    assert run(schedule, "abc") == "bc-"
    other = Schedule[str]()
    other.observe("a", FORWARD)
    other.interrupt()
    assert run(other, "b") + run(other, "ab") == "---"


def test_what_is_gathered_no_more_is_forgotten():
    """Pairs too of which one is gathered still; what came back in time is known."""
    schedule = Schedule[str]()
    schedule.memory = 8  # the end of a pass and the beginning of the next count as one each
    for order in ("xa", "ab", "ab", "cd", "ab", "ab", "ab", "ab"):
        schedule.restart()
        run(schedule, order)
    for order, found in ("cd", "d-"), ("xa", "-b"):
        schedule.restart()
        assert run(schedule, order) == found
