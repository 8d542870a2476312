"""The helper that all tests of several ranks stand on."""

import os
import time
import warnings

import pytest
import torch
from tests.ranks.runner import RankFailure, run_ranks

import bmtrain as bmt
from bmtrain.runtime import world


def place(offset):
    return bmt.rank() + offset, bmt.world_size(), torch.full((2,), float(bmt.rank()))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(world_size):
    results = run_ranks(place, world_size, 10)
    assert [result[:2] for result in results] == [
        (10 + rank, world_size) for rank in range(world_size)
    ]
    assert [result[2].tolist() for result in results] == [
        [rank, rank] for rank in range(world_size)
    ]


def fail_on_one(guilty):
    if bmt.rank() == guilty:
        raise KeyError("spam")
    torch.distributed.barrier()


def test_the_first_error_is_raised_and_the_others_are_ended():
    begin = time.monotonic()
    with pytest.raises(KeyError, match="spam") as caught:
        run_ranks(fail_on_one, 3, 2)
    assert "rank 2 of 3 failed" in str(caught.value.__cause__)
    assert "fail_on_one" in str(caught.value.__cause__)
    assert time.monotonic() - begin < 20


def hang_on_one():
    print("on my way", bmt.rank())
    if bmt.rank() == 1:
        time.sleep(100)


def test_a_hanging_rank_is_shown_and_killed():
    with pytest.raises(RankFailure, match=r"(?s)on my way 1.*hang_on_one"):
        run_ranks(hang_on_one, 2, timeout=10)


def die_on_one():
    if bmt.rank() == 1:
        os._exit(7)
    torch.distributed.barrier()


def test_a_dead_rank_is_reported():
    with pytest.raises((RankFailure, RuntimeError)):
        run_ranks(die_on_one, 2)


def warn():
    warnings.warn("mind the gap", stacklevel=1)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="mind the gap"):
        run_ranks(warn, 1)


def not_joined():
    return bmt.is_initialized(), os.environ["RANK"]


def test_the_function_may_join_by_itself():
    assert run_ranks(not_joined, 2, join=False) == [(False, "0"), (False, "1")]


def default_level():
    return world.current().defaults.zero_level


def test_arguments_of_init_are_handed_on():
    assert run_ranks(default_level, 1, init={"zero_level": 2}) == [2]
