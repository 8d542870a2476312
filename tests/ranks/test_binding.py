"""What a block knows of its module is thrown away when the module changes between calls."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ParameterError


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


def swap_weights(pair: Any) -> None:
    first, second = pair.first._parameters, pair.second._parameters
    first["weight"], second["weight"] = second["weight"], first["weight"]


def tie(pair: Any) -> None:
    pair.second._parameters["bias"] = pair.first._parameters["bias"]


def remove(pair: Any) -> None:
    pair.first.bias = None


def add(pair: nn.Module) -> None:
    torch.manual_seed(8)
    pair.third = nn.Linear(4, 4)


def replace(pair: nn.Module) -> None:
    torch.manual_seed(9)
    pair.second = nn.Linear(4, 4, bias=False)


def freeze(pair: Any) -> None:
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
    """Children and parameters that move, come, go or are shared: values and gradients as of a plain
    module.
    """
    for world_size in (1, 2):
        run_ranks(every_change, world_size)


class Writing(nn.Module):
    """Changes its weight in its forward pass."""

    def __init__(self, write: Callable[[nn.Module], None]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight, self._write = nn.Parameter(torch.randn(4, 4)), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._write(self)
        return torch.tanh(x @ self.weight)


@torch.no_grad()
def in_place(module: Any) -> None:
    module.weight.mul_(0.9)


@torch.no_grad()
def a_row(module: Any) -> None:
    module.weight[2] = 0.5


def through_data(module: Any) -> None:
    module.weight.data.clamp_(-0.1, 0.1)


def through_numpy(module: Any) -> None:
    array = module.weight.detach().numpy()
    array *= 0.5


def anew(module: Any) -> None:
    module.weight.data = module.weight.data * 0.9


WRITES = [in_place, a_row, through_data, through_numpy, anew]


def refused_writes() -> None:
    for write in WRITES:
        for options in ({"use_checkpoint": True}, {"use_checkpoint": False}, {"zero_level": 2}):
            for with_grad in (True, False):
                block = bmt.Block(Writing(write), **options)
                with (
                    torch.set_grad_enabled(with_grad),
                    pytest.raises(ParameterError, match="which would be lost"),
                ):
                    block(torch.ones(3, 4))


def test_writes_that_would_be_lost_are_refused() -> None:
    run_ranks(refused_writes, 2)


class Late(nn.Module):
    """Changes its weight in its fifth call, and looks at it as at a parameter before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.num_calls = nn.Parameter(torch.ones(4, 4)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        assert isinstance(self.weight, nn.Parameter) and not self.weight.data.requires_grad
        file = io.BytesIO()
        torch.save(self.weight.detach(), file)
        torch.save(self.weight, file)
        if self.num_calls == 5:
            through_data(self)
        return x @ self.weight


def written_late() -> None:
    for with_grad in (True, False):
        block = bmt.Block(Late(), use_checkpoint=False)
        with torch.set_grad_enabled(with_grad):
            for _ in range(4):
                block(torch.ones(3, 4))
            with (
                pytest.raises(ParameterError, match="which would be lost")
                if bmt.world_size() > 1
                else contextlib.nullcontext()
            ):
                block(torch.ones(3, 4))


def test_writes_are_found_in_every_call() -> None:
    """On one rank the gathered tensor is the parameter: what is written through `.data` stays, as
    in one process.
    """
    for world_size in (1, 2):
        run_ranks(written_late, world_size)
