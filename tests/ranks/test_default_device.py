"""A program may choose torch's default device; what the library makes for itself is where it must
be all the same.
"""

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain as bmt


def train(file, device):
    """A few steps of everything; tensors made on the meta device have no values, and fail or spoil
    what uses them.
    """
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    layers = bmt.TransformerBlockList([bmt.Block(torch.nn.Linear(6, 6)) for _ in range(2)])
    plain = torch.nn.Linear(6, 1)
    parallel = bmt.PipelineTransformerBlockList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
    manager = bmt.optim.OptimManager(loss_scale=8.0)
    kinds = [
        (bmt.optim.AdamOptimizer, layers),
        (bmt.optim.AdamOffloadOptimizer, parallel),
        (torch.optim.SGD, plain),
    ]
    with torch.device(device):
        for kind, module in kinds:
            manager.add_optimizer(kind(module.parameters(), lr=1e-2))
        for _ in range(2):
            manager.zero_grad()
            hidden = bmt.distributed.broadcast(parallel(layers(x)), 0)
            loss = plain(hidden).square().mean()
            manager.backward(loss)
            for optimizer in manager.optimizers:
                manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
        bmt.sum_loss(loss.detach())
        bmt.synchronize()
        manager.load_state_dict(manager.state_dict(gather_opt=True))
        bmt.save(layers, file)
        bmt.load(layers, file)
        bmt.inspect.inspect_model(layers, "*")
        return {**layers.state_dict(), **parallel.state_dict()}


def compare(file):
    models.assert_same_dicts(train(file, "meta"), train(file, "cpu"), "on meta", 0.0)


@pytest.mark.parametrize("size", [1, 2])
def test_the_default_device_is_the_programs(size, tmp_path):
    run_ranks(compare, size, tmp_path / "model.pt", init={"pipe_size": size})
