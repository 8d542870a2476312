"""Shards and gradients moved by copies between ranks: the same as by collectives, in the same bits
from run to run.
"""

import contextlib
import dataclasses
import gc
import pathlib
import tempfile
import warnings
from unittest import mock

import pytest
import torch
from tests.ranks import file_peers, models
from tests.ranks.file_peers import FilePeers
from tests.ranks.runner import on_ranks, run_ranks
from tests.ranks.test_numerics import answer, train
from tests.tensors import grad_of, gradient_memory, source_of, storage_of

import bmtrain as bmt
from bmtrain.distributed import collectives, exchange, peers, transport
from bmtrain.distributed.peers import PeerGroups
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine

COPIES, COLLECTIVES = {"transport": "copy_engine"}, {"transport": "collective"}
SMALL = mock.patch.object(transport, "SMALLEST_SHARED_BYTES", 0)


def least_copied(num_bytes):
    """Parts of at least so many bytes are copied from where they are, others joined before."""
    return mock.patch.object(exchange, "LEAST_COPIED", num_bytes)


def train_in_modes():
    """(level, recomputation, micro-batches, deferred)"""
    with SMALL, least_copied(256):
        modes = [(2, True, 1, False), (3, False, 2, True), (3, True, 2, False)]
        return [train(("adam", *mode)) for mode in modes]


def test_training_gives_the_parameters_of_plain_pytorch():
    for rank in run_ranks(train_in_modes, 3, init=COPIES):
        for number, got in enumerate(rank):
            models.assert_same_dicts(got, answer(), f"mode {number}")


