"""Random numbers of compiled blocks on a GPU: those of the program's generators, inside of
attention too, whoever compiles when.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.test_compile import assert_compiled
from tests.ranks import draws, models
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.recompute.level import Level

pytestmark = pytest.mark.gpu
DIM, HEADS, LENGTH = 128, 2, 64
# Kernels of attention add gradients in any order, and levels are compiled apart: both differ in the
# last bits of bf16.
BF16 = 3e-2


class Layer(torch.nn.Module):
    """Attention with dropout, and dropout before and after it: (batch, LENGTH, DIM) to the same."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (
            self.qkv(F.dropout(x, 0.2))
            .unflatten(-1, (3, HEADS, DIM // HEADS))
            .movedim(-3, 0)
            .transpose(-2, -3)
        )
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return x + F.dropout(torch.tanh(self.out(heads.transpose(-2, -3).flatten(-2))), 0.2)


def make_blocks(**options):
    warnings.filterwarnings("ignore", module=r"torch\.")
    torch.manual_seed(3)
    layers = [Layer().to(bmt.device(), torch.bfloat16) for _ in range(3)]
    return torch.nn.ModuleList([bmt.Block(layer, **options) for layer in layers])


def inputs(batch):
    numbers = torch.arange(batch * LENGTH * DIM, device=bmt.device(), dtype=torch.float32)
    return numbers.sin().view(batch, LENGTH, DIM).to(torch.bfloat16)


def repeatable(level, on_request, *batches):
    blocks = make_blocks(use_checkpoint=level)
    for block in blocks if on_request else ():
        block.compile()
    what = f"{level}, {'on request' if on_request else 'by default'}, {bmt.world_size()} ranks"
    draws.assert_repeatable(blocks, [inputs(batch) for batch in batches], what, BF16)
    if not on_request:
        assert_compiled(blocks[0])


@pytest.mark.parametrize("level", Level)
def test_a_seed_gives_the_same_numbers_again(level):
    """From the first call on, which compiles, and so does a restored state."""
    run_ranks(repeatable, torch.cuda.device_count(), level, False, 4, device=None, timeout=200)


@pytest.mark.parametrize("level", [Level.CHEAP, Level.BLOCK])
def test_so_it_is_when_sizes_have_become_variables(level):
    """Which they are from the third size on."""
    run_ranks(
        repeatable, torch.cuda.device_count(), level, False, 4, 6, 9, device=None, timeout=200
    )


def test_so_it_is_on_request():
    run_ranks(
        repeatable, torch.cuda.device_count(), Level.BLOCK, True, 4, 6, device=None, timeout=200
    )


def alike():
    want = draws.step(make_blocks(use_checkpoint=Level.NOTHING), inputs(4), draws.SEED)
    for level in (Level.CHEAP, Level.BLOCK):
        got = draws.step(make_blocks(use_checkpoint=level), inputs(4), draws.SEED)
        draws.assert_alike(got, want, f"{level}, beside {Level.NOTHING}", BF16, BF16)


def test_levels_draw_alike():
    """The same masks, in attention too: a plan that changes levels changes no numbers.

    And recomputation meets those of forward.
    """
    run_ranks(alike, 1, device=None, timeout=200)


def planned():
    blocks = make_blocks(use_checkpoint="auto")
    want = draws.step(blocks, inputs(4), draws.SEED)
    for number in range(1, 5):
        draws.assert_alike(
            draws.step(blocks, inputs(4), draws.SEED),
            want,
            f"pass {number} of planned blocks",
            BF16,
            BF16,
        )
    assert_compiled(blocks[0])


def test_measuring_draws_nothing():
    """Passes that measure, passes before the plan and with it draw the same."""
    run_ranks(planned, 1, device=None, timeout=200)


def compiled_apart():
    blocks, found = make_blocks(use_checkpoint=True), []
    for resets in (False, True):
        states = []
        for _ in range(3):
            if resets and bmt.rank() == bmt.world_size() - 1:
                torch._dynamo.reset()  # compiles again
            states.append(draws.step(blocks, inputs(4), states[-1] if states else draws.SEED).state)
        found.append(states)
    return found[0], found[1]


def test_compiling_draws_nothing():
    """The last rank compiles again before every step: its generators go as far as before, and as
    those of the others.
    """
    found = run_ranks(compiled_apart, torch.cuda.device_count(), device=None, timeout=200)
    for rank, runs in enumerate(found):
        for again, states in enumerate(runs):
            for number, (mine, first) in enumerate(zip(states, found[0][0], strict=True)):
                what = (
                    f"rank {rank}, {'compiling again' if again else 'as it comes'}, step "
                    f"{number}: generators"
                )
                models.assert_same_dicts(mine, first, what, 0.0)
