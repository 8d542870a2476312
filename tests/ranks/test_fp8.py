"""Blocks whose linear maps are in eight bits: the same numbers whatever the ZeRO level, the
recomputation and the compiler.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.compile import backend
from bmtrain.compile.fp8 import linear
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level

DIM = 32


class Own(nn.Module):
    """A linear map that is no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(DIM, 2 * DIM) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix)


class Layer(nn.Module):
    """Linear maps of every kind, one of them too narrow for eight bits, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), Own()
        self.narrow, self.back = nn.Linear(DIM, 5), nn.Linear(5, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.frozen(h) + self.back(self.narrow(x))


def eight_bits(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """What a Layer in eight bits computes, written out."""
    up, frozen = layer.up, layer.frozen
    h = linear(F.gelu(linear(layer.norm(x), up.weight, up.bias)), layer.down.matrix)
    return x + linear(h, frozen.weight, frozen.bias) + layer.back(layer.narrow(x))


def passed(
    layers: Iterable[Any], call: Callable[[Any, torch.Tensor], torch.Tensor], scale: float
) -> list[torch.Tensor]:
    """Output and gradient of the input, in gradients of the sum over ranks."""
    h = leaf = torch.linspace(-1, 1, 6 * DIM).view(2, 3, DIM).requires_grad_()
    for layer in layers:
        layer.zero_grad()
        h = call(layer, h)
    (h.square().sum() / scale).backward()
    return [h.detach(), grad_of(leaf) * scale]


def traced(
    graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any
) -> Callable[..., Any]:
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def everywhere(compiles: bool) -> None:
    backend.inductor = traced  # type: ignore[assignment]
    torch.manual_seed(1)
    plain = nn.ModuleList([Layer(), Layer()])
    want = passed(plain, eight_bits, 1)
    far = passed(plain, lambda layer, x: layer(x), 1)
    assert (want[0] - far[0]).abs().max() > 1e-4, "eight bits made no difference"
    passed(plain, eight_bits, 1)
    levels = (Level.NOTHING, Level.CHEAP, Level.BLOCK) if compiles else tuple(Level)
    for zero, level in itertools.product((2, 3), levels):
        blocks = nn.ModuleList(
            [
                bmt.Block(
                    copy.deepcopy(m),
                    use_checkpoint=level,
                    zero_level=zero,
                    compile=compiles,
                    fp8=True,
                )
                for m in plain
            ]
        )
        what = f"ZeRO-{zero}, {level}, compiled={compiles}"
        for mine, theirs in zip(
            passed(blocks, lambda layer, x: layer(x), bmt.world_size()), want, strict=True
        ):
            models.assert_same(mine, theirs, what)
        models.assert_same_dicts(models.full_gradients(blocks), models.plain_gradients(plain), what)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("compiles", [False, True])
def test_eight_bits_are_the_same_everywhere(world_size: int, compiles: bool) -> None:
    run_ranks(everywhere, world_size, compiles, timeout=90)


class Checkpointed(Layer):
    """Recomputes a part of itself."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.part, x, use_reentrant=self.is_reentrant)
        return x + self.frozen(h) + self.back(self.narrow(x))


def checkpoints_inside() -> None:
    for is_reentrant in (False, True):
        torch.manual_seed(1)
        plain = Checkpointed(is_reentrant)
        want = passed([plain], eight_bits, 1)
        for level in (Level.NOTHING, Level.BLOCK):
            block = bmt.Block(copy.deepcopy(plain), use_checkpoint=level, fp8=True)
            for mine, theirs in zip(
                passed([block], lambda layer, x: layer(x), bmt.world_size()), want, strict=True
            ):
                models.assert_same(mine, theirs, f"reentrant={is_reentrant}, {level}")
            models.assert_same_dicts(
                models.full_gradients(block),
                models.plain_gradients(plain),
                f"{is_reentrant}, {level}",
            )


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_of_the_module_itself(world_size: int) -> None:
    """They compute in backward what they computed in forward."""
    run_ranks(checkpoints_inside, world_size)


def asked_to_compile() -> None:
    torch.manual_seed(1)
    plain = Layer()
    want = passed([plain], eight_bits, 1)
    block = bmt.Block(copy.deepcopy(plain), use_checkpoint=False, fp8=True)
    block.compile(backend="aot_eager")
    for mine, theirs in zip(passed([block], lambda layer, x: layer(x), 1), want, strict=True):
        models.assert_same(mine, theirs, "block.compile()")


def test_a_block_that_is_asked_to_compile() -> None:
    run_ranks(asked_to_compile, 1)


def by_default() -> None:
    torch.manual_seed(1)
    plain = Layer()
    x = torch.linspace(-1, 1, 4 * DIM).view(4, DIM)
    with torch.no_grad():
        block, other = bmt.Block(copy.deepcopy(plain)), bmt.Block(copy.deepcopy(plain), fp8=False)
        assert torch.equal(block(x), eight_bits(plain, x))
        assert torch.equal(other(x), plain(x))


def test_the_default_of_the_run() -> None:
    run_ranks(by_default, 1, init={"fp8": True})


class Other(nn.Module):
    """Products by another function."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


def nothing_to_do() -> None:
    backend.inductor = traced  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            bmt.Block(Other(), compile=True, fp8=True)(torch.ones(2, DIM)).sum().backward()
    told = [str(each.message) for each in said if each.category is UserWarning]
    assert len(told) == 1 and "fp8=True changes nothing in Other" in told[0], told


def test_a_block_without_linear_maps_is_told_of() -> None:
    run_ranks(nothing_to_do, 1)


def wrong() -> None:
    with pytest.raises(ConfigurationError, match="fp8 is 'e4m3': expected True, False"):
        bmt.Block(Layer(), fp8="e4m3")  # type: ignore[arg-type]


def test_other_values_are_refused() -> None:
    run_ranks(wrong, 1)


def trained() -> list[list[float]]:
    """Losses of a few steps, plain and in eight bits."""
    curves = []
    for fp8 in (False, True):
        torch.manual_seed(2)
        blocks = bmt.TransformerBlockList([bmt.Block(Layer(), fp8=fp8) for _ in range(2)])
        optimizer = bmt.optim.AdamOptimizer(blocks.parameters(), lr=3e-3)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(bmt.rank()))
        target = x.roll(1, -1)
        curve = []
        for _ in range(30):
            loss = (blocks(x) - target).square().mean()
            manager.zero_grad()
            manager.backward(loss)
            manager.step()
            curve.append(loss.item())
        curves.append(curve)
    return curves


def test_training_in_eight_bits_learns() -> None:
    for plain, eight in run_ranks(trained, 2):
        assert plain[-1] < 0.5 * plain[0]
        assert abs(eight[-1] / plain[-1] - 1) < 0.1, (plain[-1], eight[-1])
        assert eight != plain