class Layer(torch.nn.Module):
    """Big enough to be shared between ranks."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(400, 401)

    def forward(self, x):
        return self.linear(x).tanh()[..., :400]


def layers(dtype=torch.float32, **options):
    torch.manual_seed(3)
    made = [Layer().to(dtype) for _ in range(3)]
    return torch.nn.Sequential(*[bmt.Block(x, use_checkpoint=False, **options) for x in made])


def sum_of_ones(model):
    return model(torch.ones(2, 400)).sum()


def gathered():
    found = []
    for block in layers(torch.bfloat16):
        storage, source = storage_of(block), source_of(block)
        with torch.no_grad():
            storage.shard.add_(bmt.rank())
        full = torch.empty(storage.layout.numel, dtype=storage.dtype)
        storage.engine.transport.gather(transport.Gather(full, source, storage.axis, "a test"))
        assert (source.peers is not None) == (world.current().defaults.transport == "copy_engine")
        found.append(full)
    return found


def test_gathers_are_bit_equal_to_collectives():
    by_copies, by_collectives = (run_ranks(gathered, 3, init=x) for x in (COPIES, COLLECTIVES))
    models.assert_equal(by_copies, by_collectives)
    assert by_copies[0][0].float().max() > 1  # the other ranks' parts have come


def backward_of(model, seed, rank):
    torch.manual_seed(seed * 10 + rank)
    model.zero_grad()
    model(torch.randn(16, 400).bfloat16()).float().square().sum().backward()


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(3, init=COPIES)
def test_reductions_are_exact_sums_in_rank_order(reduce_dtype):
    """bf16 or fp32 on the wire, one rounding: bit for bit what fp32 gives, from run to run. This
    rank's slices, twice, with other numbers in between, and what each rank has alone.
    """
    with least_copied(2**16):  # the weights are copied from where they are
        model, found = layers(torch.bfloat16, reduce_dtype=reduce_dtype), []
        for seed in (1, 2, 1):
            backward_of(model, seed, bmt.rank())
            found.append([gradient_memory(block).clone() for block in model])
    totals = [torch.zeros(401 * 401) for _ in model]
    for rank in range(bmt.world_size()):
        torch.manual_seed(3)
        plain = torch.nn.Sequential(*(Layer().bfloat16() for _ in model))
        backward_of(plain, 1, rank)
        for total, layer in zip(totals, plain, strict=True):
            total.add_(torch.cat([grad_of(param).flatten() for param in layer.parameters()]))
    for first, again, total in zip(found[0], found[2], totals, strict=True):
        assert torch.equal(first, again)
        own = bmt.gather_result(first)[: 400 * 401]
        assert torch.equal(own, total[: 400 * 401].bfloat16())


def exchanges():
    """Memory for gradients: none without gradients; equal blocks share one, a block by itself has
    none, and a small one is left to collectives.
    """
    engine = world.current().service(Engine)
    frozen, model = layers().requires_grad_(False), layers()
    sum_of_ones(frozen)
    with torch.no_grad():
        sum_of_ones(model)
    found = [len(engine.transport._exchanges)]
    others = [bmt.Block(torch.nn.Linear(n, n), use_checkpoint=False) for n in (500, 4)]
    losses = [sum_of_ones(model), *[x(torch.ones(2, x.in_features)).sum() for x in others]]
    torch.stack(losses).sum().backward()
    sources = [source_of(block).peers is not None for block in (model[0], *others)]
    return [*found, len(engine.transport._exchanges), *sources]


def test_who_is_shared():
    assert run_ranks(exchanges, 2, init=COPIES) == [[0, 1, True, True, False]] * 2


def drop_models():
    for level in (2, 3):
        model = layers(zero_level=level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            sum_of_ones(model).backward()
            optimizer.step()
        if bmt.rank() == 0:
            del model, optimizer
    return float(sum_of_ones(layers()).detach())


def test_models_dropped_on_one_rank_only():
    first, second = run_ranks(drop_models, 2, init=COPIES)
    assert first == second


def evaluate_and_overwrite():
    """Forward passes without backward, with a slow reader, and weights overwritten right after."""
    model, found = layers(), []
    for number in range(5):
        with torch.no_grad():
            found.append(float(sum_of_ones(model)))
            for param in model.parameters():
                param.fill_(0.01 * number)
    return found


def test_shards_are_overwritten_after_all_have_read_them():
    (alone,) = run_ranks(evaluate_and_overwrite, 1)
    assert run_ranks(evaluate_and_overwrite, 3, init=COPIES) == [alone] * 3


def tensor_parallel_gather():
    """Axes of their own for tensor-parallel parameters: their barriers are among their own
    ranks.
    """
    with SMALL:
        column = bmt.nn.ColumnParallelLinear(32, 64, init_method=torch.nn.init.xavier_normal_)
        block = bmt.Block(column, use_checkpoint=False, zero_level=3)
        bmt.init_parameters(block)
        out = block(torch.ones(2, 32))
        out.sum().backward()
        return bool(torch.isfinite(out).all()) and source_of(block).peers is not None


def test_tensor_parallel_axes():
    assert run_ranks(tensor_parallel_gather, 4, init={**COPIES, "tp_size": 2}) == [True] * 4


class NoPeers(FilePeers):
    """As where a driver refuses."""

    def __init__(self, *args):
        super().__init__(*args)
        if bmt.rank() == 1:
            raise RuntimeError("not supported here\nC++ stack")


def be_refused():
    """On all ranks, whichever has the cause."""
    hosts = mock.patch.object(peers, "this_host", lambda: (f"host {bmt.rank()}", ""))
    for cause, told in (
        (hosts, r"2 ranks are on 2 hosts"),
        (mock.patch.object(peers, "Peers", NoPeers), r"1 cannot share memory \(not supported "),
    ):
        with (
            cause,
            pytest.raises(ConfigurationError, match=f"is not possible: .*{told}.*; use 'auto'"),
        ):
            layers()


def test_what_cannot_be_had_is_refused():
    expected = "transport is 'carrier pigeon': expected one of auto, copy_engine, collective"
    with pytest.raises(ConfigurationError, match=expected):
        world.Defaults(transport="carrier pigeon")
    run_ranks(be_refused, 2, init=COPIES)
    run_ranks(ask_on_cpus, 2)


def ask_on_cpus():
    """No copy engine there; ranks by themselves need none, and "auto" says nothing."""
    current = world.current()
    asked = dataclasses.replace(current, defaults=world.Defaults(transport="copy_engine"))
    with pytest.raises(ConfigurationError, match="is not possible: the ranks compute on CPUs; use"):
        PeerGroups(asked).of(current.mesh.world)
    assert PeerGroups(asked).of(current.mesh.tp) is None
    assert PeerGroups(current).of(current.mesh.world) is None


def full_disk():
    """Inside, rank 1 has no room for memory that ranks share."""
    make = file_peers.make_file

    def full(path, num_bytes):
        if bmt.rank() == 1:
            raise OSError(28, "No space left on device")
        return make(path, num_bytes)

    return mock.patch.object(file_peers, "make_file", full)


@on_ranks(2, init=COPIES)
def test_a_full_disk_on_one_rank_is_an_error_on_all():
    axis, groups = world.current().mesh.world, world.current().service(PeerGroups)
    group = groups.of(axis)
    assert isinstance(group, FilePeers)
    folder = pathlib.Path(tempfile.gettempdir())
    before = set(folder.glob("bmtrain-*"))
    collectives.barrier(axis)
    with full_disk(), pytest.raises(OSError, match="No space left on device") as caught:
        group.allocate(10, torch.float32)
    assert str(caught.value).endswith(" (on rank 1)") is (bmt.rank() == 0)
    collectives.barrier(axis)
    assert set(folder.glob("bmtrain-*")) <= before and groups.num_bytes == 0
    # There is room for the shards, but for no gradients: the first forward pass says so, not
    # backward, where the ranks would wait for one another.
    model, engine = layers(), world.current().service(Engine)
    for _ in range(2):
        with full_disk(), pytest.raises(OSError, match="No space left"):
            sum_of_ones(model)
    loss = sum_of_ones(model)
    assert len(engine.transport._exchanges) == 1
    loss.backward()
    fresh = layers()
    sum_of_ones(fresh).backward()
    models.assert_equal(*[[*map(gradient_memory, blocks)] for blocks in (model, fresh)])


def bytes_of_shared_memory():
    """What the account says: nothing, with a model, with its gradients, without the model."""
    groups = world.current().service(PeerGroups)
    found = [groups.num_bytes]
    model = layers()
    found.append(groups.num_bytes)
    shard = storage_of(model[0]).shard.nbytes
    for _ in range(2):
        sum_of_ones(model).backward()
    found.append(groups.num_bytes)
    world.current().service(Engine).rest()
    del model
    gc.collect()
    return [num_bytes // shard for num_bytes in (*found, groups.num_bytes)]


def test_shared_memory_is_counted_while_it_is_alive():
    """In shards: three of a model, and one full gradient for all blocks, which stays."""
    assert run_ranks(bytes_of_shared_memory, 2, init=COPIES) == [[0, 3, 5, 2]] * 2


class Driver:
    """Torch's symmetric memory on a GPU that is full after some pieces."""

    def __init__(self, room):
        self._room = room  # for each attempt
        self.group = None

    def empty_strided_p2p(self, size, stride, dtype, device):
        if not self._room.pop(0):
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.ones(size, dtype=dtype)

    def set_group_info(self, group_name, rank, world_size, store):
        self.group = group_name, rank, world_size, store

    def rendezvous(self, own, group_name):
        collectives.barrier(world.current().mesh.world)  # like that of torch, it waits for all
        self.own = own
        return self

    def get_buffer(self, rank, size, dtype):
        return self.own if rank == bmt.rank() else torch.zeros(size, dtype=dtype)


