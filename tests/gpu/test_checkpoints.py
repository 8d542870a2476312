"""Checkpoints that are copied from the GPU while training goes on."""

import itertools
import pathlib

import pytest
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt

WIDTH = 2048  # parameters of several blocks of a file


def make(offload):
    torch.manual_seed(1)
    blocks = [bmt.Block(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)) for _ in range(6)]
    net = bmt.BMTrainModelWrapper(torch.nn.Sequential(*blocks).to(bmt.device()))
    manager = bmt.optim.OptimManager()
    kind = bmt.optim.AdamOffloadOptimizer if offload else bmt.optim.AdamOptimizer
    manager.add_optimizer(kind(net.parameters(), lr=1e-2))
    return net, manager


def train(net, manager, steps):
    losses = []
    for _ in range(steps):
        x = torch.randn(64, WIDTH, device=bmt.device(), dtype=torch.bfloat16)
        manager.zero_grad()
        loss = net(x).float().square().mean()
        manager.backward(loss)
        manager.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def values(net, manager):
    state = manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
    held = [x for one in state.values() for x in one.values() if isinstance(x, torch.Tensor)]
    return [x.cpu().clone() for x in (*net.state_dict().values(), *held)]


def saved_while_training(folder, offload, background):
    """The values at the call are written, whatever steps follow at once; and they come back."""
    net, manager = make(offload)
    train(net, manager, 3)
    with bmt.CheckpointManager(folder, keep=5, background=background) as checkpoints:
        checkpoints.reserve(net, manager)
        seen = []
        for step in (3, 4, 5):
            at_save = values(net, manager)
            bmt.synchronize()
            checkpoints.save(step, net, manager)
            seen.append((at_save, train(net, manager, 1)))
        later = train(net, manager, 4)
        checkpoints.wait()
    for step, (at_save, losses) in zip((3, 4, 5), seen, strict=True):
        other, its_manager = make(offload)
        with bmt.CheckpointManager(folder) as checkpoints:
            path = pathlib.Path(folder, f"step-{step:08d}")
            checkpoints.restore(other, its_manager, path=path)
        for got, want in itertools.zip_longest(values(other, its_manager), at_save):
            assert torch.equal(got, want)
        assert train(other, its_manager, 1) == losses
    assert train(other, its_manager, 4) == later


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("background", [True, False])
def test_saved_while_training(offload, background, tmp_path):
    run_ranks(saved_while_training, 1, str(tmp_path), offload, background, device=None)
