"""Memory, counted: full buffers, shards, storages that outlive a step, models that outlive their
last reference.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import sharded_parameter, storage_of
from torch import nn

import bmtrain as bmt
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.recompute.level import Level
from bmtrain.runtime import world
from bmtrain.shard import gradient
from bmtrain.shard.engine import Engine
from bmtrain.shard.slices import Slices

LAYERS, DIM = 5, 127


def tensors() -> dict[int, int]:
    """Bytes of every live storage by address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        # isinstance would wake lazy modules; a sharded tensor shows memory that another one has
        if (
            issubclass(type(thing), torch.Tensor)
            and not issubclass(type(thing), Slices)
            and thing.device.type == "cpu"
        ):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def num_of_bytes() -> int:
    return sum(tensors().values())


def make(level: int, recompute: bool) -> nn.Sequential:
    layers = [
        nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(
        *(bmt.Block(layer, use_checkpoint=recompute, zero_level=level) for layer in layers)
    )


def full_numel(model: nn.Sequential) -> int:
    return storage_of(model[0]).layout.numel


def between() -> None:
    """Count the live tensors as large as a block's full buffer between forward and backward."""
    engine = world.current().service(Engine)
    for recompute in (False, True):
        model = make(3, recompute)
        size = full_numel(model) * 4
        for _ in range(2):
            loss = model(torch.ones(2, DIM)).sum()
            full = [address for address, nbytes in tensors().items() if nbytes >= size]
            assert engine.num_ring_buffers() <= 3
            assert len(full) <= engine.num_ring_buffers(), (
                f"recompute={recompute}: {len(full)} full buffers after forward"
            )
            loss.backward()
            assert engine.num_ring_buffers() <= 3
        del loss
        full = [address for address, nbytes in tensors().items() if nbytes >= size]
        assert len(full) <= 3, f"recompute={recompute}: {len(full)} full buffers after backward"
        del model
    kept = make(2, False)
    loss = kept(torch.ones(2, DIM)).sum()
    full = [address for address, nbytes in tensors().items() if nbytes >= full_numel(kept) * 4]
    assert len(full) >= LAYERS, "the count sees no full buffers where ZeRO-2 keeps them"
    loss.backward()
    full = [address for address, nbytes in tensors().items() if nbytes >= full_numel(kept) * 4]
    assert len(full) <= 3, f"ZeRO-2 holds {len(full)} full buffers after backward"


@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_3_keeps_only_the_ring(world_size: int) -> None:
    """No full buffer beyond the ring's three between forward and backward, recomputing or not;
    ZeRO-2's go with backward.
    """
    run_ranks(between, world_size, timeout=40)


def cleared() -> None:
    """Gradients of all kinds of optimizers, with sums in another dtype too; cleared by the manager,
    and as plain programs do.
    """
    for policy, factory in (
        (None, AdamOptimizer),
        (torch.float64, AdamOffloadOptimizer),
        (None, torch.optim.AdamW),
    ):
        layers = [nn.Linear(DIM, DIM) for _ in range(LAYERS)]
        model = nn.Sequential(*(bmt.Block(layer, accumulate_dtype=policy) for layer in layers))
        manager, gradients = OptimManager(), [storage_of(layer).gradient for layer in model]
        manager.add_optimizer(factory(model.parameters()))
        for step in range(3):
            manager.backward(model(torch.ones(2, DIM)).square().mean())
            manager.clip_grad_norm(model.parameters(), 1.0)
            manager.step()
            held = next(model.parameters()).grad
            assert held is not None
            kept = held.clone()
            before = num_of_bytes()
            manager.zero_grad() if step else model.zero_grad()
            loss = model(torch.ones(2, DIM)).square().mean()
            # What comes: inputs and states of generators, which are kept for recomputation.
            gone = sum(gradient.layout.shard_numel * 4 for gradient in gradients[1:])
            assert all(gradient.flat is None for gradient in gradients)
            assert num_of_bytes() <= before - gone + LAYERS * 2**13, (
                f"step {step}, {factory.__name__}"
            )
            manager.backward(loss)
            assert held.equal(kept), "a gradient that the program holds has changed"
            del held


@pytest.mark.parametrize("world_size", [1, 2])
def test_cleared_gradients_hold_no_memory_in_forward(world_size: int) -> None:
    """But those that the program holds itself stay as they are."""
    run_ranks(cleared, world_size, timeout=60)


def small() -> None:
    gradient.LEAST_FREED = 2**20
    blocks, found = [bmt.Block(nn.Linear(size, size)) for size in (DIM, 2**10, DIM)], []
    for _ in range(2):
        for block in blocks:
            block(torch.ones(2, block.in_features)).sum().backward()
        found.append([block.storages[0].gradient.flat for block in blocks])
        for block in blocks:
            block.zero_grad()
    assert [one is other for one, other in zip(*found, strict=True)] == [True, False, True]


def test_small_gradients_stay_where_they_are() -> None:
    run_ranks(small, 1)


def shares() -> None:
    for factory in (AdamOptimizer, AdamOffloadOptimizer):
        model = make(3, True)
        total = sum(
            math.prod(sharded_parameter(param)._original_shape) for param in model.parameters()
        )
        optimizer = factory(model.parameters())
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        manager.backward(model(torch.ones(2, DIM)).sum())
        manager.step()
        limit = 1.01 * total / bmt.world_size()
        storages = [storage_of(block) for block in model]
        held: dict[str, list[Any]] = {
            "parameters": [storage.shard for storage in storages],
            "gradients": [storage.gradient.flat for storage in storages],
            **{
                name: [optimizer.state[p][name].local for p in model.parameters()]
                for name in ("exp_avg", "exp_avg_sq")
            },
        }
        for what, values in held.items():
            memory = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}
            assert sum(memory.values()) <= 4 * limit, (
                f"{factory.__name__} {what}: {sum(memory.values()) / 4 / limit:.3f} of the limit"
            )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_holds_its_share(world_size: int) -> None:
    """Parameters, gradients and both moments are 1/world of the whole, padding under 1 %."""
    run_ranks(shares, world_size, timeout=40)


