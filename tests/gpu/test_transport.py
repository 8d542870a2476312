"""Copies between GPUs by their copy engines: bit-equal gathers, the same sums from run to run,
training as over NCCL.
"""

import contextlib
import gc
import itertools
import os
import signal
import time

import pytest
import torch
from tests.gpu.test_engine import STEPS, train_odd
from tests.ranks import models
from tests.ranks.runner import RankFailure, run_ranks
from tests.tensors import by_torch, gradient_memory, source_of

import bmtrain as bmt
from bmtrain.distributed import collectives, exchange, transport
from bmtrain.distributed.peers import PeerGroups
from bmtrain.distributed.transport import Gather, Streams
from bmtrain.kernels.sum_parts import sum_parts
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.fresh]  # they set constants, and measure memory
DIM = 512


def on_gpus(fn, *args, wanted="copy_engine"):
    """Run on one rank per GPU."""
    return run_ranks(
        fn, NUM_GPUS, *args, device=None, timeout=300, init={"transport": wanted, "compile": False}
    )


def make(level=3, num=4, dtype=torch.bfloat16):
    torch.manual_seed(3)
    layers = [
        torch.nn.Sequential(
            torch.nn.Linear(DIM, 4 * DIM), torch.nn.GELU(), torch.nn.Linear(4 * DIM, DIM)
        )
        for _ in range(num)
    ]
    blocks = (
        bmt.Block(layer.to(dtype), use_checkpoint=False, zero_level=level) for layer in layers
    )
    return torch.nn.Sequential(*blocks)


def test_sums_round_once():
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, wire, accumulate in itertools.product(dtypes, dtypes, (False, True)):
        parts = torch.randn(4, 100_001, device="cuda").to(wire)
        old = torch.randn(100_001, device="cuda").to(dtype)
        want, got = old.clone(), old.clone()
        by_torch(sum_parts, want, parts, accumulate=accumulate)
        sum_parts(got, parts, accumulate=accumulate)
        assert torch.equal(got, want), (dtype, wire, accumulate)


def compare_odd():
    torch.backends.cuda.matmul.allow_tf32 = False
    transport.SMALLEST_SHARED_BYTES, exchange.LEAST_COPIED = 0, 256
    want = train_odd(False, 3, False, "torch")
    for level, recompute in itertools.product((2, 3), (False, True)):
        got = train_odd(True, level, recompute, "adam")
        models.assert_same_dicts(got, want, f"ZeRO-{level}, recompute {recompute}, {STEPS} steps")


def test_every_oddity_trains_as_plain_pytorch():
    on_gpus(compare_odd)


def gathers_and_gradients(level):
    """Gathered values of every block, gradients of two equal passes with another in between, and
    who carried them.
    """
    exchange.LEAST_COPIED = 2**20  # weights are copied from where they are, biases are joined
    model = make(level)
    engine = world.current().service(Engine)
    full = []
    for block in model:
        assert isinstance(block, bmt.Block)
        (storage,) = block.storages
        with torch.no_grad():
            storage.shard.add_(0.001 * bmt.rank())
        buffer = torch.empty(storage.layout.numel, dtype=storage.dtype, device=bmt.device())
        engine.transport.streams.compute_waits(
            engine.transport.gather(Gather(buffer, source_of(block), storage.axis, "a test"))
        )
        full.append(buffer.cpu())
    gradients = []
    for seed in (1, 2, 1):
        torch.manual_seed(10 * seed + bmt.rank())
        model.zero_grad()
        for _ in range(2):  # accumulated
            model(
                torch.randn(256, DIM, device=bmt.device()).bfloat16()
            ).float().square().mean().backward()
        gradients.append([gradient_memory(block).cpu() for block in model])
    return full, gradients, bool(engine.transport._exchanges)


@pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU copies nothing")
@pytest.mark.parametrize("level", [2, 3])
def test_gathers_are_bit_equal_and_sums_repeatable(level):
    copies, collectives = (
        on_gpus(gathers_and_gradients, level, wanted=wanted) for wanted in ("auto", "collective")
    )
    for rank in range(NUM_GPUS):
        assert copies[rank][2]
        assert not collectives[rank][2]
        assert all(
            torch.equal(a, b) for a, b in zip(copies[rank][0], collectives[rank][0], strict=True)
        )
        first, other, again = copies[rank][1]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0])
        for a, b in zip(first, collectives[rank][1][0], strict=True):
            # Collectives may round between ranks: elements whose terms cancel differ by much, all
            # of them together do not.
            assert (a - b).float().norm() < 2**-7 * b.float().norm()


