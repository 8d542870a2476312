"""Shards and gradients moved by copies between ranks: the same as by collectives, in the same bits
from run to run.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.ranks.test_numerics import answer, train
from tests.tensors import grad_of, gradient_memory, source_of, storage_of

import bmtrain as bmt
from bmtrain.distributed import collectives, exchange, peers, transport
from bmtrain.distributed.peers import FilePeers, PeerGroups
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine

COPIES, COLLECTIVES = {"transport": "copy_engine"}, {"transport": "collective"}


def train_everything() -> dict[Any, dict[str, torch.Tensor]]:
    # some parts are copied from where they are, some joined before
    transport.SMALLEST_SHARED_BYTES, exchange.LEAST_COPIED = 0, 256
    modes = [
        (*mode, *micro)
        for mode in itertools.product((2, 3), (False, True))
        for micro in ((1, False), (3, True), (3, False))
    ]
    return {mode: train(("adam", *mode)) for mode in modes[:: 1 if bmt.world_size() < 4 else 5]}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_gives_the_parameters_of_plain_pytorch(world_size: int) -> None:
    ranks = run_ranks(train_everything, world_size, timeout=400, init=COPIES)
    for mode, got in ranks[0].items():
        models.assert_same_dicts(got, answer(), f"{mode} on {world_size} ranks")
        for rank in ranks[1:]:
            models.assert_same_dicts(rank[mode], got, f"{mode}: one rank against another", 0.0)


class Layer(torch.nn.Module):
    """Big enough to be shared between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(400, 401)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).tanh()[..., :400]
        return y


def layers(
    dtype: torch.dtype = torch.float32,
    num: int = 3,
    level: int = 3,
    reduce_dtype: torch.dtype | None = None,
) -> torch.nn.Sequential:
    torch.manual_seed(3)
    made = [Layer().to(dtype) for _ in range(num)]
    return torch.nn.Sequential(
        *(
            bmt.Block(layer, use_checkpoint=False, zero_level=level, reduce_dtype=reduce_dtype)
            for layer in made
        )
    )


