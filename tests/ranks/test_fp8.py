"""Blocks whose linear maps are in eight bits: the same numbers whatever the ZeRO level, the
recomputation and the compiler.
"""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.ranks.passes import ask, blocks_of, compare, run
from tests.ranks.runner import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.compile import backend
from bmtrain.compile.fp8 import linear
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level

DIM = 32
X = torch.linspace(-1, 1, 6 * DIM).view(2, 3, DIM)


class Layer(nn.Module):
    """Linear maps of every kind, one that is no nn.Linear, one too narrow for eight bits, and one
    that is frozen; with a part that recomputes itself.
    """

    def __init__(self, reentrant=None):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM)
        self.down = nn.Parameter(torch.randn(DIM, 2 * DIM) / 8)
        self.narrow, self.back = nn.Linear(DIM, 5), nn.Linear(5, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.reentrant = reentrant

    def part(self, x):
        return F.linear(F.gelu(self.up(self.norm(x))), self.down)

    def forward(self, x):
        if self.reentrant is None:
            h = self.part(x)
        else:
            h = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return x + self.frozen(h) + self.back(self.narrow(x))


def eight_bits(layer, x):
    """What a Layer in eight bits computes, written out."""
    up, frozen = layer.up, layer.frozen
    h = linear(F.gelu(linear(layer.norm(x), up.weight, up.bias)), layer.down)
    return x + linear(h, frozen.weight, frozen.bias) + layer.back(layer.narrow(x))


def layers(*reentrant):
    torch.manual_seed(1)
    return nn.ModuleList([Layer(each) for each in reentrant])


@on_ranks(2, init={"fp8": True})
def test_eight_bits_are_the_same_everywhere():
    """Checkpoints of the module itself compute in backward what they computed in forward. The
    default is the run's, and a block may say.
    """
    for zero_level, level in itertools.product((2, 3), Level):
        plain = layers(*((None, None), (False, True))[level in (Level.NOTHING, Level.BLOCK)])
        blocks = blocks_of(plain, use_checkpoint=level, zero_level=zero_level)
        what = f"ZeRO-{zero_level}, {level}"
        compare(plain, blocks, what, X, plainly=eight_bits, times=2)
        compare(plain, blocks_of(plain, fp8=False), f"{what}, not in eight bits", X)
    near, far = (run(plain, X, call)[0][0] for call in (eight_bits, ask))
    assert (near - far).abs().max() > 1e-4, "eight bits made no difference"
    with pytest.raises(ConfigurationError, match="fp8 is 'e4m3': expected True, False"):
        bmt.Block(Layer(), fp8="e4m3")  # type: ignore[arg-type]


class Other(nn.Module):
    """Products by another function."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x):
        return x @ self.matrix


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("zero_level", "level"),
    [
        (2, Level.CHEAP),
        pytest.param(3, Level.BLOCK, marks=pytest.mark.long),
        pytest.param(3, Level.NOTHING, marks=pytest.mark.long),
    ],
)
@on_ranks(2)
def test_eight_bits_in_compiled_code(zero_level, level):
    """By default and on request; a block without linear maps is told of, once."""
    traced = torch._dynamo.lookup_backend("aot_eager")

    def lower(graph, inputs, **options):
        return traced(graph, inputs)

    backend.inductor = lower
    plain = layers(None, None)
    options = {"use_checkpoint": level, "zero_level": zero_level, "fp8": True}
    blocks = blocks_of(plain, compile=True, **options)
    compare(plain, blocks, f"compiled, {options}", X, plainly=eight_bits)
    blocks = blocks_of(plain[:1], **options)
    blocks[0].compile(backend="aot_eager")
    compare(plain[:1], blocks, f"on request, {options}", X, plainly=eight_bits)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            bmt.Block(Other(), compile=True, fp8=True)(torch.ones(2, DIM)).sum().backward()
    told = [str(each.message) for each in said if each.category is UserWarning]
    assert len(told) == 1 and "fp8=True changes nothing in Other" in told[0], told
