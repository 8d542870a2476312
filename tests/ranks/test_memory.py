"""Memory, counted: full buffers, shards, storages that outlive a step, models that outlive their
last reference.
"""

import gc
import itertools
import weakref
from unittest import mock

import pytest
import torch
from tests.garbage import without_collector
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import storage_of
from torch import nn
from torch._subclasses import FakeTensor

import bmtrain as bmt
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer
from bmtrain.recompute.level import Level
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine
from bmtrain.shard.slices import Slices

LAYERS, DIM = 5, 127
MODES = [(2, False), (3, True), (3, False)]  # ZeRO level, recomputation


def tensors():
    """Bytes of every live storage by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # isinstance would wake lazy modules; a sharded tensor shows memory that another one has, and
        # those that the compiler has traced with, for a test before this one, have none
        if (
            issubclass(type(thing), torch.Tensor)
            and not issubclass(type(thing), Slices | FakeTensor)
            and thing.device.type == "cpu"
        ):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def num_of_bytes():
    return sum(tensors().values())


def make(level, recompute):
    layers = [
        nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(
        *(bmt.Block(layer, use_checkpoint=recompute, zero_level=level) for layer in layers)
    )


def managed(model, factory=AdamOptimizer):
    manager = models.managed(factory(model.parameters()))
    return manager


def loss_of(model):
    return model(torch.ones(2, DIM)).square().mean()


def between():
    """Of ZeRO-3 never more than two full buffers, the one in use and the next, and none between
    forward and backward, recomputing or not; ZeRO-2's go with backward.
    """
    transport, old = world.current().service(Engine).transport, tensors()
    gather = transport.gather
    for level, recompute in MODES:
        model = make(level, recompute)
        size = storage_of(model[0]).layout.numel * 4

        def num_full(size=size):
            return sum(nbytes >= size for at, nbytes in tensors().items() if at not in old)

        seen = []

        def counted(*args, seen=seen, num_full=num_full):
            seen.append(num_full())
            return gather(*args)

        for _ in range(2):
            with mock.patch.object(transport, "gather", counted if level == 3 else gather):
                loss = loss_of(model)
            assert num_full() == (LAYERS if level == 2 else 0)
            loss.backward()
            assert num_full() == 0
        assert not seen or max(seen) == 2
        del model, loss
        assert num_full() == 0


def cleared():
    """Cleared gradients hold no memory in forward, but those that the program holds itself stay as
    they are: of all kinds of optimizers, with sums in another dtype too; cleared by the manager,
    and as plain programs do.
    """
    for policy, factory in (
        (None, AdamOptimizer),
        (torch.float64, AdamOffloadOptimizer),
        (None, torch.optim.AdamW),
    ):
        layers = [nn.Linear(DIM, DIM) for _ in range(LAYERS)]
        model = nn.Sequential(*(bmt.Block(layer, accumulate_dtype=policy) for layer in layers))
        manager, gradients = managed(model, factory), [storage_of(x).gradient for x in model]
        for step in range(3):
            manager.backward(loss_of(model))
            manager.clip_grad_norm(model.parameters(), 1.0)
            manager.step()
            held = next(model.parameters()).grad
            assert held is not None
            kept, before = held.clone(), num_of_bytes()
            manager.zero_grad() if step else model.zero_grad()
            loss = loss_of(model)
            # What comes: inputs and states of generators, which are kept for recomputation.
            gone = sum(gradient.layout.shard_numel * 4 for gradient in gradients[1:])
            assert all(gradient.flat is None for gradient in gradients)
            assert num_of_bytes() <= before - gone + LAYERS * 2**13, (step, factory)
            manager.backward(loss)
            assert held.equal(kept), "a gradient that the program holds has changed"
            del held


def shares():
    """Parameters, gradients and both moments are 1/world of the whole, padding under 1 %."""
    for factory in (AdamOptimizer, AdamOffloadOptimizer):
        model = make(3, True)
        manager = managed(model, factory)
        manager.backward(loss_of(model))
        manager.step()
        (optimizer,), storages = manager.optimizers, [storage_of(block) for block in model]
        held = [
            [storage.shard for storage in storages],
            [storage.gradient.flat for storage in storages],
            *(
                [optimizer.state[p][name].local for p in model.parameters()]
                for name in ("exp_avg", "exp_avg_sq")
            ),
        ]
        limit = 4.04 * sum(param.numel() for param in model.parameters()) / bmt.world_size()
        for values in held:
            memory = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}
            assert sum(memory.values()) <= limit, factory


def growth():
    """Live storages after the second step are all there will be."""
    for level, recompute in MODES:
        model = make(level, recompute)
        manager, seen = managed(model), []
        for step in range(4):
            manager.zero_grad()
            manager.backward(loss_of(model), reduce_gradients=step % 2 == 0)
            manager.backward(loss_of(model))
            manager.clip_grad_norm(model.parameters(), 1.0)
            manager.step()
            with torch.no_grad():
                loss_of(model)
            seen.append(num_of_bytes())
        assert max(seen[2:]) <= seen[1], (level, recompute, seen)


def deleted():
    """The engine refers to models weakly: after the last reference shards and buffers are freed,
    of a block alone without the collector.
    """
    for level, recompute in MODES:
        with without_collector():
            blocks = make(level, recompute)
            model = bmt.BMTrainModelWrapper(nn.Sequential(blocks, nn.Linear(DIM, 3)))
            manager = managed(model)
            manager.backward(loss_of(model))
            manager.step()
            storages = [weakref.ref(storage_of(block)) for block in blocks]
            shards = [weakref.ref(storage_of(block).shard) for block in blocks]
            del model, blocks, manager
            gc.collect()
            assert not any(reference() for reference in storages), (level, recompute)
            assert all(reference() is None for reference in shards), (level, recompute)
            block = bmt.Block(nn.Linear(DIM, DIM), zero_level=level, use_checkpoint=recompute)
            loss_of(block).backward()
            shard = weakref.ref(storage_of(block).shard)
            del block
            assert shard() is None, "a reference cycle keeps the shard until the collector runs"
    references = closed_over()
    gc.collect()
    assert all(reference() is None for reference in references), "a class keeps a model"


def closed_over():
    """References to a sharded model and to classes that reach it by closures, made distributed."""
    teacher = bmt.BMTrainModelWrapper(make(3, True))

    class Norm(nn.BatchNorm1d):
        def distance(self, x):
            return x - teacher(x)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps, self.norm = nn.ModuleList([nn.Linear(DIM, DIM)]), Norm(DIM)

        def forward(self, x):
            return self.norm(self.maps[0](x) + teacher(x)).topk(1).values

    student = bmt.BMTrainModelWrapper(Student())
    loss_of(student).backward()
    return [weakref.ref(x) for x in (teacher, Norm, Student, student)]


def without_backward():
    """Passes without backward leave nothing: training mode, and a loss of which nobody wants the
    gradient, since it was not finite, say.
    """
    for level, zero_level in itertools.product(Level, (2, 3)):
        layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.LayerNorm(DIM)) for _ in "123"]
        blocks = [bmt.Block(x, use_checkpoint=level, zero_level=zero_level) for x in layers]
        model = bmt.BMTrainModelWrapper(nn.Sequential(*blocks, nn.Linear(DIM, 1), nn.Softplus()))
        loss_of(model).backward()
        loss_of(model)
        before = num_of_bytes()
        for _ in range(3):
            loss_of(model)
        assert num_of_bytes() == before, (level, zero_level)


@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        (between, 2),
        pytest.param(cleared, 1, marks=pytest.mark.long),
        (cleared, 2),
        (shares, 3),
        (growth, 2),
        (deleted, 2),
        (without_backward, 2),
    ],
)
def test_memory(program, ranks):
    """What the function of this name states."""
    run_ranks(program, ranks)