def gathered() -> list[torch.Tensor]:
    found = []
    for block in layers(torch.bfloat16):
        assert isinstance(block, bmt.Block)
        (storage,) = block.storages
        with torch.no_grad():
            storage.shard.add_(bmt.rank())
        storage.engine.transport.fence()
        full = torch.empty(storage.layout.numel, dtype=storage.dtype)
        source = source_of(block)
        storage.engine.transport.gather(full, source, storage.axis, None)
        assert (source.peers is not None) == (world.current().defaults.transport == "copy_engine")
        found.append(full)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_are_bit_equal_to_collectives(world_size: int) -> None:
    by_copies, by_collectives = (
        run_ranks(gathered, world_size, init=init) for init in (COPIES, COLLECTIVES)
    )
    for one, other in zip(by_copies, by_collectives, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert by_copies[0][0].float().max() > 1  # the other ranks' parts have come


def gradients_of(reduce_dtype: torch.dtype | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's slices of gradients, twice, with other numbers in between.

    The weights are copied from where they are.
    """
    exchange.LEAST_COPIED = 2**16
    model = layers(torch.bfloat16, reduce_dtype=reduce_dtype)
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed * 10 + bmt.rank())
        model.zero_grad()
        model(torch.randn(16, 400).bfloat16()).float().square().sum().backward()
        found.append([gradient_memory(block).clone() for block in model])
    return found[0], found[2]


def full_gradients_of_each_rank(num_ranks: int) -> list[list[torch.Tensor]]:
    """What each rank would have alone: by block the flat gradient in the layout of `num_ranks`
    ranks.
    """
    found = []
    for rank in range(num_ranks):
        torch.manual_seed(3)
        model = torch.nn.Sequential(*(Layer().bfloat16() for _ in range(3)))
        torch.manual_seed(10 + rank)
        model(torch.randn(16, 400).bfloat16()).float().square().sum().backward()
        parts = [
            (part.get_parameter("linear.weight"), part.get_parameter("linear.bias"))
            for part in model
        ]
        found.append(
            [torch.cat([grad_of(weight).reshape(-1), grad_of(bias)]) for weight, bias in parts]
        )
    return found


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_reductions_are_exact_sums_in_rank_order(reduce_dtype: torch.dtype | None) -> None:
    """bf16 or fp32 on the wire, one rounding: bit for bit what fp32 gives, from run to run."""
    ranks = run_ranks(gradients_of, 3, reduce_dtype, init=COPIES)
    alone = full_gradients_of_each_rank(3)
    for block in range(3):
        total = alone[0][block].float()
        for rank in (1, 2):
            total += alone[rank][block].float()
        want = total.bfloat16()
        got = torch.cat([first[block] for first, _ in ranks])
        assert torch.equal(got[: 400 * 401], want[: 400 * 401])
        assert all(torch.equal(first[block], again[block]) for first, again in ranks)


def exchanges_and_sources() -> tuple[int, list[bool]]:
    model = layers()
    alone = bmt.Block(torch.nn.Linear(500, 501), use_checkpoint=False)
    small = bmt.Block(torch.nn.Linear(4, 4), use_checkpoint=False)
    x = (
        model(torch.ones(2, 400)).sum()
        + alone(torch.ones(2, 500)).sum()
        + small(torch.ones(2, 4)).sum()
    )
    x.backward()
    engine = world.current().service(Engine)
    sources = [source_of(block).peers is not None for block in (model[0], alone, small)]
    return len(engine.transport._exchanges), sources


def test_who_is_shared() -> None:
    """Equal blocks share the memory for their gradients, a block by itself has none, a small one is
    left to collectives.
    """
    assert run_ranks(exchanges_and_sources, 2, init=COPIES) == [(1, [True, True, False])] * 2


def drop_models() -> float:
    for number in range(3):
        model = layers(level=2 + number % 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 400)).sum().backward()
            optimizer.step()
        if bmt.rank() == 0:
            del model, optimizer
    model = layers()
    return float(model(torch.ones(2, 400)).sum().detach())


def test_models_dropped_on_one_rank_only() -> None:
    first, second = run_ranks(drop_models, 2, init=COPIES, timeout=40)
    assert first == second


def evaluate_and_overwrite() -> list[float]:
    """Forward passes without backward, with a slow reader, and weights overwritten right after."""
    model, found = layers(), []
    for number in range(5):
        with torch.no_grad():
            found.append(float(model(torch.ones(2, 400)).sum()))
            for param in model.parameters():
                param.fill_(0.01 * number)
    return found


def test_shards_are_overwritten_after_all_have_read_them() -> None:
    first, second, third = run_ranks(evaluate_and_overwrite, 3, init=COPIES)
    assert first == second == third
    assert first == run_ranks(evaluate_and_overwrite, 1)[0]


def tensor_parallel_gather() -> bool:
    """Axes of their own for tensor-parallel parameters: their barriers are among their own
    ranks.
    """
    transport.SMALLEST_SHARED_BYTES = 0
    torch.manual_seed(0)
    column = bmt.nn.ColumnParallelLinear(32, 64, init_method=torch.nn.init.xavier_normal_)
    block = bmt.Block(column, use_checkpoint=False, zero_level=3)
    bmt.init_parameters(block)
    out = block(torch.ones(2, 32))
    out.sum().backward()
    return bool(torch.isfinite(out).all()) and source_of(block).peers is not None


def test_tensor_parallel_axes() -> None:
    assert run_ranks(tensor_parallel_gather, 4, init={**COPIES, "tp_size": 2}) == [True] * 4


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match="transport is 'carrier pigeon': expected one of auto, copy_engine, collective",
    ):
        world.Defaults(transport="carrier pigeon")


def on_two_hosts() -> None:
    vars(peers)["this_host"] = lambda: (f"host {bmt.rank()}", "")
    layers()


def test_ranks_on_several_hosts_say_so() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"transport=.copy_engine. cannot be had: 2 ranks are on 2 hosts; use 'auto'",
    ):
        run_ranks(on_two_hosts, 2, init=COPIES)


class NoPeers(FilePeers):
    """As where a driver refuses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if bmt.rank() == 1:
            raise RuntimeError("not supported here\nC++ stack")


def be_refused() -> bool:
    peers.FilePeers = NoPeers  # type: ignore[misc, assignment]
    layers()
    return True


def test_a_refusal_on_one_rank_is_one_on_all() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"cannot be had: rank 1 cannot share memory \(not supported here\); use 'auto'",
    ):
        run_ranks(be_refused, 2, init=COPIES)


def fill_one_disk() -> None:
    """From here on rank 1 has no room for memory that ranks share."""
    make = peers._make_file

    def full(path: pathlib.Path, num_bytes: int) -> pathlib.Path:
        if bmt.rank() == 1:
            raise OSError(28, "No space left on device")
        return make(path, num_bytes)

    peers._make_file = full


def fail_to_allocate() -> str:
    axis = world.current().mesh.world
    groups = world.current().service(PeerGroups)
    group = groups.of(axis)
    assert isinstance(group, FilePeers)
    before = set(pathlib.Path(tempfile.gettempdir()).glob("bmtrain-*"))
    collectives.barrier(axis)
    fill_one_disk()
    try:
        group.allocate(10, torch.float32)
    except OSError as error:
        collectives.barrier(axis)
        assert set(pathlib.Path(tempfile.gettempdir()).glob("bmtrain-*")) <= before
        assert groups.num_bytes == 0
        return str(error)
    return ""


def test_a_full_disk_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(fail_to_allocate, 2, init=COPIES)
    assert first == "[Errno 28] No space left on device (on rank 1)"
    assert second == "[Errno 28] No space left on device"


def run_out_of_memory_and_go_on() -> list[Any]:
    """There is room for the shards, but for no gradients: the first forward pass says so, and the
    program does without it.
    """
    make = peers._make_file
    model, engine = layers(), world.current().service(Engine)
    fill_one_disk()
    told: list[Any] = []
    for _ in range(2):
        try:
            model(torch.ones(2, 400))
        except OSError as error:
            told.append("No space left" in str(error))
    peers._make_file = make
    loss = model(torch.ones(2, 400)).sum()
    told.append(len(engine.transport._exchanges))
    loss.backward()
    return [*told, storage_of(model[0]).gradient.flat is not None]


def test_memory_for_gradients_is_found_in_the_first_forward_pass() -> None:
    """Or is missing on all ranks, of which none waits for the others in backward."""
    assert (
        run_ranks(run_out_of_memory_and_go_on, 2, init=COPIES, timeout=40)
        == [[True, True, 1, True]] * 2
    )


def num_exchanges_without_gradients() -> int:
    frozen, used = layers(), layers()
    for param in frozen.parameters():
        param.requires_grad_(False)
    frozen(torch.ones(2, 400))
    with torch.no_grad():
        used(torch.ones(2, 400))
    return len(world.current().service(Engine).transport._exchanges)


def test_what_has_no_gradients_needs_no_memory_for_them() -> None:
    assert run_ranks(num_exchanges_without_gradients, 2, init=COPIES) == [0, 0]


def bytes_of_shared_memory() -> list[int]:
    """What the account says: nothing, with a model, with its gradients, without the model."""
    groups = world.current().service(PeerGroups)
    found = [groups.num_bytes]
    model = layers()
    found.append(groups.num_bytes)
    shard = storage_of(model[0]).shard.nbytes
    for _ in range(2):
        model(torch.ones(2, 400)).sum().backward()
    found.append(groups.num_bytes)
    world.current().service(Engine).rest()
    del model
    gc.collect()
    found.append(groups.num_bytes)
    return [num_bytes // shard for num_bytes in found]


def test_shared_memory_is_counted_while_it_is_alive() -> None:
    """In shards: three of a model, and one full gradient for all blocks, which stays."""
    assert run_ranks(bytes_of_shared_memory, 2, init=COPIES) == [[0, 3, 5, 2]] * 2


class Driver:
    """Torch's symmetric memory on a GPU that is full after some pieces."""

    def __init__(self, room: list[bool]) -> None:
        self._room = room  # for each attempt
        self.group: tuple[str, int, int, Any] | None = None

    def empty_strided_p2p(
        self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if not self._room.pop(0):
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.ones(size, dtype=dtype)

    def set_group_info(self, group_name: str, rank: int, world_size: int, store: Any) -> None:
        self.group = group_name, rank, world_size, store

    def rendezvous(self, own: torch.Tensor, group_name: str) -> Driver:
        collectives.barrier(world.current().mesh.world)  # like that of torch, it waits for all
        self.own = own
        return self

    def get_buffer(self, rank: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.own if rank == bmt.rank() else torch.zeros(size, dtype=dtype)


def fill_a_gpu() -> list[Any]:
    tries: list[torch.device] = []
    torch.cuda.empty_cache = lambda: tries.append(bmt.device())
    torch.__version__ = "2.11.0+fake"  # type: ignore[assignment]
    room = [True, False, True, True, False, False, True] if bmt.rank() == 1 else [True] * 5
    driver = Driver(room)
    vars(peers)["symmetric_memory"] = lambda: driver
    group = peers.DevicePeers(world.current().mesh.world, bmt.device(), 1.0)
    kept = [group.allocate(numel, torch.bfloat16) for numel in (3, 2**20)]
    assert all(torch.equal(own, torch.zeros_like(own)) for own, _ in kept)
    found: list[Any] = [group.num_bytes / 2**21, len(tries)]
    try:
        group.allocate(3, torch.bfloat16)
    except torch.OutOfMemoryError as error:
        found.append(str(error))
    kept.pop()
    group.allocate(5, torch.bfloat16)  # and let it go
    return [*found, group.num_bytes / 2**21, len(tries), len(room)]


def test_a_full_gpu_gives_up_torchs_cache_and_then_says_so_on_all_ranks() -> None:
    first, second = run_ranks(fill_a_gpu, 2, timeout=40)
    told = "RuntimeError: CUDA driver error: out of memory"
    assert first == [3.0, 0, f"{told} (on rank 1)", 1.0, 0, 0]
    assert second == [3.0, 1, told, 1.0, 2, 0]


def introduce(version: str) -> list[str] | None:
    """What the ranks tell each other through the store of the group that torch's symmetric memory
    is told of.
    """
    torch.__version__ = version  # type: ignore[assignment]
    driver, axis = Driver([True]), world.current().mesh.world
    vars(peers)["symmetric_memory"] = lambda: driver
    peers.DevicePeers(axis, bmt.device(), 1.0)
    if driver.group is None:
        return None
    name, rank, size, store = driver.group
    store.set(str(rank), f"{name == axis.group.group_name} from {rank} of {size}")
    return [store.get(str(other)).decode() for other in range(size)]


@pytest.mark.parametrize(
    ("version", "is_told"),
    [("2.8.0", True), ("2.10.1+cu128", True), ("2.11.0", False), ("2.13.0+cpu", False)],
)
def test_older_versions_of_torch_are_told_of_the_group(version: str, is_told: bool) -> None:
    told = ["True from 0 of 2", "True from 1 of 2"] if is_told else None
    assert run_ranks(introduce, 2, version) == [told] * 2


def always(obstacle: peers.Obstacle) -> Callable[..., peers.Obstacle]:
    return lambda axis, device: obstacle


def look_for_peers(obstacles: list[peers.Obstacle]) -> list[str]:
    """Ask for the peers of an axis as on GPUs, once with each of the obstacles: what rank 0 is
    told.
    """
    current = dataclasses.replace(world.current(), device=torch.device("cuda", bmt.rank()))
    groups, said = PeerGroups(current), []
    for number, obstacle in enumerate(obstacles):
        peers._obstacle = always(obstacle)
        # another one
        axis = dataclasses.replace(
            current.mesh.world, ranks=(*range(bmt.world_size()), *[0] * number)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert groups.of(axis) is None
        said += [str(warning.message) for warning in caught]
    return said


@pytest.mark.parametrize("wanted", ["auto", "collective"])
def test_who_could_do_something_about_slow_transport_is_warned_once(wanted: str) -> None:
    told, others = run_ranks(
        look_for_peers, 2, [peers.Obstacle("no way", "build one")] * 3, init={"transport": wanted}
    )
    assert others == []
    text = (
        "NCCL carries shards and gradients where copies between GPUs cannot: no way; build "
        "one, or set transport='collective'"
    )
    assert [text in warning for warning in told] == ([True] if wanted == "auto" else [])


def test_several_hosts_are_a_line_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(
        look_for_peers,
        2,
        [peers.Obstacle("16 ranks are on 2 hosts")] * 2,
        init={"transport": "auto"},
    ) == [[], []]
    zero, _, one = capsys.readouterr().out.partition("-- rank 1 printed:")
    assert (
        zero.count(
            "NCCL carries shards and gradients where copies between GPUs cannot: 16 ranks are "
            "on 2 hosts."
        )
        == 1
    )
    assert "hosts" not in one


def obstacle(
    hosts: list[tuple[str, str]], places: list[int], is_open: bool
) -> peers.Obstacle | None:
    """What is found on ranks of these hosts with these GPUs, that reach each other or do not."""
    vars(peers)["this_host"] = lambda: hosts[bmt.rank()]

    def can_access(device: Any, peer_device: Any) -> bool:
        return is_open or device.index != 1

    torch.cuda.can_device_access_peer = can_access
    return peers._obstacle(world.current().mesh.world, torch.device("cuda", places[bmt.rank()]))


@pytest.mark.parametrize(
    ("found", "what", "is_curable"),
    [
        (([("a", "x")] * 2, [0, 1], True), None, False),
        (([("a", "x"), ("b", "y")], [0, 0], True), "2 ranks are on 2 hosts", False),
        (([("a", ""), ("b", "")], [0, 0], True), "2 ranks are on 2 hosts", False),
        (([("a", "x"), ("b", "x")], [0, 1], True), "2 ranks are in 2 containers of one host", True),
        (([("a", "x")] * 2, [0, 0], True), "do not see each other's GPUs", True),
        (([("a", "x")] * 2, [0, 1], False), "GPU 1 has no access to GPU 0", False),
    ],
)
def test_obstacles(found: tuple[Any, ...], what: str | None, is_curable: bool) -> None:
    first, second = run_ranks(obstacle, 2, *found)
    assert first == second
    if what is None:
        assert first is None
    else:
        assert what in first.what
        assert bool(first.remedy) is is_curable
