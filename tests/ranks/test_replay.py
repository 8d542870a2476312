"""A recomputation replays its forward pass: generators, attributes, buffers, arguments and
TorchScript, against plain PyTorch.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import RecomputationError
from bmtrain.recompute.level import Level

DIM, NUM_LAYERS, NUM_STEPS = 16, 2, 4
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def script(code: Any) -> Any:
    """What TorchScript makes of a function or a module; torch says that it is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(code)


def trace(module: nn.Module, x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, x)


@script
def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


@script
def drop_add(x: torch.Tensor, rest: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    return torch.nn.functional.dropout(x * torch.sigmoid(x), p=p, training=training) + rest


class Base(nn.Module):
    """One linear map; what comes before and after it is the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))
        self.setup()

    def setup(self) -> None:
        """More state."""

    def map(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x)


class Globals(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.map(x * random.random()) * random.gauss(1, 0.1) * float(np.random.normal())
        return y + x if np.random.rand() < 0.5 else y


class Holder:
    def __init__(self) -> None:
        self.generator = random.Random(3)


class Owned(Base):
    def setup(self) -> None:
        self.sources: list[Any] = [
            random.Random(1),
            {"a": np.random.default_rng(3)},
            np.random.RandomState(4),
        ]
        self.holder, self.bits, self.torch = (
            Holder(),
            np.random.PCG64(3),
            torch.Generator().manual_seed(5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.sources
        factor = (
            first.random() * second["a"].random() * third.normal() * self.holder.generator.random()
        )
        return self.map(x * factor * np.random.Generator(self.bits).random()) * torch.rand(
            DIM, generator=self.torch
        )


@dataclasses.dataclass(slots=True)
class Tally:
    number: int = 0


class Counting(Base):
    """Everything that can be counted in."""

    moving: torch.Tensor
    replaced: torch.Tensor

    def setup(self) -> None:
        self.number, self.log, self.table, self.tally = 0, list[int](), dict[str, int](), Tally()
        self.array, self.tensor, self.steps = np.zeros(2), torch.zeros(()), itertools.count(1)
        self.register_buffer("moving", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.log.append(self.number)
        self.table["calls"] = self.table.get("calls", 0) + 1
        self.tally.number += 1
        self.array += 1
        self.tensor += 1
        self.moving.add_(1)
        self.replaced = self.replaced + 1
        total = (
            self.number
            + len(self.log)
            + self.table["calls"]
            + self.tally.number
            + float(self.array[0])
            + next(self.steps)
        )
        before = 0.0 if self.last is None else self.last.detach().mean()
        self.last = self.map(x * total * self.tensor * self.moving * self.replaced + before)
        return self.last

    def counts(self) -> str:
        return str(
            (
                self.number,
                self.log,
                self.table,
                self.tally,
                self.array,
                self.tensor,
                self.moving,
                self.replaced,
            )
        )


class Switched(Base):
    """Reads what the program changes between forward and backward."""

    factor: torch.Tensor

    def setup(self) -> None:
        self.flag = 2.0
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.dropout(self.map(x * self.flag * self.factor), 0.5, self.training)
        return y * torch.full((DIM,), 0.1).to(x.dtype)


class Scripted(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return drop_add(self.linear(rms(x, self.scale, 1e-6)), x, 0.3, self.training)


class ScriptedContainers(Base):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, other: dict[str, torch.Tensor], more: list[torch.Tensor]
    ) -> Any:
        return rms(self.linear(x * other["a"]), self.scale, 1e-6), {
            "b": [drop_add(x, more[0], 0.1, True), x, None, 3]
        }


class CompiledNorm(nn.Module):
    """To be compiled: with a counter, and buffers that move."""

    if TYPE_CHECKING:  # TorchScript does not understand it
        moving: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.number = nn.BatchNorm1d(DIM), 0
        self.register_buffer("moving", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.moving += 1
        y: torch.Tensor = self.norm(x) * self.number * self.moving[0]
        return y


class WithScriptModule(Base):
    def setup(self) -> None:
        self.compiled = script(CompiledNorm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.compiled(self.map(x))
        return y


class WithTracedModule(Base):
    def setup(self) -> None:
        self.compiled = trace(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()), torch.ones(2, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.compiled(self.map(x))
        return y


class CheckpointInside(Base):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.utils.checkpoint.checkpoint(
            self.map, rms(x, self.scale, 1e-6), use_reentrant=self.reentrant
        )
        return x + inner


class ReentrantInside(CheckpointInside):
    reentrant = True


class Nested(Base):
    def setup(self) -> None:
        self.part: nn.Module = Scripted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms(self.map(self.part(x)), self.scale, 1e-6) + x


def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = module(x)
    return y


def with_generators(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = module(x, torch.Generator().manual_seed(3), held=[random.Random(3)])
    return y


class Given(Base):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, generator: torch.Generator, held: list[random.Random]
    ) -> torch.Tensor:
        return self.map(x) * torch.rand(DIM, generator=generator) * held[0].random()


def with_containers(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, rest = module(x, {"a": x.sin()}, more=[x])
    z: torch.Tensor = y + rest["b"][0].mul_(2) + rest["b"][1]
    return z


def under_autocast(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: torch.Tensor = module(x)
    return y.float()


PROGRAMS: dict[str, tuple[type[Base], Call]] = {
    "global generators": (Globals, call),
    "generators of the module": (Owned, call),
    "generators given": (Given, with_generators),
    "counters": (Counting, call),
    "switches": (Switched, call),
    "TorchScript": (Scripted, call),
    "TorchScript under autocast": (Scripted, under_autocast),
    "TorchScript with containers": (ScriptedContainers, with_containers),
    "script module": (WithScriptModule, call),
    "traced module": (WithTracedModule, call),
    "checkpoint inside": (CheckpointInside, call),
    "reentrant checkpoint inside": (ReentrantInside, call),
    "nested": (Nested, call),
}


def make(kind: type[Base]) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([kind() for _ in range(NUM_LAYERS)])


def disturb(layers: nn.ModuleList) -> None:
    """What a program may do between forward and backward."""
    layers.eval()
    for layer in layers:
        layer.flag, layer.factor = 7.0, torch.full((), 3.0)  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")


def calm(layers: nn.ModuleList) -> None:
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    layers.train()
    for layer in layers:
        layer.flag, layer.factor = 2.0, torch.ones(())  # type: ignore[assignment]


def step(
    layers: nn.ModuleList, by: Call, rows: int, share: int
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Output, gradient of the input, and where all generators stand."""
    torch.manual_seed(4), random.seed(5), np.random.seed(6)
    layers.zero_grad()
    x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y = x * 1.5
    for layer in layers:
        y = by(layer, y)
    loss = y.square().mean() / share
    is_switched = isinstance(layers[0], Switched)
    if is_switched:
        disturb(layers)
    loss.backward(retain_graph=True)
    loss.backward()
    if is_switched:
        calm(layers)
    stands = str(
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False))
    )
    if x.grad is None:
        raise ValueError("the input got no gradient")
    return y.detach(), x.grad * share, stands


