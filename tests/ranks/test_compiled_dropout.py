"""Random numbers of compiled blocks: those of the program's generators, at every level, whoever
compiles when.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import draws, models
from tests.ranks.runner import on_ranks
from torch import Tensor, nn

import bmtrain as bmt
from bmtrain.compile import backend
from bmtrain.recompute.level import Level

pytestmark = pytest.mark.compiler
BY_DEFAULT = {"compile": True}
DIM = 16


@torch.library.custom_op(
    "others::attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def attention(x: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """As attention on a GPU: draws in a kernel of its own, and returns a second tensor for
    backward.
    """
    mask = (torch.rand_like(x) > dropout).to(x.dtype)
    return x * mask, mask


@attention.register_fake
def _(x, dropout):
    return torch.empty_like(x), torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output[1])


def _backward(ctx, grad, _):
    return grad * ctx.saved_tensors[0], None


attention.register_autograd(_backward, setup_context=_keep)


class Simple(nn.Module):
    """Dropout alone: (rows, DIM) to the same."""

    def __init__(self):
        super().__init__()
        self.map, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + F.dropout(torch.tanh(self.last(self.map(x))), 0.2)


class Layer(Simple):
    """Dropout before, in and after attention."""

    def forward(self, x):
        mixed = attention(torch.sin(F.dropout(self.map(x), 0.3)), 0.4)[0]
        return x + F.dropout(torch.tanh(self.last(mixed)), 0.2)


def lowering():
    """Put in the place of torch's compiler what divides forward and backward as Inductor does, and
    runs them as they are. Returns what torch is asked for each time.
    """
    asked = []

    def lower(graph, inputs, **options):
        asked.append(torch._functorch.config.graphsafe_rng_functionalization)
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    backend.inductor = lower
    return asked


def make_blocks(kind=Layer, **options):
    torch.manual_seed(3)
    return nn.ModuleList([bmt.Block(kind(), **options) for _ in range(2)])


def rows(number):
    return torch.linspace(-1, 1, number * DIM).view(number, DIM)


@on_ranks(2, init={**BY_DEFAULT, "memory_limit": 2**30}, timeout=120)
def test_a_seed_gives_the_same_numbers_again():
    """From the first call on, which compiles, and at every level; a restored state does too.

    Forward and recomputation agree: gradients are those of a block that keeps everything. Passes
    that measure are compiled, too: the parameters that they run on look to the compiler as those of
    other passes do.
    """
    asked = lowering()
    blocks = make_blocks(use_checkpoint="auto")
    # first of all: other blocks would compile for them
    found = [draws.step(blocks, rows(4), draws.SEED) for _ in range(5)]
    assert asked and not models.is_refused(blocks[0]), "measuring led to uncompiled code"
    want = draws.step(make_blocks(use_checkpoint=Level.NOTHING), rows(4), draws.SEED)
    for level in (Level.CHEAP, Level.BLOCK):
        blocks = make_blocks(use_checkpoint=level)
        inputs = [rows(4), rows(6)][: 1 + (level is Level.BLOCK)]
        found.append(draws.assert_repeatable(blocks, inputs, str(level)))
    for number, got in enumerate(found):
        draws.assert_alike(got, want, f"{number}, beside {Level.NOTHING}", 1e-6, 1e-6)
    assert len(asked) > 2 and not models.is_refused(blocks[0])


@on_ranks(2, init=BY_DEFAULT, timeout=60)
def test_a_rank_that_compiles_draws_as_the_others():
    """Torch is asked for no generators of its own, which no seed reaches on a GPU; only where
    blocks are lowered: a program's own code is its own affair.
    """
    before = torch._functorch.config.graphsafe_rng_functionalization
    asked, rank = lowering(), bmt.rank()
    blocks = make_blocks(Simple, use_checkpoint=True)
    start: Any = draws.SEED
    for step in range(3):
        if rank == 1 and step:
            torch._dynamo.reset()  # compiles again
        start = draws.step(blocks, rows(4), start).state
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, start["cpu"])
        assert torch.equal(*ranks), f"step {step}: ranks have drawn differently"
    assert len(asked) == (3 if rank else 1)
    for block in blocks:
        block.compile(dynamic=False)
    draws.step(blocks, rows(4), draws.SEED)
    assert asked == [False] * (4 if rank else 2)
    assert torch._functorch.config.graphsafe_rng_functionalization is before, "for others too"


@pytest.mark.long
@on_ranks(1, init=BY_DEFAULT, timeout=200)
def test_the_real_compiler_with_lengths_that_vary():
    """Inductor rewrites dropout; what it makes of it is compiled for all lengths, too."""
    blocks = make_blocks(Simple, use_checkpoint=True)
    draws.assert_repeatable(blocks, [rows(4)], "Inductor")
    assert not models.is_refused(blocks[0])
    for block in blocks:
        block.compile(dynamic=True)
    draws.assert_repeatable(blocks, [rows(4), rows(6)], "Inductor, sizes are variables")
