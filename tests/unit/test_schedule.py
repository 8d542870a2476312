"""The learned order of gathers."""

from __future__ import annotations

from bmtrain.shard.engine import Schedule
from bmtrain.shard.label import Phase


class Item:
    """Stands for a residence."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def items(names: str) -> list[Item]:
    return [Item(name) for name in names]


def run(schedule: Schedule[Item], order: list[Item], phase: Phase) -> list[str | None]:
    """What is prefetched at each gather of a pass."""
    return [
        None if found is None else found.name
        for found in (schedule.observe(item, phase) for item in order)
    ]


def test_the_second_pass_knows_what_comes_next() -> None:
    """Forward is learned in one pass; the last item is followed by nothing."""
    schedule, order = Schedule[Item](), items("abc")
    assert run(schedule, order, Phase.FORWARD) == [None, None, None]
    schedule.restart()
    assert run(schedule, order, Phase.FORWARD) == ["b", "c", None]


def test_backward_is_forward_reversed_until_it_is_known() -> None:
    """The first backward is prefetched already; an order of its own replaces the guess."""
    schedule, (a, b, c) = Schedule[Item](), items("abc")
    run(schedule, [a, b, c], Phase.FORWARD)
    assert run(schedule, [c, b, a], Phase.BACKWARD) == ["b", "a", None]
    schedule.restart()
    run(schedule, [a, b, c], Phase.FORWARD)
    run(schedule, [b, c, a], Phase.BACKWARD)
    schedule.restart()
    run(schedule, [a, b, c], Phase.FORWARD)
    assert run(schedule, [b, c, a], Phase.BACKWARD)[0] == "c"


def test_a_plan_serves_the_first_pass() -> None:
    """Lists of blocks tell their order beforehand."""
    schedule, order = Schedule[Item](), items("abc")
    schedule.plan(order)
    assert run(schedule, order, Phase.FORWARD) == ["b", "c", None]


def test_the_last_of_one_forward_is_not_followed_by_the_first_of_the_next() -> None:
    """Parameters may change in between, so nothing is gathered ahead across passes."""
    schedule, order = Schedule[Item](), items("ab")
    for _ in range(3):
        found = run(schedule, order, Phase.FORWARD)
    assert found == ["b", None]
