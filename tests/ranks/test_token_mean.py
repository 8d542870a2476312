"""The mean over tokens is one process's on the concatenated batch, however the tokens are
spread.
"""

import copy

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks
from torch import nn

import bmtrain as bmt

CLASSES = 7


@on_ranks(3)
def test_token_mean_is_that_of_the_concatenated_batch():
    """Uneven micro-batches, one of them empty; a step without any tokens gives zero, not NaN."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(bmt.world_size(), 3, 4, 5, generator=generator)
    targets = torch.randint(0, CLASSES, inputs.shape[:-1], generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.5] = -100
    targets[0, 0] = -100
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    for count in (3, 2):
        manager.zero_grad()
        plain.zero_grad()
        x, own = inputs[:, :count], targets[:, :count]
        want = nn.functional.cross_entropy(plain(x.flatten(0, 2)), own.flatten())
        want.backward()
        mean, total = bmt.loss.TokenMean(own[bmt.rank()]), torch.zeros(())
        loss_of = bmt.loss.FusedCrossEntropy(reduction="sum")
        for one, target in zip(x[bmt.rank()], own[bmt.rank()], strict=True):
            loss = mean(loss_of(model(one), target))
            manager.backward(loss)
            total += loss.detach()
        assert float(bmt.sum_loss(total)) == pytest.approx(want.item(), rel=1e-6)
        grads = models.full_gradients(model)
        models.assert_same_dicts(grads, models.plain_gradients(plain), "gradients")
    assert float(bmt.loss.TokenMean([torch.full((4,), -100)])(torch.zeros(()))) == 0.0