def growth() -> None:
    for level, recompute in ((2, False), (2, True), (3, False), (3, True)):
        model = make(level, recompute)
        manager = OptimManager()
        manager.add_optimizer(AdamOptimizer(model.parameters()))
        seen = []
        for step in range(4):
            manager.zero_grad()
            manager.backward(model(torch.ones(2, DIM)).sum(), reduce_gradients=step % 2 == 0)
            manager.backward(model(torch.ones(2, DIM)).sum())
            manager.clip_grad_norm(model.parameters(), 1.0)
            manager.step()
            with torch.no_grad():
                model(torch.ones(2, DIM))
            seen.append(num_of_bytes())
        assert max(seen[2:]) <= seen[1], (
            f"ZeRO-{level}, recompute={recompute}: bytes after each step {seen}"
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_grows_from_step_to_step(world_size: int) -> None:
    """Live storages after the second step are all there will be."""
    run_ranks(growth, world_size, timeout=40)


def deletion() -> None:
    gc.collect()
    gc.disable()
    for level, recompute in ((2, False), (2, True), (3, False), (3, True)):
        model = bmt.BMTrainModelWrapper(nn.Sequential(make(level, recompute), nn.Linear(DIM, 3)))
        optimizer = AdamOptimizer(model.parameters())
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        manager.backward(model(torch.ones(2, DIM)).sum())
        manager.step()
        blocks: Any = model[0]
        storages = [weakref.ref(block.storages[0]) for block in blocks]
        shards = [weakref.ref(block.storages[0].shard) for block in blocks]
        del model, blocks, optimizer, manager
        what = f"ZeRO-{level}, recompute={recompute}"
        gc.collect()
        assert not any(reference() for reference in storages), f"{what}: storages live on"
        assert all(reference() is None for reference in shards), f"{what}: shards live on"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_deleted_model_is_gone(world_size: int) -> None:
    """The engine refers to models weakly: after the last reference their shards are freed."""
    run_ranks(deletion, world_size, timeout=40)


def no_cycles() -> None:
    gc.collect()
    gc.disable()
    block = bmt.Block(nn.Linear(DIM, DIM))
    block(torch.ones(1, DIM)).sum().backward()
    shard = weakref.ref(block.storages[0].shard)
    del block
    assert shard() is None, "a reference cycle keeps the shard until the collector runs"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("program", [no_cycles])
def test_no_reference_cycle(world_size: int, program: Callable[[], None]) -> None:
    """Reference counting alone frees a deleted block."""
    run_ranks(program, world_size, timeout=40)


def keep_no_graphs(level: str, zero_level: int) -> None:
    """Training mode, and a loss of which nobody wants the gradient: it was not finite, say."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)) for _ in range(3)]
    blocks = [bmt.Block(x, use_checkpoint=Level[level], zero_level=zero_level) for x in layers]
    model = bmt.BMTrainModelWrapper(nn.Sequential(*blocks, nn.Linear(16, 1), nn.Softplus()))

    def run() -> torch.Tensor:
        out: torch.Tensor = model(torch.ones(3, 16)).sum()
        return out

    run().backward()
    run()
    before = num_of_bytes()
    for _ in range(3):
        run()
    assert num_of_bytes() == before


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("zero_level", [2, 3])
@pytest.mark.parametrize("level", [each.name for each in Level])
def test_passes_without_backward_leave_nothing(
    level: str, zero_level: int, world_size: int
) -> None:
    run_ranks(keep_no_graphs, world_size, level, zero_level)
