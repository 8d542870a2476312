"""torch.utils.checkpoint used inside of blocks, of either kind, against the same modules in plain
PyTorch.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.ranks.test_blocks import MODES, compare, mode_name, sequence, share, squared, twice
from torch import nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt


class Inside(nn.Module):
    """A user's checkpoints inside: a parameter in both of them, one in one of them and outside,
    nested ones, or nothing outside.
    """

    def __init__(
        self, reentrant: bool, everything: bool = False, nested: bool = False, frozen: str = ""
    ) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.randn(8))
        self.a, self.b, self.c = nn.Linear(8, 13), nn.Linear(13, 8), nn.Linear(8, 8)
        self.reentrant, self.everything, self.nested = reentrant, everything, nested
        for name, param in self.named_parameters():
            param.requires_grad_(not frozen or not name.startswith(tuple(frozen.split())))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(self.norm(x)))) * self.scale

    def second(self, x: torch.Tensor) -> torch.Tensor:
        h = (
            checkpoint(self.third, x, use_reentrant=self.reentrant)
            if self.nested
            else self.third(x)
        )
        return x + h * self.scale

    def third(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.c(torch.sin(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.everything:
            return checkpoint(lambda y: self.second(self.first(y)), x, use_reentrant=self.reentrant)
        h = checkpoint(self.first, x, use_reentrant=self.reentrant) + self.norm(x)
        return checkpoint(self.second, h, use_reentrant=self.reentrant)


class BlockInside(nn.Module):
    """A block inside of a checkpoint inside of a block."""

    inner: nn.Module

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant

    def shard(self) -> BlockInside:
        self.inner = bmt.Block(self.inner)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(
            lambda y: torch.tanh(self.inner(self.before(y))), x, use_reentrant=self.reentrant
        )
        return h + checkpoint(lambda y: torch.tanh(self.after(y)), h, use_reentrant=self.reentrant)


INSIDE: dict[str, dict[str, Any]] = {
    "parts": {},
    "everything": {"everything": True},
    "nested": {"nested": True, "everything": True},
    "partly frozen": {"frozen": "a.weight norm c", "nested": True},
    "frozen": {"frozen": "a b c norm scale", "everything": True},
}


def checkpoints_inside(reentrant: bool) -> None:
    # Torch says so whenever reentrant checkpoints are nested, on a plain module too.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
    for mode, (name, options) in itertools.product(MODES, INSIDE.items()):
        call = squared if "frozen" in name else twice  # two calls of a block in one pass
        block = compare(functools.partial(Inside, reentrant, **options), call, sequence(), *mode)
        assert all(isinstance(param, bmt.DistributedParameter) for param in block.parameters()), (
            name,
            mode,
        )
        torch.manual_seed(2)
        first = models.full_gradients(block)
        share(call(block, sequence().requires_grad_())).backward()
        doubled = {key: None if grad is None else grad * 2 for key, grad in first.items()}
        models.assert_same_dicts(
            models.full_gradients(block), doubled, f"{name}, second pass: {mode_name(*mode)}"
        )


def blocks_inside(reentrant: bool) -> None:
    for mode in MODES:
        torch.manual_seed(1)
        plain = BlockInside(reentrant)
        block = bmt.Block(copy.deepcopy(plain).shard(), zero_level=mode[0], use_checkpoint=mode[1])
        for _ in range(2):
            squared(plain, sequence().requires_grad_()).backward()
            share(squared(block, sequence().requires_grad_())).backward()
            models.assert_same_dicts(
                models.full_gradients(block), models.plain_gradients(plain), mode_name(*mode)
            )


def interrupted(reentrant: bool) -> None:
    """The error comes from inside of a block in backward; the parameters are slices again at once,
    whatever is done next.
    """
    for mode in MODES:
        torch.manual_seed(1)
        plain = Inside(reentrant)
        block = bmt.Block(copy.deepcopy(plain), zero_level=mode[0], use_checkpoint=mode[1])
        handle = block.c.register_full_backward_hook(lambda *_: dict[str, Any]()["boom"])
        with pytest.raises(KeyError, match="boom"):
            squared(block, sequence().requires_grad_()).backward()
        assert all(isinstance(param, bmt.DistributedParameter) for param in block.parameters()), (
            mode_name(*mode)
        )
        handle.remove()
        block.zero_grad()
        squared(plain, sequence().requires_grad_()).backward()
        share(squared(block, sequence().requires_grad_())).backward()
        models.assert_same_dicts(
            models.full_gradients(block), models.plain_gradients(plain), mode_name(*mode)
        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("program", [checkpoints_inside, blocks_inside, interrupted])
def test_a_checkpoint_inside_of_a_block(
    program: Callable[[bool], None], reentrant: bool, world_size: int
) -> None:
    """Recomputation that the block knows nothing of finds full parameters, and every gradient
    arrives once.
    """
    run_ranks(program, world_size, reentrant)
