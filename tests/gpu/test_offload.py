"""Hidden updates of the offloaded Adam on real GPUs: the values of updates that nobody passes."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.ranks.test_hidden_updates import (
    READERS,
    compare,
    fails,
    hides,
    in_order,
    read_all,
    write_ordinary_states,
    write_states,
)

import bmtrain as bmt
from bmtrain.optim import host_update
from bmtrain.optim.host_memory import host_buffer

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


@pytest.mark.parametrize("overlap", [False, True])
def test_states_are_not_written_while_they_are_sent_up(overlap: bool) -> None:
    for count in counts():
        run_ranks(write_states, count, overlap, device=None, timeout=300)
    run_ranks(write_ordinary_states, 1, device=None, timeout=300)


def rounds() -> None:
    host_update.STAGED = 1000  # so that a row takes several
    bus = host_update.Bus(bmt.device())
    master = host_buffer(12345, torch.float32, bmt.device())
    assert master.is_pinned()
    master.copy_(torch.randn(12345) * 10.0 ** torch.randint(-9, 5, (12345,)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.zeros(12345, dtype=dtype, device=bmt.device())
        bus.begin()
        with torch.inference_mode():  # an evaluation may be the first to need weights
            bus.upload(weight, master)
        bus.wait()
        assert torch.equal(weight.cpu(), master.to(dtype)), dtype
        bus.upload(weight.zero_(), master)
        bus.wait()
        assert torch.equal(weight.cpu(), master.to(dtype)), dtype


def test_the_device_rounds_as_the_host_does() -> None:
    """The same weights as the host would make of the masters, tails of chunks included."""
    run_ranks(rounds, 1, device=None, timeout=300)


def test_an_error_of_the_worker_comes_up_wherever_values_are_asked_for() -> None:
    run_ranks(fails, 1, device=None, timeout=300)
