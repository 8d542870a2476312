"""Plans of recomputation on a device whose memory fills up, as the planner is told: later, on other
ranks, in pieces.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

from tests.ranks.runner import run_ranks
from tests.ranks.test_recompute import NUM_LAYERS, ROW, inputs, run
from tests.ranks.test_recompute_plans import make_planned, planner

import bmtrain as bmt
from bmtrain.recompute.level import Level
from bmtrain.recompute.memory import Uncounted, memory_of
from bmtrain.runtime import world

ROWS = 40
ONE = ROWS * ROW  # bytes of the input of a block
GIB = 2**30
ALL = (Level.NOTHING,) * NUM_LAYERS


class Told(Uncounted):
    """Says what the test says."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.used = self.retries = self.peak = 0
        self.num_tidied = 0

    def shrink(self, limit: int) -> None:
        """There is less from now on."""
        self._limit = limit

    def allocated(self) -> int:
        return self.used

    def take_peak(self) -> int:
        peak, self.peak = max(self.peak, self.used), 0
        return peak

    def num_retries(self) -> int:
        return self.retries

    def tidy(self) -> None:
        self.num_tidied += 1


def told(limit: int) -> Told:
    memory = Told(limit)
    world.current().services[memory_of] = memory
    return memory


def steps(blocks: Any, count: int = 1) -> tuple[Level, ...]:
    """The plan after some steps."""
    for _ in range(count):
        run(blocks, inputs(ROWS))
    return planner().levels


def num_kept(levels: tuple[Level, ...]) -> int:
    return sum(not level.is_whole() for level in levels)


def filling() -> list[tuple[Level, ...]]:
    """Something else takes memory, on the last rank only, gives it back, and takes all of it."""
    memory, last = told(100 * ONE), bmt.rank() == bmt.world_size() - 1
    _, blocks = make_planned(dropout=0.0)
    plans = [steps(blocks, 4)]
    for used, count in ((30, 3), (60, 3), (0, 3), (0, 30), (100, 3)):
        memory.used = used * ONE if last else 0
        plans.append(steps(blocks, count))
    return plans


def test_what_else_takes_memory_on_any_rank_changes_the_plan_of_all() -> None:
    first, second = run_ranks(filling, 2)
    assert first == second
    assert first[0] == first[1] == ALL
    assert 0 < num_kept(first[2]) < NUM_LAYERS
    assert first[3] == first[2], "a plan is not given up at once for memory that may be taken again"
    assert first[4] == ALL
    assert num_kept(first[5]) == 0


def retrying() -> list[tuple[Level, ...]]:
    """The allocator has to give back cached memory again and again, on the first rank."""
    memory = told(66 * ONE)
    _, blocks = make_planned(dropout=0.0)
    plans = [steps(blocks, 4)]
    tidied = memory.num_tidied
    for _ in range(6):
        memory.retries += int(bmt.rank() == 0)
        plans.append(steps(blocks))
    assert memory.num_tidied > tidied
    return plans


def test_retries_of_the_allocator_on_any_rank_lower_the_plan_of_all() -> None:
    first, second = run_ranks(retrying, 2)
    assert first == second
    assert first[0] == ALL
    assert first[-1] != ALL


def breaking_up() -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Long after the first plan, memory breaks up on the last rank; then inputs grow."""
    memory = told(100 * ONE)
    _, blocks = make_planned(dropout=0.0)
    before = steps(blocks, 10)
    if bmt.rank() == bmt.world_size() - 1:
        memory.shrink(60 * ONE)
    for _ in range(4):
        run(blocks, inputs(ROWS + 1))
    return before, planner().levels


def test_plans_for_new_shapes_know_what_memory_has_become() -> None:
    first, second = run_ranks(breaking_up, 2)
    assert first == second
    assert first[0] == ALL
    assert num_kept(first[1]) < NUM_LAYERS, "planned with the limit of the beginning"


def with_a_loss() -> str:
    """Something before the blocks takes 3 GiB for a moment, the loss 2 GiB, beside 1 GiB."""
    memory = told(100 * GIB)
    _, blocks = make_planned(dropout=0.0)
    memory.used = GIB
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(4):
            x = inputs(ROWS) * 1.5
            for number, block in enumerate(blocks):
                memory.peak = memory.used if number else 4 * GIB
                x = block(x)
            memory.peak = 3 * GIB
            x.square().sum().backward()
    return text.getvalue()


def test_the_plan_says_what_the_loss_takes() -> None:
    """Not what the blocks before it took."""
    (said,) = run_ranks(with_a_loss, 1)
    assert f"{NUM_LAYERS} blocks nothing; 4.0 of 100.0 GiB, 2.0 of them for the loss" in said


def leaving_out() -> list[tuple[Level, ...]]:
    """Blocks that are skipped at random, on all ranks alike, and come back."""
    told(1000 * ONE)
    _, blocks = make_planned(dropout=0.0)
    layers = list(blocks)
    return [steps(layers[:count]) for count in (3, 3, 3, 2, 1, 3, 4, 4, 4)]


def test_other_numbers_of_blocks() -> None:
    """Fewer are served by the plan of all; more are measured anew."""
    plans = run_ranks(leaving_out, 1)[0]
    assert plans[2:6] == [ALL[:3]] * 4
    assert plans[8] == ALL
