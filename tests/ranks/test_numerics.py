"""AdamW steps of a model with every oddity: any number of ranks and any mode give plain PyTorch's
parameters.
"""

import functools
import gc

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain as bmt

STEPS = 5
OPTIMIZERS = {
    "adam": bmt.optim.AdamOptimizer,
    "offload": bmt.optim.AdamOffloadOptimizer,
    "torch": torch.optim.AdamW,
}

# (optimizer, ZeRO level, recomputation, micro-batches, deferred reduction)
MODES = [("adam", 3, True, 3, True), ("offload", 2, True, 1, False), ("torch", 3, False, 2, False)]
OTHERS = [
    ("adam", 2, False, 3, False),
    ("offload", 3, False, 3, True),
    ("torch", 2, False, 3, True),
    ("torch", 3, True, 1, False),
]


@functools.cache
def answer():
    make = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    return models.cloned_state(models.train_plain(STEPS, make))


def losses(model, step, micros=1):
    """Of this rank's micro-batches, each when its turn comes."""
    own = (models.own(x).chunk(micros) for x in models.batch(step))
    for tokens, targets in zip(*own, strict=True):
        yield models.loss_of(model, tokens, targets, step) / micros


def train(mode):
    name, level, recompute, micros, deferred = mode
    model = models.shard_whole(level, recompute)
    manager = models.managed(OPTIMIZERS[name](models.groups_of(model), lr=1e-2, weight_decay=0.1))
    for step in range(STEPS):
        models.switch_frozen(model, step)
        manager.zero_grad()
        for number, loss in enumerate(losses(model, step, micros)):
            manager.backward(loss, reduce_gradients=not deferred or number == micros - 1)
        manager.step()
    return models.cloned_state(model)


def train_all(modes):
    return [train(mode) for mode in modes]


@pytest.mark.parametrize(
    ("ranks", "modes"), [(3, MODES), (1, MODES), pytest.param(3, OTHERS, marks=pytest.mark.long)]
)
def test_training_gives_the_parameters_of_plain_pytorch(ranks, modes):
    """Every mode within 1e-5 of plain PyTorch on the concatenated batch."""
    for found in run_ranks(train_all, ranks, modes):
        for mode, got in zip(modes, found, strict=True):
            models.assert_same_dicts(got, answer(), str(mode))


def keep_on_one_rank():
    layer = bmt.BMTrainModelWrapper(torch.nn.Linear(5, 3))
    block = bmt.Block(torch.nn.Linear(4, 4), zero_level=2, use_checkpoint=False)
    kept = [layer.weight, block(torch.ones(1, 4))]
    if bmt.rank() == 1:
        # the others keep full tensors and a graph alive, as a program that logs on one rank does
        kept.clear()
    for _ in range(3):
        layer(torch.ones(2, 5)).sum().backward()
        del kept[1:]
    return float(layer.weight.detach().sum())


def collect_garbage_on_one_rank():
    """Training and validation in turn, with one rank dropping old graphs at once and the others
    keeping them.
    """
    model = models.shard_whole(2, True)
    manager = models.managed(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
    kept = []
    for step in range(4):
        manager.zero_grad()
        kept += losses(model, step)
        manager.backward(kept[-1])
        manager.step()
        if bmt.rank() == 0:
            kept.clear()
            gc.collect()
        # validation, twice, with another number of blocks than the training step
        with torch.no_grad():
            for later in (step + 1, step + 2):
                (loss,) = losses(model, later)
    return bmt.sum_loss(loss).item()


def lose_a_block_between_forward_and_backward():
    """The buffers of its size stay as they are, wherever and whenever it is noticed."""
    gc.disable()
    try:
        lost, kept = (bmt.Block(torch.nn.Linear(8, 8), use_checkpoint=True) for _ in range(2))
        x = torch.ones(2, 8, requires_grad=True)
        kept(x).sum().backward()
        cycle: list[object] = [lost]
        cycle.append(cycle)
        del lost, cycle
        out = kept(x).sum()
        if bmt.rank() == 0:
            gc.collect()
        out.backward()
        assert x.grad is not None
        return float(x.grad.sum())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "program",
    [keep_on_one_rank, collect_garbage_on_one_rank, lose_a_block_between_forward_and_backward],
)
def test_what_one_rank_keeps_alive_does_not_part_the_ranks(program):
    """Whether to gather must not depend on how long a program, or a thread of Gloo, keeps a full
    tensor alive.
    """
    assert len(set(run_ranks(program, 3))) == 1