def test_a_reduction_does_not_queue_behind_a_gather():
    """The copies of the two go on side streams of their own."""
    streams = Streams(torch.device("cuda", 0))
    with streams.gathering(None):
        # about a second
        streams.side_by_side([lambda: None, lambda: torch.cuda._sleep(2_000_000_000)])
        gathered = streams.mark_current()
    with streams.reducing():
        streams.side_by_side([lambda: None, lambda: None])
        reduced = streams.mark_current()
    assert gathered is not None
    assert reduced is not None
    reduced.synchronize()
    assert not gathered.query()
    gathered.synchronize()


def die():
    model = make()
    for step in range(200):
        if step == 20 and bmt.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(64, DIM, device=bmt.device()).bfloat16()).float().sum().backward()
    torch.cuda.synchronize()


@pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU waits for nobody")
def test_a_killed_rank_ends_the_run():
    """The others spin in a barrier on the device: ending their processes ends that."""
    began = time.time()
    with pytest.raises(RankFailure, match="rank 1"):
        on_gpus(die)
    assert time.time() - began < 60


def evaluate_and_overwrite():
    model, found = make(), []
    for number in range(30):
        with torch.no_grad():
            if bmt.rank() == number % bmt.world_size():
                torch.cuda._sleep(20_000_000)  # a slow reader
            found.append(model(torch.ones(2, DIM, device=bmt.device()).bfloat16()).float().sum())
            for param in model.parameters():
                param.fill_(0.001 * number)
    return [float(value) for value in found]


@pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU copies nothing")
def test_shards_are_overwritten_after_all_have_read_them():
    copies, collectives = (
        on_gpus(evaluate_and_overwrite, wanted=wanted) for wanted in ("copy_engine", "collective")
    )
    assert copies[0] == copies[-1] == collectives[0]


def come_and_go(num):
    for number in range(num):
        model = make(num=3, level=2 + number % 2)
        for _ in range(2):
            model(torch.ones(2, DIM, device=bmt.device()).bfloat16()).float().sum().backward()


def memory_in_use():
    """Bytes of the device that are taken, by whomever."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def models_leave(num):
    # what is made once: workspaces of libraries, memory in which gradients of this size travel
    come_and_go(2)
    before = memory_in_use()
    come_and_go(num)
    return memory_in_use() - before


@pytest.mark.alone
@pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU shares nothing")
def test_memory_comes_back_when_models_go():
    for left in on_gpus(models_leave, 8):
        assert left < 3 * 8 * DIM * DIM * 2, left  # less than the full parameters of one of them


def taken_and_counted():
    """Bytes that the driver and the account say are taken more: with memory of several sizes, and
    without it.
    """
    current = world.current()
    groups = current.service(PeerGroups)
    peers = groups.of(current.mesh.world)
    assert peers is not None
    first = peers.allocate(1, torch.bfloat16)  # what is made once: the communicator's own memory
    del first
    collectives.barrier(current.mesh.world)
    counted, taken, found = groups.num_bytes, memory_in_use(), []
    kept = [peers.allocate(numel, torch.bfloat16) for numel in (1, 2**20 - 1, 2**20, 50_000_000)]
    found.append((memory_in_use() - taken, groups.num_bytes - counted))
    kept.clear()
    collectives.barrier(current.mesh.world)
    found.append((memory_in_use() - taken, groups.num_bytes - counted))
    return found


@pytest.mark.alone
@pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU shares nothing")
def test_the_account_of_shared_memory_is_the_drivers():
    for taken, counted in itertools.chain.from_iterable(on_gpus(taken_and_counted)):
        assert abs(taken - counted) <= 2 * 2**21, (taken, counted)


def fill(make):
    """All that `make` can get of this rank's GPU, down to pieces of 2 MiB."""
    taken = []
    for num_bytes in (2**30, 2**25, 2**21):
        with contextlib.suppress(RuntimeError):
            while True:
                taken.append(make(num_bytes))
    return taken


def fill_one_gpu():
    """The last rank's driver has no memory left for gradients: first because tensors have it, then
    because torch's cache does.
    """
    model, device, is_last = (
        make(num=3),
        torch.device("cuda", bmt.rank()),
        bmt.rank() == bmt.world_size() - 1,
    )
    x = torch.ones(2, DIM, device=device).bfloat16()

    def from_driver(num_bytes):
        return torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p(
            (num_bytes,), (1,), torch.uint8, device
        )

    def from_torch(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    taken = fill(from_driver) if is_last else []
    is_told = False
    try:
        model(x)
    except torch.OutOfMemoryError:
        is_told = True
    taken.clear()
    cached = fill(from_torch) if is_last else []
    taken = fill(from_driver) if is_last else []
    cached.clear()
    loss = model(x).float().sum()
    loss.backward()
    return is_told, float(loss.detach())


@pytest.mark.alone
@pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU shares nothing")
def test_a_full_gpu_is_an_error_on_all_ranks_and_a_full_cache_is_none():
    found = on_gpus(fill_one_gpu)
    assert all(is_told for is_told, _ in found)
    assert len({loss for _, loss in found}) == 1
