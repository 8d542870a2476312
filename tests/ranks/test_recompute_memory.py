"""Plans of recomputation on a device whose memory fills up, as the planner is told: later, on other
ranks, in pieces.
"""

import contextlib
import io
from unittest import mock

from tests.ranks.passes import run
from tests.ranks.runner import on_ranks
from tests.ranks.test_recompute import NUM_LAYERS, ROW, inputs
from tests.ranks.test_recompute_plans import ALL, levels, make_planned, told

import bmtrain as bmt
from bmtrain.recompute.level import Level
from bmtrain.recompute.offload import Host

ROWS = 40
ONE = ROWS * ROW  # bytes of the input of a block
GIB = 2**30


def planned(limit):
    """Memory of so many bytes, and blocks that plan for it."""
    memory = told(limit)
    return memory, make_planned(dropout=0.0)[1]


def steps(blocks, count=1):
    """The plan of all ranks after some steps."""
    for _ in range(count):
        run(blocks, inputs(ROWS))
    return levels()


def num_kept(plan):
    return sum(not level.is_whole() for level in plan)


@on_ranks(2)
def test_what_else_takes_memory_on_any_rank_changes_the_plan_of_all():
    """Something else takes memory, on the last rank only, gives it back, and takes all of it."""
    memory, blocks = planned(100 * ONE)
    last = bmt.rank() == 1
    plans = [steps(blocks, 4)]
    for used, count in ((30, 3), (60, 3), (0, 3), (0, 30), (100, 3)):
        memory.used = used * ONE * last
        plans.append(steps(blocks, count))
    assert plans[0] == plans[1] == ALL
    assert 0 < num_kept(plans[2]) < NUM_LAYERS
    assert plans[3] == plans[2], "a plan is not given up at once for memory that may be taken again"
    assert plans[4] == ALL
    assert num_kept(plans[5]) == 0


@on_ranks(2)
def test_retries_of_the_allocator_on_any_rank_lower_the_plan_of_all():
    """It has to give back cached memory again and again, on the first rank."""
    memory, blocks = planned(66 * ONE)
    assert steps(blocks, 4) == ALL
    tidied = memory.num_tidied
    for _ in range(6):
        memory.retries += bmt.rank() == 0
        plan = steps(blocks)
    assert plan != ALL and memory.num_tidied > tidied


@on_ranks(2)
def test_plans_for_new_shapes_know_what_memory_has_become():
    """Long after the first plan, memory breaks up on the last rank; then inputs grow."""
    memory, blocks = planned(100 * ONE)
    assert steps(blocks, 10) == ALL
    if bmt.rank() == 1:
        memory.shrink(60 * ONE)
    for _ in range(4):
        run(blocks, inputs(ROWS + 1))
    assert num_kept(levels()) < NUM_LAYERS, "planned with the limit of the beginning"


@on_ranks(1)
def test_the_plan_says_what_the_loss_takes():
    """Something before the blocks takes 3 GiB for a moment, the loss 2 GiB, beside 1 GiB."""
    memory, blocks = planned(100 * GIB)
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
    said = f"{NUM_LAYERS} blocks nothing; 4.0 of 100.0 GiB, 2.0 of them for the loss"
    assert said in text.getvalue()


@on_ranks(1)
def test_other_numbers_of_blocks():
    """Fewer, skipped at random, are served by the plan of all; more are measured anew."""
    _, blocks = planned(1000 * ONE)
    plans = [steps(blocks[:count]) for count in (3, 3, 3, 2, 1, 3, 4, 4, 4)]
    assert plans[2:6] == [ALL[:3]] * 4
    assert plans[8] == ALL


@on_ranks(2)
def test_the_host_takes_as_much_as_it_has_room_for():
    """Of the first blocks, whose inputs would stay for longest; on the rank that has least."""
    rooms = {0: 4 * ONE, 1: (2 + 2 * bmt.rank()) * ONE}
    for number, room in rooms.items():
        _, blocks = planned(ONE // 2)
        with mock.patch.object(Host, "room", lambda _: room):  # noqa: B023
            plan = steps(blocks, 4)
        assert plan[:2] == (Level.OFFLOADED,) * 2, plan
        assert (plan[2:] == (Level.BLOCK,) * 2) == (number == 1), plan
