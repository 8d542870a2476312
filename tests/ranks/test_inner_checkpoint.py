"""torch.utils.checkpoint used inside of blocks, of either kind, against the same modules in plain
PyTorch.
"""

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from tests.ranks.passes import ask, blocks_of, compare, run
from tests.ranks.runner import on_ranks
from tests.waiting import wait_for
from torch import nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt

MODES = list(itertools.product((2, 3), (False, True)))  # ZeRO level, recomputation


class Inside(nn.Module):
    """A user's checkpoints inside: a parameter in both of them, one in one of them and outside,
    nested ones, or nothing outside.
    """

    def __init__(self, reentrant, everything=False, nested=False, frozen="-"):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.randn(8))
        self.a, self.b, self.c = nn.Linear(8, 13), nn.Linear(13, 8), nn.Linear(8, 8)
        self.reentrant, self.everything, self.nested = reentrant, everything, nested
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith(tuple(frozen.split())))

    def first(self, x):
        return self.b(torch.tanh(self.a(self.norm(x)))) * self.scale

    def second(self, x):
        inner = self.checked(self.third, x) if self.nested else self.third(x)
        return x + inner * self.scale

    def third(self, x):
        return torch.sin(self.c(torch.sin(x)))

    def checked(self, part, x):
        return checkpoint(part, x, use_reentrant=self.reentrant)

    def forward(self, x):
        if self.everything:
            return self.checked(lambda y: self.second(self.first(y)), x)
        return self.checked(self.second, self.checked(self.first, x) + self.norm(x))


class BlockInside(Inside):
    """A block inside of a checkpoint inside of a block."""

    def shard(self):
        self.b = bmt.Block(self.b)  # type: ignore[assignment]
        return self


INSIDE: dict[str, dict[str, Any]] = {
    "parts": {},
    "everything": {"everything": True},
    "nested": {"nested": True, "everything": True},
    "partly frozen": {"frozen": "a.weight norm c", "nested": True},
    "frozen": {"frozen": "a b c norm scale", "everything": True},
}


def twice(module, x):
    return module(module(x))


def are_sharded(blocks):
    return all(isinstance(param, bmt.DistributedParameter) for param in blocks.parameters())


def boom(*_):
    raise KeyError("boom")


def checkpoints_inside(reentrant):
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))
    for (level, recompute), (name, options) in itertools.product(MODES, INSIDE.items()):
        what = f"{name}, ZeRO-{level}, recompute={recompute}"
        plain = nn.ModuleList([Inside(reentrant, **options)])
        blocks = blocks_of(plain, zero_level=level, use_checkpoint=recompute)
        call = ask if "frozen" in name else twice  # two calls of a block in one pass
        # Torch says so whenever reentrant checkpoints are nested, on a plain module too.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            compare(plain, blocks, what, x, call, times=2)
            handle = blocks[0].c.register_full_backward_hook(boom)
            with pytest.raises(KeyError, match="boom"):
                run(blocks, x, call)
            # At once on a CPU; on a GPU a thread of autograd's may hold the failed pass a little longer.
            seconds = 0 if bmt.device().type == "cpu" else 5
            wait_for(functools.partial(are_sharded, blocks), what, seconds=seconds)
            handle.remove()
            compare(plain, blocks, f"{what}, after an error", x, call)
    for level, recompute in MODES:
        plain = nn.ModuleList([BlockInside(reentrant)])
        block = copy.deepcopy(plain[0]).shard()  # type: ignore[operator]
        blocks = nn.ModuleList([bmt.Block(block, zero_level=level, use_checkpoint=recompute)])
        for _ in range(2):
            compare(plain, blocks, f"a block inside, ZeRO-{level}, recompute={recompute}", x)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.long)])
@on_ranks(2)
def test_a_checkpoint_inside_of_a_block(reentrant):
    """Recomputation that the block knows nothing of finds full parameters, and every gradient
    arrives once; after an error inside of a block in backward, too, parameters are slices at once.
    """
    checkpoints_inside(reentrant)
