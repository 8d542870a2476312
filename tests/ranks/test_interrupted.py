"""Backward passes that raise: what they have left is dropped, or the next use of it is refused."""

import gc

import pytest
import torch
from tests.ranks.runner import on_ranks
from tests.tensors import grad_of

import bmtrain as bmt


class Bomb(torch.autograd.Function):
    """The identity, whose backward pass raises while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Bomb.armed:
            raise MemoryError("bomb")
        return grad


@on_ranks(2)
def test_a_pass_after_one_that_raised():
    """Losses of slices gather nothing: the next pass itself finds that the last one is dead. A
    model may be dropped between the forward pass of two and the backward pass of one.
    """
    param = bmt.DistributedParameter(torch.arange(300.0))
    x = torch.ones(1, requires_grad=True)
    Bomb.armed = True
    with pytest.raises(MemoryError):
        ((param * param).sum() + Bomb.apply(x * 1).sum()).backward()
    Bomb.armed = False
    (param * param).sum().backward()
    expected = 2.0 * bmt.world_size() * torch.arange(300.0)
    torch.testing.assert_close(bmt.gather_result(grad_of(param)), expected)

    def blocks(width):
        layers = [bmt.Block(torch.nn.Linear(width, width), zero_level=3) for _ in range(2)]
        return torch.nn.Sequential(*layers)

    kept, dropped = blocks(16), [blocks(32)]
    for step in range(4):
        losses = [model(torch.ones(2, 32)).sum() for model in dropped]
        loss = kept(torch.ones(2, 16)).sum()
        if step == 1:
            dropped.clear()
            losses.clear()
            gc.collect()
        loss.backward()
    grad = grad_of(list(kept.parameters())[-1])
    torch.testing.assert_close(bmt.gather_result(grad), torch.full((16,), 8.0 * bmt.world_size()))
