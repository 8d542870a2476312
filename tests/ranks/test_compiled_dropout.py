"""Random numbers of compiled blocks: those of the program's generators, at every level, whoever
compiles when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import draws, models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.compile import backend
from bmtrain.recompute.level import Level

BY_DEFAULT = {"compile": True}
DIM = 16


@torch.library.custom_op(
    "others::attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def attention(x: torch.Tensor, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention on a GPU: draws in a kernel of its own, and returns a second tensor for
    backward.
    """
    mask = (torch.rand_like(x) > dropout).to(x.dtype)
    return x * mask, mask


@attention.register_fake
def _(x: torch.Tensor, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad * ctx.saved_tensors[0], None


attention.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    """Dropout before, in and after attention: (rows, DIM) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = attention(torch.sin(F.dropout(self.first(x), 0.3)), 0.4)[0]
        return x + F.dropout(torch.tanh(self.last(mixed)), 0.2)


class Simple(nn.Module):
    """Dropout alone."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.tanh(self.map(x)), 0.2)


class Lowering:
    """Traces forward and backward and divides them as Inductor does, and runs them as they are.

    Notes what torch is asked for.
    """

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any
    ) -> Any:
        self.asked.append(torch._functorch.config.graphsafe_rng_functionalization)
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)


def lowering() -> Lowering:
    """Put a Lowering in the place of torch's compiler."""
    backend.inductor = own = Lowering()  # type: ignore[assignment]
    return own


def make_blocks(kind: type[nn.Module] = Layer, **options: Any) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([bmt.Block(kind(), **options) for _ in range(2)])


def rows(number: int) -> torch.Tensor:
    return torch.linspace(-1, 1, number * DIM).view(number, DIM)


def repeatable(levels: Sequence[Level]) -> None:
    own = lowering()
    want = draws.step(make_blocks(use_checkpoint=Level.NOTHING), rows(4), draws.SEED)
    for level in levels:
        blocks = make_blocks(use_checkpoint=level)
        step = draws.assert_repeatable(
            blocks, [rows(4), rows(6), rows(9)], f"{level}, {bmt.world_size()} ranks"
        )
        draws.assert_alike(step, want, f"{level}, beside {Level.NOTHING}", 1e-6, 1e-6)
    assert len(own.asked) > 2, "nothing was compiled"
    assert not models.is_refused(blocks[0])


@pytest.mark.parametrize(
    ("world_size", "levels"), [(1, [Level.NOTHING, Level.CHEAP, Level.BLOCK]), (2, [Level.BLOCK])]
)
def test_a_seed_gives_the_same_numbers_again(world_size: int, levels: list[Level]) -> None:
    """From the first call on, which compiles, and at every level; a restored state does too.

    Forward and recomputation agree: gradients are those of a block that keeps everything.
    """
    run_ranks(repeatable, world_size, levels, init=BY_DEFAULT, timeout=120)


def planned() -> None:
    own = lowering()
    blocks = make_blocks(use_checkpoint="auto")
    # first of all: other blocks would compile for them
    found = [draws.step(blocks, rows(4), draws.SEED) for _ in range(5)]
    want = draws.step(make_blocks(use_checkpoint=Level.NOTHING), rows(4), draws.SEED)
    for number, got in enumerate(found):
        draws.assert_alike(got, want, f"pass {number} of planned blocks", 1e-6, 1e-6)
    assert own.asked, "nothing was compiled"
    assert not models.is_refused(blocks[0]), "measuring led to uncompiled code"


def test_measured_blocks_stay_compiled() -> None:
    """Passes that measure, too: the parameters that they run on look to the compiler as those of
    other passes do.
    """
    run_ranks(planned, 1, init={**BY_DEFAULT, "memory_limit": 2**30}, timeout=120)


def compiled_apart() -> tuple[list[draws.State], int]:
    own = lowering()
    blocks = make_blocks(use_checkpoint=True)
    states = [draws.step(blocks, rows(4), draws.SEED).state]
    for _ in range(2):
        if bmt.rank() == 1:
            torch._dynamo.reset()  # compiles again
        states.append(draws.step(blocks, rows(4), states[-1]).state)
    return states, len(own.asked)


def test_a_rank_that_compiles_draws_as_the_others() -> None:
    (first, few), (second, many) = run_ranks(compiled_apart, 2, init=BY_DEFAULT, timeout=60)
    assert few < many, "rank 1 did not compile again"
    for number, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(mine["cpu"], theirs["cpu"]), (
            f"step {number}: ranks have drawn differently"
        )


def asked() -> None:
    own = lowering()
    before = torch._functorch.config.graphsafe_rng_functionalization
    blocks = make_blocks(Simple, use_checkpoint=True)
    draws.step(blocks, rows(4), draws.SEED)
    assert own.asked == [False], "by default"
    for block in blocks:
        block.compile()
    draws.step(blocks, rows(4), draws.SEED)
    assert own.asked == [False, False], "on request"
    assert torch._functorch.config.graphsafe_rng_functionalization is before, "for others too"


def test_torch_is_asked_for_no_generators_of_its_own() -> None:
    """On a GPU it would make some, which no seed reaches.

    Only where blocks are lowered: a program's own code is its own affair.
    """
    run_ranks(asked, 1, init=BY_DEFAULT)


def by_inductor() -> None:
    blocks = make_blocks(Simple, use_checkpoint=True)
    draws.assert_repeatable(blocks, [rows(4)], "Inductor")
    assert not models.is_refused(blocks[0])
    for block in blocks:
        block.compile(dynamic=True)
    draws.assert_repeatable(blocks, [rows(4), rows(6)], "Inductor, sizes are variables")


def test_the_real_compiler_with_lengths_that_vary() -> None:
    """Inductor rewrites dropout; what it makes of it is compiled for all lengths, too."""
    run_ranks(by_inductor, 1, init=BY_DEFAULT, timeout=200)


def refused() -> None:
    block = bmt.Block(Simple())
    with pytest.raises(RuntimeError, match="fastest"):
        block.compile(mode="fastest")
    with pytest.raises(RuntimeError, match="no_such_option"):
        block.compile(options={"no_such_option": 1})


def test_wrong_options_are_refused_at_once() -> None:
    run_ranks(refused, 1)
