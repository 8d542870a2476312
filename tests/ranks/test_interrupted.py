"""Backward passes that raise: what they have left is dropped, or the next use of it is refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of

import bmtrain as bmt
from bmtrain.errors import ParameterError


class Bomb(torch.autograd.Function):
    """The identity, whose backward pass raises while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Bomb.armed:
            raise MemoryError("bomb")
        return grad


class Net(torch.nn.Module):
    """The last two layers have their gradients when the bomb goes off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Bomb.apply(self.layers[0](x))
        return self.layers[2](self.layers[1](x))


class Training:
    """A sharded net, an optimizer of torch and a manager."""

    def __init__(self, *, block: bool) -> None:
        torch.manual_seed(0)
        net = Net()
        if block:
            for index in range(3):
                net.layers[index] = bmt.Block(net.layers[index], use_checkpoint=False)
        self.model = bmt.BMTrainModelWrapper(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer)

    def backward(self, number: int, *, keep: bool = False) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        self.manager.backward(self.model(x).square().sum(), reduce_gradients=not keep)

    def fail(self, number: int, *, keep: bool = False) -> None:
        Bomb.armed = True
        with pytest.raises(MemoryError):
            self.backward(number, keep=keep)
        Bomb.armed = False

    def grads(self) -> list[torch.Tensor]:
        return [bmt.gather_result(grad_of(param)) for param in self.model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def begin_again(block: bool) -> None:
    training = Training(block=block)
    training.backward(0)
    expected = training.grads()
    for keep in (False, True):
        for clear in (training.manager.zero_grad, training.optimizer.zero_grad):
            training.manager.zero_grad()
            training.fail(1, keep=keep)
            clear()
            training.backward(0)
            assert_same(training.grads(), expected)


def go_on(block: bool) -> None:
    """Micro-batches 0, 1 and 2, of which one fails."""
    training = Training(block=block)
    for number in range(3):
        training.backward(number, keep=number < 2)
    expected = training.grads()
    steps = [
        lambda: training.backward(2, keep=True),
        lambda: training.backward(2),
        training.manager.step,
        lambda: training.manager.clip_grad_norm(training.optimizer.param_groups, 1.0),
        lambda: grad_of(next(training.model.parameters())),
    ]
    for failed, keep in ((1, True), (2, False)):
        for step in steps:
            training.manager.zero_grad()
            for number in range(failed):
                training.backward(number, keep=True)
            training.fail(failed, keep=keep)
            for _ in range(2):
                with pytest.raises(ParameterError, match="begin with the first micro-batch again"):
                    step()
    training.manager.zero_grad()
    training.fail(0, keep=True)  # nothing had been kept: there is nothing to lose
    for number in range(3):
        training.backward(number, keep=number < 2)
    assert_same(training.grads(), expected)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("program", [begin_again, go_on])
def test_a_pass_that_raises(program: Any, block: bool, world_size: int) -> None:
    run_ranks(program, world_size, block)


def without_a_gather() -> None:
    """Losses of slices gather nothing: the next pass itself finds that the last one is dead."""
    param = bmt.DistributedParameter(torch.arange(300.0))
    x = torch.ones(1, requires_grad=True)
    Bomb.armed = True
    with pytest.raises(MemoryError):
        ((param * param).sum() + Bomb.apply(x * 1).sum()).backward()
    Bomb.armed = False
    (param * param).sum().backward()
    expected = 2.0 * bmt.world_size() * torch.arange(300.0)
    torch.testing.assert_close(bmt.gather_result(grad_of(param)), expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pass_after_one_that_raised(world_size: int) -> None:
    run_ranks(without_a_gather, world_size)


def drop_a_model() -> None:
    """A model of other sizes goes between the forward pass of both and the backward pass of one."""

    def blocks(width: int) -> torch.nn.Module:
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


def test_a_model_that_is_dropped_during_a_pass() -> None:
    run_ranks(drop_a_model, 2)
