"""Dropout after `init_distributed(seed=)`: equal models, other masks for other rows."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import numpy
import pytest
import torch
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import RanksPartedError
from bmtrain.runtime import world

SEED = 7


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.ModuleList([nn.Dropout(0.5)])[0], nn.Dropout(0.5))


def mask_of(model: nn.Module) -> list[bool]:
    return (model(torch.ones(1, 6)) != 0).flatten().tolist()


def masks(init: dict[str, Any], seed: int | None = None) -> tuple[Any, list[bool]]:
    bmt.init_distributed(seed=SEED, device="cpu", timeout=30, **init)
    plain: Any = dropping()
    if seed is not None:
        torch.manual_seed(seed)
    model = bmt.BMTrainModelWrapper(plain)
    with torch.no_grad():
        model(torch.ones(1, 6))
    mask_of(model.eval())
    before = torch.rand(2).tolist()
    first, second = mask_of(model.train()), mask_of(model)
    assert first != second
    weight = plain[0].weight
    with torch.no_grad():
        weight.add_(torch.randn_like(weight))  # the same noise on all ranks
    noisy = bmt.gather_result(weight).tolist()
    if seed is None and bmt.world_size() > 1:  # on a CPU models are drawn from what masks are
        with pytest.raises(RanksPartedError, match=r"torch\.manual_seed"):
            bmt.Block(nn.Linear(6, 4))
    torch.manual_seed(1)
    bmt.Block(nn.Linear(6, 4))
    return (before, random.random(), float(numpy.random.rand()), noisy), first


def test_data_parallel_ranks_draw_their_own_masks() -> None:
    """Tensor ranks the same; values, `random` and numpy alike; the first of them as one process."""
    found = run_ranks(masks, 4, {"tp_size": 2}, join=False)
    (alone,) = run_ranks(masks, 1, {}, join=False)
    assert all(alike == alone[0] for alike, _ in found)
    own = [mask for _, mask in found]
    assert own[0] == own[1] == alone[1] and own[2] == own[3] != own[0]


def test_a_seed_of_the_program_counts() -> None:
    for seed in (SEED, 3):
        (_, first), (_, second) = run_ranks(masks, 2, {}, seed, join=False)
        assert first == second


def resumed(folder: str) -> None:
    bmt.init_distributed(seed=SEED, device="cpu", timeout=30)

    def build() -> tuple[nn.Module, bmt.optim.OptimManager]:
        model = bmt.BMTrainModelWrapper(dropping())
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=0.1))
        return model, manager

    def train(model: nn.Module, manager: bmt.optim.OptimManager) -> list[float]:
        losses = []
        for _ in range(3):
            manager.zero_grad()
            loss = model(torch.ones(3, 6)).square().mean()
            manager.backward(loss)
            manager.step()
            losses.append(loss.item())
        return losses

    model, manager = build()
    for step in (0, 1):  # before and after ranks have drawn their first masks
        with bmt.CheckpointManager(pathlib.Path(folder) / str(step)) as checkpoints:
            checkpoints.save(1, model, manager)
        want = train(model, manager)
        world.shutdown()
        bmt.init_distributed(seed=SEED, device="cpu", timeout=30)
        model, manager = build()
        with bmt.CheckpointManager(pathlib.Path(folder) / str(step)) as checkpoints:
            assert checkpoints.restore(model, manager) is not None
        assert train(model, manager) == want


def test_masks_go_on_after_a_resume(tmp_path: pathlib.Path) -> None:
    run_ranks(resumed, 2, str(tmp_path), join=False)