@contextlib.contextmanager
def device_peers(driver, version):
    with (
        mock.patch.object(peers, "TORCH_VERSION", tuple(map(int, version.split(".")[:2]))),
        mock.patch.object(peers, "symmetric_memory", driver),
    ):
        yield peers.Peers(world.current().mesh.world, bmt.device(), 1.0)


def mebibytes(group):
    return sum(memory.num_bytes for memory in group.alive) / 2**20


def fill_a_gpu():
    tries = []
    room = [True, False, True, True, False, False, True] if bmt.rank() == 1 else [True] * 5
    with (
        device_peers(Driver(room), "2.11.0+fake") as group,
        mock.patch.object(torch.cuda, "empty_cache", lambda: tries.append(bmt.device())),
    ):
        kept = [group.allocate(numel, torch.bfloat16) for numel in (3, 2**20)]
        assert all(torch.equal(own, torch.zeros_like(own)) for own, _ in kept)
        found = [mebibytes(group) / 2, len(tries)]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            group.allocate(3, torch.bfloat16)
        kept.pop()
        group.allocate(5, torch.bfloat16)  # and let it go
    return [*found, str(caught.value), mebibytes(group) / 2, len(tries), len(room)]


def test_a_full_gpu_gives_up_torchs_cache_and_then_says_so_on_all_ranks():
    first, second = run_ranks(fill_a_gpu, 2)
    told = "RuntimeError: CUDA driver error: out of memory"
    assert first == [3.0, 0, f"{told} (on rank 1)", 1.0, 0, 0]
    assert second == [3.0, 1, told, 1.0, 2, 0]