def replays(name: str, level: Level | str, zero_level: int) -> None:
    kind, by = PROGRAMS[name]
    plain, layers = make(kind), make(kind)
    for layer in layers:
        if isinstance(layer, Nested):
            layer.part = bmt.Block(layer.part, use_checkpoint=level, zero_level=zero_level)
    blocks = nn.ModuleList(
        [bmt.Block(layer, use_checkpoint=level, zero_level=zero_level) for layer in layers]
    )
    for number in range(NUM_STEPS):
        what = f"{name}, {level}, ZeRO-{zero_level}, step {number}"
        rows = 6 if number < NUM_STEPS - 1 else 5
        want, got = step(plain, by, rows, 1), step(blocks, by, rows, bmt.world_size())
        tolerance = 1e-2 if by is under_autocast else 1e-5
        models.assert_same(got[0], want[0], f"{what}: value", tolerance)
        models.assert_same(got[1], want[1], f"{what}: gradient of the input", tolerance)
        assert got[2] == want[2], f"{what}: generators stand elsewhere"
        models.assert_same_dicts(
            models.full_gradients(blocks), models.plain_gradients(plain), what, tolerance
        )
        for (own, buffer), (_, expected) in zip(
            blocks.named_buffers(), plain.named_buffers(), strict=True
        ):
            models.assert_same(buffer, expected, f"{what}: {own}")
        if kind is Counting:
            counts = operator.methodcaller("counts")
            assert [*map(counts, blocks)] == [*map(counts, plain)], what


def every_level(name: str) -> None:
    for level, zero_level in itertools.product([*Level, "auto"], (2, 3)):
        replays(name, level, zero_level)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recomputation_replays_its_forward_pass(name: str, world_size: int) -> None:
    """Values, gradients, buffers, counters, and what is drawn afterwards, over steps in which
    TorchScript changes its plans.
    """
    run_ranks(every_level, world_size, name)


class Plus(Base):
    def forward(self, x: torch.Tensor, plus: torch.Tensor, writes: bool = False) -> torch.Tensor:  # type: ignore[override]
        y = self.map(x + plus)
        if writes:
            plus.add_(1)
        return y


RECOMPUTED = (Level.CHEAP, Level.BLOCK, Level.OFFLOADED)


def arguments_written() -> None:
    for level, named, by_module in itertools.product(RECOMPUTED, (False, True), (False, True)):
        block, plus = bmt.Block(Plus(), use_checkpoint=level), torch.ones(DIM)
        x = torch.ones(2, DIM, requires_grad=True)
        y = block(x, plus=plus, writes=by_module) if named else block(x, plus, by_module)
        if not by_module:
            plus.fill_(3)
        with pytest.raises(RecomputationError, match="modified by an inplace operation"):
            y.sum().backward()
        assert all(param.grad is None for param in block.parameters())


class Buffered(Base):
    shift: torch.Tensor

    def setup(self) -> None:
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x + self.shift)


def buffers_written() -> None:
    for level in RECOMPUTED:
        block = bmt.Block(Buffered(), use_checkpoint=level)
        y = block(torch.ones(2, DIM))
        block.shift.fill_(3)
        with pytest.raises(RecomputationError, match="buffer 'shift' of Buffered"):
            y.sum().backward()


class Leaving(Scripted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.left = y.mean()
        return y


class Reading(Scripted):
    def setup(self) -> None:
        self.held: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.held[0]


def scripts_refused() -> None:
    x = torch.ones(2, DIM, requires_grad=True)
    block = bmt.Block(Scripted())
    with pytest.raises(RecomputationError, match="create_graph=True"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)
    block = bmt.Block(Leaving())
    y = block(x)
    with pytest.raises(RecomputationError, match="left in an attribute"):
        (y.sum() + block.left).backward()
    block = bmt.Block(Reading())
    block.held.append(x.sin())
    with pytest.raises(RecomputationError, match="none of its arguments"):
        block(x)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("program", [arguments_written, buffers_written, scripts_refused])
def test_what_cannot_be_replayed_is_refused(program: Callable[[], None], world_size: int) -> None:
    run_ranks(program, world_size)
