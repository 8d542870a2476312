"""Hidden updates of the offloaded Adam on real GPUs: the values of updates that nobody passes."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.ranks.test_hidden_updates import READERS, compare, fails, hides, in_order, read_all

pytestmark = pytest.mark.gpu


def counts() -> list[int]:
    """One rank, and one per GPU."""
    return sorted({1, torch.cuda.device_count()} - {0}) or [1]


@pytest.mark.parametrize("first", [0, 8])
def test_programs_see_the_same_values(first: int) -> None:
    """Clipping, overflow, accumulation, groups, writes, states partly on the GPU: bit for bit."""
    for count in counts():
        run_ranks(compare, count, list(range(first, first + 8)), device=None, timeout=300)


def test_every_reader_waits(tmp_path: pathlib.Path) -> None:
    for count in counts():
        run_ranks(read_all, count, list(READERS), tmp_path / str(count), device=None, timeout=300)


@pytest.mark.parametrize("zero_level", [2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_updates_of_ordinary_programs_are_hidden(zero_level: int, use_checkpoint: bool) -> None:
    for count in counts():
        run_ranks(hides, count, zero_level, use_checkpoint, device=None, timeout=300)


def test_a_block_waits_for_its_own_update_only() -> None:
    for count in counts():
        run_ranks(in_order, count, device=None, timeout=300)


def test_an_error_of_the_worker_comes_up_wherever_values_are_asked_for() -> None:
    run_ranks(fails, 1, device=None, timeout=300)