@on_ranks(2)
def test_older_versions_of_torch_are_told_of_the_group():
    """Older versions of torch are told of the group and its store."""
    for version in ("2.8.0", "2.10.1+cu128", "2.11.0", "2.13.0+cpu"):
        driver = Driver([True])
        with device_peers(driver, version):
            pass
        assert (driver.group is not None) is (version < "2.11" or version.startswith("2.8"))
        if driver.group is not None:
            name, rank, size, store = driver.group
            store.set(str(rank), f"{name} from {rank} of {size}")
            told = [store.get(str(other)).decode() for other in range(size)]
            own = world.current().mesh.world.group.group_name
            assert told == [f"{own} from 0 of 2", f"{own} from 1 of 2"]


def look_for_peers(obstacles):
    """Ask for the peers of an axis as on GPUs, once with each of the obstacles: what rank 0 is
    told.
    """
    current = dataclasses.replace(world.current(), device=torch.device("cuda", bmt.rank()))
    groups, said = PeerGroups(current), []
    for number, obstacle in enumerate(obstacles):
        # another one
        ranks = (*range(bmt.world_size()), *[0] * number)
        axis = dataclasses.replace(current.mesh.world, ranks=ranks)
        with (
            mock.patch.object(peers, "_obstacle", return_value=obstacle),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            assert groups.of(axis) is None
        said += [str(warning.message) for warning in caught]
    return said


WHAT = "NCCL carries shards and gradients instead of copies between GPUs: "


@pytest.mark.parametrize("wanted", ["auto", "collective"])
def test_who_could_do_something_about_slow_transport_is_warned_once(wanted, capsys):
    """What nobody can do anything about is a line in the log."""
    given, init = [peers.Obstacle("no way", "build one")] * 3, {"transport": wanted}
    told, others = run_ranks(look_for_peers, 2, given, init=init)
    assert others == []
    text = f"{WHAT}no way; build one, or set transport='collective'"
    assert [text in warning for warning in told] == ([True] if wanted == "auto" else [])
    hosts = [peers.Obstacle("16 ranks are on 2 hosts")] * 2
    assert run_ranks(look_for_peers, 2, hosts, init=init) == [[], []]
    zero, _, one = capsys.readouterr().out.partition("-- rank 1 printed:")
    assert zero.count(f"{WHAT}16 ranks are on 2 hosts.") == (wanted == "auto")
    assert "hosts" not in one


ONE_HOST = [("a", "x")] * 2
# hosts and containers of the ranks, their GPUs, whether those reach each other; what is found
OBSTACLES = [
    (ONE_HOST, [0, 1], True, "", False),
    ([("a", "x"), ("b", "y")], [0, 0], True, "2 ranks are on 2 hosts", False),
    ([("a", ""), ("b", "")], [0, 0], True, "2 ranks are on 2 hosts", False),
    ([("a", "x"), ("b", "x")], [0, 1], True, "2 ranks are in 2 containers of one host", True),
    (ONE_HOST, [0, 0], True, "do not see each other's GPUs", True),
    (ONE_HOST, [0, 1], False, "GPU 1 has no access to GPU 0", False),
]


def obstacles():
    for hosts, places, is_open, what, is_curable in OBSTACLES:

        def can_access(device, peer, is_open=is_open):
            return is_open or device.index != 1

        with (
            mock.patch.object(peers, "this_host", return_value=hosts[bmt.rank()]),
            mock.patch.object(torch.cuda, "can_device_access_peer", can_access),
        ):
            device = torch.device("cuda", places[bmt.rank()])
            found = peers._obstacle(world.current().mesh.world, device)
        assert (found is not None) == bool(what)
        if found is not None:
            assert what in found.what and bool(found.remedy) is is_curable


def test_obstacles():
    run_ranks(obstacles, 2)
