"""Which GPU a rank gets, on machines that are made up."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.launchers import TORCHRUN, Launch


@pytest.fixture
def machine(monkeypatch):
    """A function that says how many GPUs every process sees."""

    def shows(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.delenv(TORCHRUN, raising=False)
    return shows


def test_a_rank_gets_its_own_gpu(machine, monkeypatch):
    machine(2)
    for wanted, found in {
        None: "cuda:1",
        "cuda": "cuda:1",
        "cuda:0": "cuda:0",
        "cpu": "cpu",
    }.items():
        assert world._pick_device(
            1, None if wanted is None else torch.device(wanted)
        ) == torch.device(found)
    for local_rank, wanted, words in (
        (2, None, "local rank 2 has no GPU of its own"),
        (0, "cuda:2", "cuda:2' does not exist"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            world._pick_device(local_rank, None if wanted is None else torch.device(wanted))
    machine(1)  # each task sees its own
    assert world._pick_device(3, None) == torch.device("cuda", 0)
    monkeypatch.setenv(TORCHRUN, "x")  # all see the same
    with pytest.raises(ConfigurationError, match="no GPU of its own"):
        world._pick_device(3, None)
    machine(0)
    assert world._pick_device(3, None) == torch.device("cpu")


def test_ranks_of_a_host_settle(machine, monkeypatch):
    """The owner of an adopted group chooses, if it has: the current GPUs of a host's ranks are different
    then. Else a GPU is shown to each or to all: one each is well, one for all is an error on all ranks.
    """
    rank_of = threading.local()

    def settle(current, names, local_rank, hosts="hhh"):
        """Device, or error, of each rank; `names` has a letter for each rank: its GPU's name, and
        `hosts` its host's.
        """
        store = dist.HashStore()  # type: ignore[attr-defined]
        monkeypatch.setattr(world, "_current_gpu", lambda: current[rank_of.value])
        monkeypatch.setattr(world, "_gpu_name", lambda chosen: names[rank_of.value])
        monkeypatch.setattr(world, "this_host", lambda: (hosts[rank_of.value], ""))

        def of(rank):
            rank_of.value = rank
            launch = Launch(rank=rank, size=3, local_rank=rank if local_rank else None)
            try:
                return world._settle(launch, store, None, not local_rank)[1].index
            except ConfigurationError as error:
                return str(error)

        with ThreadPoolExecutor(3) as pool:
            return [*pool.map(of, range(3))]

    machine(3)
    assert settle([2, 0, 1], "abc", False) == [2, 0, 1]
    assert settle([0, 0, 0], "abc", False) == [0, 1, 2]
    machine(1)
    assert settle([None] * 3, "abc", True) == [0, 0, 0]
    for names, pair in (("abb", "1 and 2 have the same GPU (b)"), ("aab", "0 and 1 have the same")):
        found = settle([None] * 3, names, True)
        assert all(error.startswith(f"ranks {pair}") for error in found)


def test_ranks_tell_each_other_their_hosts(machine, monkeypatch):
    """Local ranks and sizes, where the launcher does not say them."""
    machine(0)
    rank_of, store = threading.local(), dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(world, "this_host", lambda: ("abaa"[rank_of.value], ""))

    def of(rank):
        rank_of.value = rank
        return world._settle(Launch(rank=rank, size=4), store, None, False)[0]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(of, range(4))] == [(0, 3), (0, 1), (1, 3), (2, 3)]
