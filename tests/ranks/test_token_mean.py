"""The mean over tokens is one process's on the concatenated batch, however the tokens are
spread.
"""

from __future__ import annotations

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain as bmt

MICROS, ROWS, CLASSES = 3, 4, 7


def make_batch(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (ranks, micro-batches, rows, 5) and targets without the last dim; each micro-batch has
    another number of targets.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(world_size, MICROS, ROWS, 5, generator=generator)
    targets = torch.randint(0, CLASSES, (world_size, MICROS, ROWS), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.5] = -100
    targets[0, 0] = -100  # a micro-batch without any
    return inputs, targets


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, CLASSES))


def token_mean_gradients() -> tuple[dict[str, torch.Tensor | None], float]:
    model = bmt.BMTrainModelWrapper(make_model())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    inputs, targets = (part[bmt.rank()] for part in make_batch(bmt.world_size()))
    mean = bmt.loss.TokenMean(targets)
    loss_of = bmt.loss.FusedCrossEntropy(reduction="sum")
    total = torch.zeros(())
    for one, target in zip(inputs, targets, strict=True):
        loss = mean(loss_of(model(one), target))
        manager.backward(loss)
        total += loss.detach()
    return models.full_gradients(model), float(bmt.sum_loss(total))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_token_mean_is_that_of_the_concatenated_batch(world_size: int) -> None:
    """Loss and gradients, with uneven and empty micro-batches."""
    inputs, targets = make_batch(world_size)
    plain = make_model()
    loss = torch.nn.functional.cross_entropy(plain(inputs.flatten(0, 2)), targets.flatten())
    loss.backward()
    for gradients, value in run_ranks(token_mean_gradients, world_size):
        assert value == pytest.approx(loss.item(), rel=1e-6)
        models.assert_same_dicts(gradients, models.plain_gradients(plain), f"{world_size} ranks")


def no_tokens() -> float:
    return float(bmt.loss.TokenMean([torch.full((4,), -100)])(torch.zeros(())))


def test_a_step_without_tokens_gives_zero() -> None:
    """Not NaN."""
    assert run_ranks(no_tokens, 1) == [0.0]
