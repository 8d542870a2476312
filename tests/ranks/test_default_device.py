"""A program may choose torch's default device; what the library makes for itself is where it must
be all the same.
"""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt


def train(folder: str, elsewhere: bool) -> dict[str, torch.Tensor]:
    """A few steps of everything; tensors made on the meta device have no values, and fail or spoil
    what uses them.
    """
    torch.manual_seed(0)
    file, x = pathlib.Path(folder) / "model.pt", torch.randn(4, 6)
    layers = bmt.TransformerBlockList([bmt.Block(torch.nn.Linear(6, 6)) for _ in range(2)])
    plain = torch.nn.Linear(6, 1)
    parallel = bmt.PipelineTransformerBlockList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
    manager = bmt.optim.OptimManager(loss_scale=8.0)
    with torch.device("meta" if elsewhere else "cpu"):
        for kind, params in (
            (bmt.optim.AdamOptimizer, layers.parameters()),
            (bmt.optim.AdamOffloadOptimizer, parallel.parameters()),
            (torch.optim.SGD, plain.parameters()),
        ):
            manager.add_optimizer(kind(params, lr=1e-2))
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


@pytest.mark.parametrize(("world_size", "pipe_size"), [(1, 1), (2, 2)])
def test_the_default_device_is_the_programs(
    world_size: int, pipe_size: int, tmp_path: pathlib.Path
) -> None:
    (want, *_), results = (
        run_ranks(train, world_size, str(tmp_path), elsewhere, init={"pipe_size": pipe_size})
        for elsewhere in (False, True)
    )
    for got in results:
        for name, value in want.items():
            assert torch.equal(got[name], value), name
