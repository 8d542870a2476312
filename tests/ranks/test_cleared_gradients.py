"""Programs that clear, keep and put back gradients at unusual places: the gradients of plain
PyTorch, whatever memory was freed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ranks.models import assert_same
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.shard.slices import local_of

DIM = 17
Gradients = list[torch.Tensor]


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Of batch `number`, the same on all ranks: sums over ranks are multiples."""
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(x).square().mean()
    return loss


def gradients(model: nn.Module) -> Gradients:
    return [local_of(param.grad).clone() for param in model.parameters() if param.grad is not None]


def retained(model: nn.Module) -> Iterator[Gradients]:
    """A graph is gone through again after its gradients were cleared and another forward pass was
    made.
    """
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    yield gradients(model)
    model.zero_grad()
    loss_of(model, 1)
    loss.backward()
    yield gradients(model)


def put_back(model: nn.Module) -> Iterator[Gradients]:
    """Gradients are taken away for a forward pass, and are there again for the backward pass."""
    loss_of(model, 0).backward()
    held = [param.grad for param in model.parameters()]
    model.zero_grad()
    loss = loss_of(model, 1)
    for param, grad in zip(model.parameters(), held, strict=True):
        param.grad = grad
    loss.backward()
    yield gradients(model)


def overlapping(model: nn.Module) -> Iterator[Gradients]:
    """Two forward passes, then their backward passes with the gradients cleared between, then one
    on top.
    """
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    yield gradients(model)
    model.zero_grad()
    second.backward()
    yield gradients(model)
    loss_of(model, 2).backward()
    yield gradients(model)


def failing(model: nn.Module) -> Iterator[Gradients]:
    """A backward pass ends in an error between passes that do not."""
    loss_of(model, 0).backward()
    model.zero_grad()
    hidden = model[0](torch.ones(4, DIM))  # type: ignore[index]
    hidden.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[1](hidden).sum().backward()  # type: ignore[index]
    model.zero_grad()
    for number in (2, 3):
        loss_of(model, number).backward()
        yield gradients(model)


def compare(program: Callable[[nn.Module], Iterator[Gradients]]) -> None:
    for level, accumulate_dtype in ((2, None), (3, None), (3, torch.float64)):
        torch.manual_seed(0)
        plain = nn.Sequential(
            *(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.LayerNorm(DIM)) for _ in range(3))
        )
        options: dict[str, Any] = {
            "zero_level": level,
            "use_checkpoint": False,
            "accumulate_dtype": accumulate_dtype,
        }
        sharded = nn.Sequential(*(bmt.Block(copy.deepcopy(layer), **options) for layer in plain))
        for got, want in zip(program(sharded), program(plain), strict=True):
            for own, whole, param in zip(got, want, sharded.parameters(), strict=True):
                piece = param.storage_of.piece(param.index_in_storage)  # type: ignore[attr-defined]
                part = whole.reshape(-1)[piece.start : piece.stop] * bmt.world_size()
                assert_same(
                    own.reshape(-1),
                    part,
                    f"{program.__name__}, ZeRO-{level}, {accumulate_dtype}",
                    1e-5,
                )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("program", [retained, put_back, overlapping, failing])
def test_gradients_are_those_of_plain_pytorch(
    program: Callable[[nn.Module], Iterator[Gradients]], world_size: int
) -> None:
    run_ranks(compare, world_size, program)
