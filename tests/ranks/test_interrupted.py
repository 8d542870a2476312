"""Backward passes that raise: what they have left is dropped, or the next use of it is refused."""

import gc

import pytest
import torch
from tests.ranks.pairs import Pair, rows
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of

import bmtrain as bmt
from bmtrain.errors import ParameterError


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


def backward(pair, number=2, keep=False):
    """Of the sharded side alone."""
    x = rows(number, pair.dtype).chunk(bmt.world_size())[bmt.rank()]
    pair.manager.backward(pair.model(x), reduce_gradients=not keep)


def fail(pair, number, keep):
    Bomb.armed = True
    with pytest.raises(MemoryError):
        backward(pair, number, keep)
    Bomb.armed = False


def interrupted(kind, dtype):
    """Later layers have their gradients when the first block raises."""
    pair = Pair(kind, dtype, scale=64.0)
    pair.model.body[0].register_forward_hook(lambda _, __, out: Bomb.apply(out))
    pair.train(2)
    for keep in (False, True):
        for clear in (pair.manager.zero_grad, pair.optimizer.zero_grad):
            pair.zero_grad()
            fail(pair, 1, keep)
            clear()
            pair.backward(0)
            pair.check("cleared after a pass that raised")
    uses = [
        lambda: backward(pair, keep=True),
        lambda: backward(pair),
        pair.manager.step,
        lambda: pair.manager.clip_grad_norm(pair.optimizer.param_groups, 1.0),
        lambda: grad_of(next(pair.model.parameters())),
    ]
    for failed, keep in ((1, True), (2, False)):
        for use in uses:
            pair.zero_grad()
            for number in range(failed):
                pair.backward(number, keep=True)
            fail(pair, failed, keep)
            for _ in range(2):
                with pytest.raises(ParameterError, match="begin with the first micro-batch again"):
                    use()
    pair.zero_grad()
    fail(pair, 0, keep=True)  # nothing had been kept: there is nothing to lose
    for number in range(3):
        pair.backward(number, keep=number < 2)
    pair.step()
    pair.check("begun again")
    pair.train(range(3, 5))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("sgd", torch.float32), ("adam", torch.float16), ("offload", torch.float32)]
)
def test_a_pass_that_raises(kind, dtype):
    run_ranks(interrupted, 2, kind, dtype)


def without_a_gather():
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


def test_a_pass_after_one_that_raised():
    run_ranks(without_a_gather, 2)
