"""The account of a GPU's memory, with numbers in the place of the GPU's."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import bmtrain as bmt
from bmtrain.distributed.memory import DeviceMemory
from bmtrain.distributed.peers import PeerGroups
from bmtrain.recompute.memory import CudaMemory
from bmtrain.runtime import world

GIB = 2**30


class Gpu:
    """Statistics as torch's allocator keeps them, and a device of 100 GiB that another program uses
    too.
    """

    def __init__(self) -> None:
        self.allocated = self.highest = 0
        self.reserved, self.peers, self.others = 0, 0, 10 * GIB

    def hold(self, num_bytes: int) -> None:
        self.allocated = num_bytes
        self.highest = max(self.highest, num_bytes)
        self.reserved = max(self.reserved, num_bytes)

    def reset(self) -> None:
        self.highest = self.allocated

    def empty(self) -> None:
        self.reserved = self.allocated

    def info(self) -> tuple[int, int]:
        return 100 * GIB - self.reserved - self.peers - self.others, 100 * GIB


class Run:
    """A run on a GPU whose ranks share memory."""

    device, rank, world_size = torch.device("cuda", 0), 0, 2

    def __init__(self, gpu: Gpu) -> None:
        self._made: dict[object, Any] = {PeerGroups: gpu_peers(gpu)}

    def service(self, factory: Any) -> Any:
        if factory not in self._made:
            self._made[factory] = factory(self)
        return self._made[factory]


def gpu_peers(gpu: Gpu) -> Any:
    class Peers:
        num_bytes = property(lambda self: gpu.peers)

    return Peers()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    run = Run(made)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: made.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: made.highest)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: made.reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: made.reset())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: made.info())
    monkeypatch.setattr(world, "_PROCESS", types.SimpleNamespace(world=run))
    return made


def account(limit: int | None) -> CudaMemory:
    current: Any = world.current()
    return CudaMemory(current.service(DeviceMemory), current.device, limit)


def test_memory_that_ranks_map_counts(gpu: Gpu) -> None:
    """As held and in peaks; and a limit bounds it together with the rest."""
    gpu.peers = 30 * GIB
    memory, unlimited = account(limit=50 * GIB), account(limit=None)
    gpu.hold(15 * GIB)
    gpu.hold(5 * GIB)
    assert memory.allocated() == 35 * GIB
    assert memory.take_peak() == 45 * GIB
    assert memory.take_peak() == 35 * GIB
    assert memory.limit() == 50 * GIB
    # all but what others have, and a margin
    assert unlimited.limit() == (100 - 10 - 3) * GIB


def test_the_limit_of_the_device_does_not_depend_on_where_tensors_are(gpu: Gpu) -> None:
    memory, found = account(limit=None), []
    for gpu.peers, held in ((0, 20 * GIB), (40 * GIB, 20 * GIB), (20 * GIB, 0)):
        gpu.hold(held)
        found.append(memory.limit())
    assert found == [found[0]] * 3


def test_what_the_cache_takes_beyond_the_peak_of_tensors_is_out_of_the_limit(gpu: Gpu) -> None:
    """Measured from the last time that the cache was emptied."""
    memory = account(limit=None)
    whole = memory.limit()
    gpu.hold(40 * GIB)
    gpu.hold(10 * GIB)
    assert memory.take_peak() == 40 * GIB
    assert memory.limit() == whole, "tensors have used all that is cached"
    memory.tidy()
    gpu.hold(30 * GIB)
    gpu.hold(10 * GIB)
    gpu.reserved += 4 * GIB
    memory.take_peak()
    assert memory.limit() == whole - 4 * GIB
    assert account(limit=50 * GIB).limit() == 50 * GIB
    memory.tidy()
    assert memory.limit() == whole


def test_peaks_do_not_disturb_each_other(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    """What is measured for planning, and what the user asks to see."""
    gpu.hold(40 * GIB)
    gpu.hold(1 * GIB)
    memory = account(limit=None)
    memory.take_peak()
    gpu.hold(9 * GIB)
    gpu.hold(2 * GIB)
    bmt.see_memory("first")
    assert memory.take_peak() == 9 * GIB, "the user has looked while a part was measured"
    gpu.hold(3 * GIB)
    gpu.hold(2 * GIB)
    assert memory.take_peak() == 3 * GIB
    gpu.peers = GIB
    bmt.see_memory("second")
    assert bmt.utils.peak_memory() == 40 * GIB, "of the whole run"
    gpu.hold(50 * GIB)
    gpu.hold(2 * GIB)
    assert bmt.utils.peak_memory() == bmt.utils.peak_memory() == 51 * GIB
    assert memory.take_peak() == 51 * GIB, "asking for it has disturbed others"
    assert capsys.readouterr().out.splitlines() == [
        "first: allocated 2.00 GiB, peak 40.00 GiB",
        "second: allocated 3.00 GiB, peak 3.00 GiB",
    ]
