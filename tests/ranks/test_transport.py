"""Shards and gradients moved by copies between ranks: the same as by collectives, in the same bits from run to run."""

from __future__ import annotations

import itertools
import pathlib
import tempfile
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.ranks.test_numerics import answer, train

import bmtrain as bmt
from bmtrain.distributed import collectives, peers
from bmtrain.distributed.peers import FilePeers, PeerGroups
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.shard import transport
from bmtrain.shard.engine import Engine

COPIES, COLLECTIVES = {"transport": "copy_engine"}, {"transport": "collective"}


def train_everything() -> dict[Any, dict[str, torch.Tensor]]:
    transport.SMALLEST_SHARED_BYTES = 0
    modes = [(*mode, *micro) for mode in itertools.product((2, 3), (False, True)) for micro in ((1, False), (3, True), (3, False))]
    return {mode: train(("adam", *mode)) for mode in modes}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_gives_the_parameters_of_plain_pytorch(world_size: int) -> None:
    ranks = run_ranks(train_everything, world_size, timeout=180, init=COPIES)
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


def layers(dtype: torch.dtype = torch.float32, num: int = 3, level: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(3)
    made = [Layer().to(dtype) for _ in range(num)]
    return torch.nn.Sequential(*(bmt.Block(layer, use_checkpoint=False, zero_level=level) for layer in made))


def gathered() -> list[torch.Tensor]:
    found = []
    for block in layers(torch.bfloat16):
        (storage,) = block.storages
        with torch.no_grad():
            storage.shard.add_(bmt.rank())
        storage.engine.transport.fence()
        full = torch.empty(storage.layout.numel, dtype=storage.dtype)
        storage.engine.transport.gather(full, storage.residence._source, storage.axis, None)
        assert (storage.residence._source.peers is not None) == (world.current().defaults.transport == "copy_engine")
        found.append(full)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_are_bit_equal_to_collectives(world_size: int) -> None:
    by_copies, by_collectives = (run_ranks(gathered, world_size, init=init) for init in (COPIES, COLLECTIVES))
    for one, other in zip(by_copies, by_collectives, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert by_copies[0][0].float().max() > 1  # the other ranks' parts have come


def gradients_of(reduce_dtype: torch.dtype | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's slices of gradients, twice, with other numbers in between."""
    model = layers(torch.bfloat16)
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed * 10 + bmt.rank())
        model.zero_grad()
        model(torch.randn(16, 400).bfloat16()).float().square().sum().backward()
        found.append([block.storages[0].gradient.flat.clone() for block in model])
    return found[0], found[2]


def full_gradients_of_each_rank(num_ranks: int) -> list[list[torch.Tensor]]:
    """What each rank would have alone: by block the flat gradient in the layout of `num_ranks` ranks."""
    found = []
    for rank in range(num_ranks):
        torch.manual_seed(3)
        model = torch.nn.Sequential(*(Layer().bfloat16() for _ in range(3)))
        torch.manual_seed(10 + rank)
        model(torch.randn(16, 400).bfloat16()).float().square().sum().backward()
        found.append([torch.cat([part.linear.weight.grad.reshape(-1), part.linear.bias.grad]) for part in model])
    return found


def test_reductions_are_exact_sums_in_rank_order() -> None:
    """bf16 on the wire, one rounding: bit for bit what fp32 gives, from run to run."""
    ranks = run_ranks(gradients_of, 3, None, init=COPIES)
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
    x = model(torch.ones(2, 400)).sum() + alone(torch.ones(2, 500)).sum() + small(torch.ones(2, 4)).sum()
    x.backward()
    engine = world.current().service(Engine)
    sources = [block.storages[0].residence._source.peers is not None for block in (model[0], alone, small)]
    return len(engine.transport._exchanges), sources


def test_who_is_shared() -> None:
    """Equal blocks share the memory for their gradients, a block by itself has none, a small one is left to collectives."""
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
    """Axes of their own for tensor-parallel parameters: their barriers are among their own ranks."""
    transport.SMALLEST_SHARED_BYTES = 0
    torch.manual_seed(0)
    column = bmt.nn.ColumnParallelLinear(32, 64, init_method=torch.nn.init.xavier_normal_)
    block = bmt.Block(column, use_checkpoint=False, zero_level=3)
    bmt.init_parameters(block)
    out = block(torch.ones(2, 32))
    out.sum().backward()
    return bool(torch.isfinite(out).all()) and block.storages[0].residence._source.peers is not None


def test_tensor_parallel_axes() -> None:
    assert run_ranks(tensor_parallel_gather, 4, init={**COPIES, "tp_size": 2}) == [True] * 4


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="transport is 'carrier pigeon': expected one of auto, copy_engine, collective"):
        world.Defaults(transport="carrier pigeon")


def on_two_hosts() -> None:
    peers._host = lambda: (f"host {bmt.rank()}", "")
    layers()


def test_ranks_on_several_hosts_say_so() -> None:
    with pytest.raises(ConfigurationError, match=r"transport=.copy_engine. cannot be had: the ranks .0, 1. are on 2 hosts"):
        run_ranks(on_two_hosts, 2, init=COPIES)


class NoPeers(FilePeers):
    """As where a driver refuses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if bmt.rank() == 1:
            raise RuntimeError("not supported here\nC++ stack")


def be_refused() -> bool:
    peers.FilePeers = NoPeers  # type: ignore[misc]
    layers()
    return True


def test_a_refusal_on_one_rank_is_one_on_all() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be had: rank 1 cannot share memory \(not supported here\); use 'auto'"):
        run_ranks(be_refused, 2, init=COPIES)


def fail_to_allocate() -> str:
    axis = world.current().mesh.world
    group = world.current().service(PeerGroups).of(axis)
    assert isinstance(group, FilePeers)
    before = set(pathlib.Path(tempfile.gettempdir()).glob("bmtrain-*"))
    collectives.barrier(axis)
    if bmt.rank() == 1:
        group._make_file = lambda num_bytes: OSError(28, "No space left on device")  # type: ignore[method-assign]
    try:
        group.allocate(10, torch.float32)
    except OSError as error:
        collectives.barrier(axis)
        assert set(pathlib.Path(tempfile.gettempdir()).glob("bmtrain-*")) <= before
        return str(error)
    return ""


def test_a_full_disk_on_one_rank_is_an_error_on_all() -> None:
    for told in run_ranks(fail_to_allocate, 2, init=COPIES):
        assert "No space left on device" in told
