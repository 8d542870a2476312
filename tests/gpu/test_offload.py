"""Hidden updates of the offloaded Adam on real GPUs: the values of updates that nobody passes."""

import pathlib

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.ranks.test_hidden_updates import (
    READERS,
    Run,
    compare,
    fails,
    hides,
    in_files,
    make_model,
    read_all,
    train,
    write_ordinary_states,
    write_states,
)

import bmtrain as bmt
from bmtrain.optim import AdamOffloadOptimizer, OptimManager
from bmtrain.optim.streaming import host_zeros

pytestmark = pytest.mark.gpu
RANKS = torch.cuda.device_count()
# Models that run whole wait for updates before their forward pass: nothing would be hidden.
APART = {"compile": False}


@pytest.mark.parametrize("first", [0, 8])
def test_programs_see_the_same_values(first):
    """Clipping, overflow, accumulation, groups, writes, states partly on the GPU: bit for bit."""
    run_ranks(compare, RANKS, list(range(first, first + 8)), device=None, timeout=300, init=APART)


def test_every_reader_waits(tmp_path):
    run_ranks(read_all, RANKS, list(READERS), tmp_path, device=None, timeout=300, init=APART)


@pytest.mark.parametrize("zero_level", [2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_updates_of_ordinary_programs_are_hidden(zero_level, use_checkpoint):
    run_ranks(hides, RANKS, zero_level, use_checkpoint, device=None, timeout=300, init=APART)


@pytest.mark.parametrize("overlap", [False, True])
def test_states_are_not_written_while_they_are_on_their_way(overlap):
    run_ranks(write_states, RANKS, overlap, device=None, timeout=300, init=APART)
    run_ranks(write_ordinary_states, 1, device=None, timeout=300, init=APART)


def places(first):
    """They go to the GPU, which has room, in the first step; those that are laid out before, as a
    resume does, are moved there.
    """
    model = make_model(torch.bfloat16, 3)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05, device_bytes="auto")
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    run = Run(model, optimizer, manager, pathlib.Path())
    if first:
        optimizer.state_dict()
        assert optimizer.state[run.param]["exp_avg"].local.device.type == "cpu"
    train(run, 0)
    assert optimizer.state[run.param]["exp_avg"].local.device.type == "cuda"


def test_states_in_files(tmp_path):
    run_ranks(in_files, RANKS, tmp_path, device=None, timeout=300, init=APART)


@pytest.mark.parametrize("first", [False, True])
def test_states_place_themselves(first):
    run_ranks(places, RANKS, first, device=None, timeout=300, init=APART)


def is_in_host_memory():
    device = bmt.device()
    for dtype in (torch.float32, torch.int16, torch.uint8):
        memory = host_zeros(12345, dtype, device)
        assert memory.is_pinned() and not memory.any()


def test_host_memory_is_locked():
    """Else copies would not go on beside the program."""
    run_ranks(is_in_host_memory, 1, device=None, timeout=300, init=APART)


def test_an_error_of_an_update_comes_up_wherever_values_are_asked_for():
    run_ranks(fails, 1, device=None, timeout=300, init=APART)
