"""What a block knows of its module is thrown away when the module changes between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt


class Pair(nn.Module):
    """Two maps, one after the other, and perhaps a third: (rows, 4) to the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return x if self.third is None else self.third(x)


def swap_modules(pair: nn.Module) -> None:
    pair.first, pair.second = pair.second, pair.first


def swap_weights(pair: nn.Module) -> None:
    first, second = pair.first._parameters, pair.second._parameters
    first["weight"], second["weight"] = second["weight"], first["weight"]


def tie(pair: nn.Module) -> None:
    pair.second._parameters["bias"] = pair.first._parameters["bias"]


def remove(pair: nn.Module) -> None:
    pair.first.bias = None


def add(pair: nn.Module) -> None:
    torch.manual_seed(8)
    pair.third = nn.Linear(4, 4)


def replace(pair: nn.Module) -> None:
    torch.manual_seed(9)
    pair.second = nn.Linear(4, 4, bias=False)


def freeze(pair: nn.Module) -> None:
    next(pair.first.parameters()).requires_grad_(False)


def gradients_after(change: Callable[[nn.Module], None], level: int) -> None:
    """Two calls of the same block with a change in between, then of a copy of it."""
    plain, block = Pair(), bmt.Block(Pair(), use_checkpoint=False, zero_level=level)
    for turn in range(3):
        if turn == 1:
            change(plain)
            change(block)
            block.shard()
        if turn == 2:
            plain, block = copy.deepcopy(plain), copy.deepcopy(block)
        x = torch.linspace(-1, 1, 12).view(3, 4)
        losses = [net(x).square().sum() for net in (plain, block)]
        plain.zero_grad()
        block.zero_grad()
        losses[0].backward()
        (losses[1] / bmt.world_size()).backward()
        what = f"{change.__name__}, ZeRO-{level}, turn {turn}"
        models.assert_same(losses[1].detach(), losses[0].detach(), what)
        models.assert_same_dicts(models.full_gradients(block), models.plain_gradients(plain), what)


def every_change() -> None:
    for change in (swap_modules, swap_weights, tie, remove, add, replace, freeze):
        for level in (2, 3):
            gradients_after(change, level)


def test_changes_of_the_module_count_from_the_next_call_on() -> None:
    """Children and parameters that move, come, go or are shared: values and gradients as of a plain module."""
    for world_size in (1, 2):
        run_ranks(every_change, world_size)
