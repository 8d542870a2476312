"""AdamW steps of a model with every oddity: any number of ranks and any mode give plain PyTorch's
parameters.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain as bmt

STEPS = 5
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: bmt.optim.AdamOptimizer(params, lr=1e-2, weight_decay=0.1),
    "offload": lambda params: bmt.optim.AdamOffloadOptimizer(params, lr=1e-2, weight_decay=0.1),
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
}

# (optimizer, ZeRO level, recomputation, micro-batches, deferred reduction)
Mode = tuple[str, int, bool, int, bool]
MODES: list[Mode] = [
    ("adam", level, recompute, *micro)
    for level, recompute, micro in itertools.product((2, 3), (False, True), ((1, False), (3, True)))
]
MODES += [("adam", 2, True, 3, False), ("adam", 3, False, 3, False)]
MODES += [
    ("offload", 3, False, 1, False),
    ("offload", 2, True, 1, False),
    ("torch", 2, False, 1, False),
    ("torch", 3, True, 1, False),
]


@functools.cache
def answer() -> dict[str, torch.Tensor]:
    return models.cloned_state(models.train_plain(STEPS, OPTIMIZERS["torch"]))


def train(mode: Mode) -> dict[str, torch.Tensor]:
    name, level, recompute, micros, deferred = mode
    model = models.shard_whole(level, recompute)
    optimizer = OPTIMIZERS[name](models.groups_of(model))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(STEPS):
        models.switch_frozen(model, step)
        manager.zero_grad()
        tokens, targets = (
            part.chunk(bmt.world_size())[bmt.rank()].chunk(micros) for part in models.batch(step)
        )
        for number, pair in enumerate(zip(tokens, targets, strict=True)):
            loss = models.loss_of(model, *pair, step) / micros
            manager.backward(loss, reduce_gradients=not deferred or number == micros - 1)
        manager.step()
    return models.cloned_state(model)


def train_all() -> dict[Mode, dict[str, torch.Tensor]]:
    """On more than three ranks, every third mode: one rank more is no other kind of run."""
    return {mode: train(mode) for mode in MODES[:: 1 if bmt.world_size() < 4 else 3]}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_gives_the_parameters_of_plain_pytorch(world_size: int) -> None:
    """Every mode within 1e-5 of plain PyTorch on the concatenated batch, hence of every other mode;
    ranks agree bitwise.
    """
    ranks = run_ranks(train_all, world_size, timeout=400)
    for mode in ranks[0]:
        models.assert_same_dicts(ranks[0][mode], answer(), f"{mode} on {world_size} ranks")
        for rank in ranks[1:]:
            models.assert_same_dicts(
                rank[mode], ranks[0][mode], f"{mode}: one rank against another", 0.0
            )


def micro_gradients(
    level: int, recompute: bool, last_reduces: bool
) -> dict[str, torch.Tensor | None]:
    model = models.shard_whole(level, recompute)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    tokens, targets = (
        part.chunk(bmt.world_size())[bmt.rank()].chunk(3) for part in models.batch(1)
    )
    for number, pair in enumerate(zip(tokens, targets, strict=True)):
        manager.backward(
            models.loss_of(model, *pair, 1) / 3, reduce_gradients=last_reduces and number == 2
        )
    if not last_reduces:
        manager.clip_grad_norm(model.parameters(), 1e9)  # reduces what was kept back
    return models.full_gradients(model)


def all_micro_gradients() -> dict[tuple[int, bool, bool], dict[str, torch.Tensor | None]]:
    modes = itertools.product((2, 3), (False, True), (False, True))
    return {mode: micro_gradients(*mode) for mode in modes}


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_are_those_of_the_concatenated_batch(world_size: int) -> None:
    """Deferred micro-batches sum up to plain PyTorch's gradient, with None where it has None."""
    plain = models.make_whole()
    models.loss_of(plain, *models.batch(1), 1).backward()
    want = models.plain_gradients(plain)
    for mode, got in run_ranks(all_micro_gradients, world_size)[0].items():
        models.assert_same_dicts(got, want, f"(level, recompute, last reduces) {mode}")


def keep_on_one_rank() -> float:
    layer = bmt.BMTrainModelWrapper(torch.nn.Linear(5, 3))
    kept = [
        layer.weight,
        bmt.Block(torch.nn.Linear(4, 4), zero_level=2, use_checkpoint=False)(torch.ones(1, 4)),
    ]
    if bmt.rank() == 1:
        # the others keep full tensors and a graph alive, as a program that logs on one rank does
        kept.clear()
    for _ in range(3):
        layer(torch.ones(2, 5)).sum().backward()
        del kept[1:]
    return float(layer.weight.detach().sum())


def test_what_one_rank_keeps_alive_does_not_change_what_it_gathers() -> None:
    """Whether to gather must not depend on how long a program, or a thread of Gloo, keeps a full
    tensor alive.
    """
    first, *others = run_ranks(keep_on_one_rank, 3, timeout=20)
    assert others == [first, first]


def collect_garbage_on_one_rank() -> float:
    model = models.shard_whole(2, True)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
    kept: list[torch.Tensor] = []
    for step in range(4):
        tokens, targets = (part.chunk(bmt.world_size())[bmt.rank()] for part in models.batch(step))
        manager.zero_grad()
        loss = models.loss_of(model, tokens, targets, step)
        kept.append(loss)
        manager.backward(loss)
        manager.step()
        if bmt.rank() == 0:
            kept.clear()
            gc.collect()
        # validation, twice, with another number of blocks than the training step
        with torch.no_grad():
            models.loss_of(model, tokens, targets, step + 1)
            models.loss_of(model, tokens, targets, step + 2)
    return bmt.sum_loss(loss).item()


def lose_a_block_between_forward_and_backward() -> torch.Tensor:
    gc.disable()
    lost, kept = (
        bmt.Block(torch.nn.Linear(8, 8), use_checkpoint=True, zero_level=3) for _ in range(2)
    )
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
    return x.grad


def test_a_block_lost_on_one_rank_does_not_part_the_ranks() -> None:
    """The buffers of its size stay as they are, wherever and whenever it is noticed."""
    first, second = run_ranks(lose_a_block_between_forward_and_backward, 2, timeout=20)
    assert torch.equal(first, second)


def test_garbage_collected_on_one_rank_does_not_part_the_ranks() -> None:
    """Training and validation in turn, with one rank dropping old graphs at once and the others
    keeping them.
    """
    first, second = run_ranks(collect_garbage_on_one_rank, 2, timeout=40)
    assert first == second
