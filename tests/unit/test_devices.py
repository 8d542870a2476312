"""Which GPU a rank gets, on machines that are made up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.launchers import TORCHRUN, Launch


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that says how many GPUs every process sees."""

    def shows(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.delenv(TORCHRUN, raising=False)
    return shows


def test_a_rank_gets_its_own_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2)
    assert world._pick_device(1, None) == torch.device("cuda", 1)
    assert world._pick_device(1, "cuda") == torch.device("cuda", 1)
    assert world._pick_device(1, "cuda:0") == torch.device("cuda", 0)
    assert world._pick_device(1, "cpu") == torch.device("cpu")
    for local_rank, wanted, words in (
        (2, None, "local rank 2 has no GPU of its own"),
        (0, "cuda:2", "cuda:2' does not exist"),
        (0, "meta", "not supported"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            world._pick_device(local_rank, wanted)
    machine(1)  # each task sees its own
    assert world._pick_device(3, None) == torch.device("cuda", 0)
    monkeypatch.setenv(TORCHRUN, "x")  # all see the same
    with pytest.raises(ConfigurationError, match="no GPU of its own"):
        world._pick_device(3, None)
    machine(0)
    assert world._pick_device(3, None) == torch.device("cpu")


def settle(
    current: Sequence[int | None], monkeypatch: pytest.MonkeyPatch, local_rank: bool, names: str
) -> list[Any]:
    """Device, or error, of ranks on one host; `current` has the owner's GPUs of an adopted group.

    `names` has a letter for each rank: its GPU's name.
    """
    store, rank_of = dist.HashStore(), threading.local()  # type: ignore[attr-defined]
    monkeypatch.setattr(world, "_current_gpu", lambda: current[rank_of.value])
    monkeypatch.setattr(world, "_gpu_name", lambda chosen: names[rank_of.value])

    def of(rank: int) -> Any:
        rank_of.value = rank
        place = rank if local_rank else None
        launch = Launch(rank=rank, size=len(names), local_rank=place)
        try:
            return world._settle(launch, store, None, not local_rank)[1].index
        except ConfigurationError as error:
            return str(error)

    with ThreadPoolExecutor(len(names)) as pool:
        return [*pool.map(of, range(len(names)))]


def test_the_owner_of_a_group_chooses(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it has: the current GPUs of a host's ranks are different then."""
    machine(3)
    assert settle([2, 0, 1], monkeypatch, False, "abc") == [2, 0, 1]
    assert settle([0, 0, 0], monkeypatch, False, "abc") == [0, 1, 2]


def test_a_gpu_is_shown_to_each_or_to_all(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU each is well; one for all is an error on all ranks."""
    machine(1)
    assert settle([None] * 3, monkeypatch, True, "abc") == [0, 0, 0]
    for names, pair in (("abb", "1 and 2 have the same GPU (b)"), ("aab", "0 and 1 have the same")):
        found = settle([None] * 3, monkeypatch, True, names)
        assert all(error.startswith(f"ranks {pair}") for error in found)
