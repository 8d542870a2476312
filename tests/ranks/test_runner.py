"""The helper that all tests of several ranks stand on."""

import os
import time
import warnings

import pytest
import torch
from tests.ranks.runner import RankFailure, run_ranks

import bmtrain as bmt


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
        run_ranks(hang_on_one, 2, timeout=6)


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
