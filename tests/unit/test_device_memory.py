"""The account of a GPU's memory, with numbers in the place of the GPU's."""

import types

import pytest
import torch

import bmtrain as bmt
from bmtrain.distributed.memory import DeviceMemory
from bmtrain.distributed.peers import PeerGroups
from bmtrain.recompute.memory import CudaMemory
from bmtrain.runtime import world

GIB = 2**30


class Gpu:
    """Statistics as torch's allocator keeps them, and a device of 100 GiB that another program uses too.
    All in GiB.
    """

    def __init__(self):
        self.allocated, self.highest, self.reserved, self.peers = 0, 0, 0, 0

    def hold(self, *sizes):
        for self.allocated in sizes:
            self.highest = max(self.highest, self.allocated)
            self.reserved = max(self.reserved, self.allocated)

    def reset(self, _):
        self.highest = self.allocated

    def empty(self):
        self.reserved = self.allocated


class Run:
    """A run on a GPU whose ranks share memory."""

    device, rank, world_size = torch.device("cuda", 0), 0, 2

    def __init__(self, gpu):
        class Peers:
            num_bytes = property(lambda self: gpu.peers * GIB)

        self._made = {PeerGroups: Peers()}

    def service(self, factory):
        if factory not in self._made:
            self._made[factory] = factory(self)
        return self._made[factory]


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    for name, function in {
        "memory_allocated": lambda device: made.allocated * GIB,
        "max_memory_allocated": lambda device: made.highest * GIB,
        "memory_reserved": lambda device: made.reserved * GIB,
        "empty_cache": made.empty,
        "reset_peak_memory_stats": made.reset,
        "mem_get_info": lambda device: ((90 - made.reserved - made.peers) * GIB, 100 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(world, "_PROCESS", types.SimpleNamespace(world=Run(made)))
    return made


def account(limit=None):
    current = world.current()
    given = None if limit is None else limit * GIB
    return CudaMemory(current.service(DeviceMemory), current.device, given)


def test_memory_that_ranks_map_counts(gpu):
    """As held and in peaks; and a limit bounds it together with the rest. The limit of the device does
    not depend on where tensors are.
    """
    gpu.peers = 30
    memory, unlimited = account(limit=50), account()
    gpu.hold(15, 5)
    assert memory.allocated() == 35 * GIB
    assert [memory.take_peak(), memory.take_peak()] == [45 * GIB, 35 * GIB]
    assert memory.limit() == 50 * GIB
    for gpu.peers, held in ((30, 5), (0, 20), (40, 20), (20, 0)):
        gpu.hold(held)
        # all but what others have, and a margin
        assert unlimited.limit() == (100 - 10 - 3) * GIB


def test_what_the_cache_takes_beyond_the_peak_of_tensors_is_out_of_the_limit(gpu):
    """Measured from the last time that the cache was emptied."""
    memory = account()
    whole = memory.limit()
    gpu.hold(40, 10)
    assert memory.take_peak() == 40 * GIB
    assert memory.limit() == whole, "tensors have used all that is cached"
    memory.tidy()
    gpu.hold(30, 10)
    gpu.reserved += 4
    memory.take_peak()
    assert memory.limit() == whole - 4 * GIB
    assert account(limit=50).limit() == 50 * GIB
    memory.tidy()
    assert memory.limit() == whole


def test_peaks_do_not_disturb_each_other(gpu, capsys):
    """What is measured for planning, and what the user asks to see."""
    gpu.hold(40, 1)
    memory, peak = account(), bmt.utils.peak_memory
    memory.take_peak()
    gpu.hold(9, 2)
    bmt.see_memory("first")
    assert memory.take_peak() == 9 * GIB, "the user has looked while a part was measured"
    gpu.hold(3, 2)
    assert memory.take_peak() == 3 * GIB
    gpu.peers = 1
    bmt.see_memory("second")
    assert peak() == 40 * GIB, "of the whole run"
    gpu.hold(50, 2)
    assert peak() == peak() == 51 * GIB
    assert memory.take_peak() == 51 * GIB, "asking for it has disturbed others"
    assert capsys.readouterr().out.splitlines() == [
        "first: allocated 2.00 GiB, peak 40.00 GiB",
        "second: allocated 3.00 GiB, peak 3.00 GiB",
    ]
