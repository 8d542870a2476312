"""A recomputation replays its forward pass: generators, attributes, buffers, arguments, switches
and TorchScript, against plain PyTorch.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import itertools
import math
import operator
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.ranks.passes import Call, ask, compare, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.errors import RecomputationError
from bmtrain.recompute.level import Level

DIM, NUM_LAYERS = 16, 2
MODES = [(Level.CHEAP, 2), (Level.BLOCK, 3), (Level.OFFLOADED, 2)]
SDP = torch.backends.cuda
TOGGLES: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [
    (SDP.flash_sdp_enabled, SDP.enable_flash_sdp),
    (SDP.mem_efficient_sdp_enabled, SDP.enable_mem_efficient_sdp),
    (SDP.math_sdp_enabled, SDP.enable_math_sdp),
    (SDP.cudnn_sdp_enabled, SDP.enable_cudnn_sdp),
]


def script(code: Any, *traced: Tensor) -> Any:
    """What TorchScript makes of a function or a module; torch says that it is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(code, traced) if traced else torch.jit.script(code)


@script
def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


@script
def drop_add(x: Tensor, rest: Tensor, p: float, training: bool) -> Tensor:
    return torch.nn.functional.dropout(x * torch.sigmoid(x), p=p, training=training) + rest


class Base(nn.Module):
    """One linear map; what comes before and after it is the program's."""

    def __init__(self, scripted: bool = False) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))
        self.scripted, self.act = scripted, nn.Tanh()
        self.setup()

    def setup(self) -> None:
        """More state."""

    def map(self, x: Tensor) -> Tensor:
        if self.scripted:
            y: Tensor = drop_add(self.linear(rms(x, self.scale, 1e-6)), x, 0.3, self.training)
            return y
        return torch.dropout(self.act(self.linear(x) * self.scale), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)


@dataclasses.dataclass(slots=True)
class Tally:
    number: int = 0


class Texts(list[str]):
    number = 0


class Stateful(Base):
    """Draws from everything that draws, counts in everything that can be counted in, and reads what
    the program changes between forward and backward.
    """

    moving: Tensor
    replaced: Tensor
    factor: Tensor

    def setup(self) -> None:
        self.sources: list[Any] = [
            random.Random(1),
            {"a": np.random.default_rng(3)},
            np.random.RandomState(4),
        ]
        self.space = types.SimpleNamespace(generator=random.Random(3), number=0)
        self.bits, self.torch = np.random.PCG64(3), torch.Generator().manual_seed(5)
        self.number, self.log, self.table, self.tally = 0, list[int](), dict[str, int](), Tally()
        self.order, self.last_seen = collections.OrderedDict[int, int](), collections.deque([0])
        self.known, self.texts, self.bytes = set[int](), Texts(), bytearray(1)
        self.small, self.pair = array.array("l", [0]), (torch.zeros(()), [0])
        self.array, self.tensor, self.steps = np.zeros(2), torch.zeros(()), itertools.count(1)
        for name in ("moving", "replaced", "factor"):
            self.register_buffer(name, torch.ones(()))
        self.last: Tensor | None = None
        self.flag = 2.0

    def drawn(self) -> float:
        first, second, third = self.sources
        ours = first.random() * second["a"].random() * third.normal()
        ours *= self.space.generator.random() * np.random.Generator(self.bits).random()
        ours *= torch.rand((), generator=self.torch, device="cpu").item()
        whole = random.random() * random.gauss(1, 0.1) * float(np.random.normal())
        return float(10 * ours + whole + (np.random.rand() < 0.5))

    def counted(self) -> float:
        self.number += 1
        self.log.append(self.number)
        self.table["calls"] = self.table.get("calls", 0) + 1
        self.order[self.number] = self.number
        self.last_seen.append(self.number)
        self.known.add(self.number)
        self.texts.append("more")
        self.pair[1].append(1)
        for counter in (self.tally, self.space, self.texts):
            counter.number += 1
        for numbers in (self.bytes, self.small, self.array):
            numbers[0] += 1
        self.tensor += 1
        self.moving.add_(1)
        self.replaced = self.replaced + 1
        counts = self.counts()
        before = 0.0 if self.last is None else self.last.detach().mean().item()
        return before + next(self.steps) + sum(n * float(x) for n, x in enumerate(counts, 1))

    def counts(self) -> list[Any]:
        numbers = [self.number, self.tally.number, self.space.number, self.texts.number]
        held = [self.log, self.order, self.last_seen, self.known, self.texts, self.pair[1]]
        places = [self.bytes[0], self.small[0], self.array[0], self.table.get("calls", 0)]
        return [*numbers, *map(len, held), *places, self.tensor, self.moving, self.replaced]

    def around(self) -> float:
        """A number that says where all of torch's switches are."""
        bits = [
            *(read() for read, _ in TOGGLES),
            torch.get_default_dtype() is torch.float32,
            torch.empty(0).device.type == "cpu",
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu") is torch.bfloat16,
            torch.is_autocast_cache_enabled(),
            self.training,
        ]
        return sum(number for number, bit in enumerate(bits, 1) if bit)

    def forward(self, x: Tensor) -> Tensor:
        total = self.drawn() + self.counted() + self.around() * self.flag
        number = 1 + math.sin(total) / 2  # as different for any difference
        self.last = self.map(x * number * self.factor)
        return self.last


@contextlib.contextmanager
def disturbed(layers: nn.ModuleList) -> Iterator[None]:
    """What a program may do between forward and backward, and what it finds afterwards."""
    parts: list[Any] = [*layers]
    acts = [part.act for part in parts]
    layers.eval()
    for part in parts:
        part.flag, part.factor, part.act = 7.0, torch.full((), 3.0), nn.Identity()
        part.log.append(9)
        part.table.clear()
        part.moving.add_(5)
        part.more = 1
    handle = acts[0].register_forward_hook(lambda *_: torch.zeros(()))
    before = [read() for read, _ in TOGGLES]
    for (_, write), was in zip(TOGGLES, before, strict=True):
        write(not was)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        yield
        assert torch.get_default_dtype() is torch.float64
        assert torch.empty(0).device.type == "meta"
        assert [read() for read, _ in TOGGLES] == [not was for was in before]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        for (_, write), was in zip(TOGGLES, before, strict=True):
            write(was)
    handle.remove()
    layers.train()
    for part, act in zip(parts, acts, strict=True):
        assert (part.flag, float(part.factor), part.more) == (7.0, 3.0, 1)
        part.flag, part.factor, part.act = 2.0, torch.ones(()), act


class Given(Base):
    """Draws from what it is given, changes it, and returns containers."""

    def forward(self, x: Tensor, generator: Any, held: list[Any], *, seen: Any) -> Any:  # type: ignore[override]
        if not self.scripted:
            seen["rows"].append(self.map(x) + seen["rows"][0])
        number = held[0].random() * next(held[1]) * len(seen["rows"])
        held.append(1)
        y = torch.stack(seen["rows"]).sum(0) * torch.rand(DIM, generator=generator) * number
        return self.map(y), {"b": [y.sin(), x, None, len(held)]}


def give(module: nn.Module, x: Tensor) -> Tensor:
    held: list[Any] = [random.Random(3), itertools.count(2)]
    seen = {"rows": [x]}
    y, rest = module(x, torch.Generator().manual_seed(3), held, seen=seen)
    assert (len(held), next(held[1])) == (3, 3)
    assert rest["b"][2:] == [None, 3]
    z: Tensor = y + rest["b"][0].mul_(2) + rest["b"][1]
    return z


class CompiledNorm(nn.Module):
    """To be compiled: with a counter, and buffers that move."""

    if TYPE_CHECKING:  # TorchScript does not understand it
        moving: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.number = nn.BatchNorm1d(DIM), 0
        self.register_buffer("moving", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.moving += 1
        y: Tensor = self.norm(x) * self.number * self.moving[0]
        return y


class Compiled(Base):
    def setup(self) -> None:
        self.norm = script(CompiledNorm())
        traced = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        self.traced = script(traced, torch.ones(2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.traced(self.norm(self.map(x)))
        return y


class CheckpointInside(Base):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.map, rms(x, self.scale, 1e-6), use_reentrant=self.reentrant)


class ReentrantInside(CheckpointInside):
    reentrant = True


class Nested(Base):
    def setup(self) -> None:
        self.part: nn.Module = Base(self.scripted)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(self.part(x)) + x


def under_autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y: Tensor = module(x)
    return y.float()


# Whether TorchScript runs in it; a checkpoint's argument is scripted anyway.
PROGRAMS: list[tuple[type[Base], Call, bool]] = [
    (Stateful, ask, False),
    (Stateful, ask, True),
    (Stateful, under_autocast, True),
    (Given, give, False),
    (Given, give, True),
    (Compiled, ask, False),
    (CheckpointInside, ask, False),
    (ReentrantInside, ask, True),
    (Nested, ask, False),
    (Nested, ask, True),
]


COUNTS = operator.methodcaller("counts")


def make(kind: type[Base], scripted: bool = False) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([kind(scripted) for _ in range(NUM_LAYERS)])


def sharded(plain: nn.ModuleList, **options: Any) -> Any:
    """Blocks, and blocks inside of them."""
    first: Any = plain[0]
    layers = make(type(first), first.scripted)[: len(plain)]
    for layer in layers:
        if isinstance(layer, Nested):
            layer.part = bmt.Block(layer.part, **options)
    return nn.ModuleList([bmt.Block(layer, **options) for layer in layers])


@pytest.mark.parametrize(("kind", "by", "scripted"), PROGRAMS)
@on_ranks(2)
def test_a_recomputation_replays_its_forward_pass(
    kind: type[Base], by: Call, scripted: bool
) -> None:
    """Values, gradients, buffers, counters, and what is drawn afterwards, over steps in which
    TorchScript changes its plans; of two backward passes each.
    """
    around = disturbed if kind is Stateful else contextlib.nullcontext
    for level, zero_level in MODES:
        plain = make(kind, scripted)
        blocks = sharded(plain, use_checkpoint=level, zero_level=zero_level)
        for number in range(4 if scripted else 2):
            x = torch.randn(6 - number % 2, DIM, generator=torch.Generator().manual_seed(number))
            what = f"{kind.__name__}, {level}, ZeRO-{zero_level}, step {number}"
            tolerance = 1e-2 if by is under_autocast else 1e-5
            compare(plain, blocks, what, x, by, tolerance=tolerance, times=2, around=around)
            if kind is Stateful:
                assert str([*map(COUNTS, blocks)]) == str([*map(COUNTS, plain)]), what
        for block in blocks:
            block.last = None  # its graph knows the block


class Reading(Base):
    """Adds an argument, a buffer and a held tensor, and may write the argument."""

    shift: Tensor

    def setup(self) -> None:
        self.register_buffer("shift", torch.ones(()))
        self.held, self.large = [torch.ones(())], torch.ones(300, DIM)

    def forward(self, x: Tensor, plus: Any, writes: bool = False) -> Tensor:  # type: ignore[override]
        y = self.map(x + plus + self.shift + self.held[0] + self.large[0])
        if writes:
            plus.add_(1)
        return y


def called(module: Any, x: Tensor) -> Tensor:
    return module(x, torch.ones(DIM))


WRITTEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "argument 1": lambda block, plus: plus,
    "argument 'plus'": lambda block, plus: plus,
    "argument": lambda block, plus: plus.sub_(2),
    "buffer 'shift' of Reading": lambda block, plus: block.shift,
    "attribute 'large' of Reading": lambda block, plus: block.large,
    "attribute 'held' of Reading": lambda block, plus: block.held[0],
}


@pytest.mark.parametrize("scripted", [False, True])
@on_ranks(2)
def test_what_has_changed_is_refused(scripted: bool) -> None:
    """A tensor that was given, written by the program or by the module, a buffer and what the
    module holds; the next step is that of plain PyTorch.
    """
    x = torch.ones(2, DIM)
    plain = make(Reading, scripted)
    for level in (Level.CHEAP, Level.BLOCK, Level.OFFLOADED):
        blocks = sharded(plain, use_checkpoint=level)
        for where, written in WRITTEN.items():
            plus, block = torch.ones(DIM), blocks[0]
            blocks.zero_grad()
            y = block(x, plus=plus) if "plus" in where else block(x, plus, where == "argument")
            tensor = written(block, plus).add_(2)
            with pytest.raises(RecomputationError, match=f"{where}.*inplace operation"):
                blocks[1](y, torch.ones(DIM)).sum().backward()
            assert all(param.grad is None for param in block.parameters())
            tensor.sub_(2)
            compare(plain, blocks, f"{level}, {where}", x, called)


class Leaving(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        self.left = y.mean()
        return y


class Fewer(Base):
    """Returns fewer tensors the second time, by a number that nobody knows."""

    calls = itertools.count()

    def forward(self, x: Tensor) -> Any:
        y = self.map(x)
        return [] if next(Fewer.calls) else [y]


@on_ranks(2)
def test_what_scripts_cannot_replay_is_refused() -> None:
    x = torch.ones(2, DIM, requires_grad=True)
    plain = make(Leaving, True)[:1]
    (block,) = blocks = sharded(plain)
    with pytest.raises(RecomputationError, match="create_graph=True"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)
    compare(plain, blocks, "after gradients of gradients", x)
    y = block(x)
    with pytest.raises(RecomputationError, match="left in an attribute"):
        (y.sum() + block.left).backward()
    compare(plain, blocks, "after an attribute", x)
    block.left = None
    plain = make(Reading, True)[:1]
    (block,) = blocks = sharded(plain)
    block.held[0] = x.sin()
    with pytest.raises(RecomputationError, match="none of its arguments"):
        called(block, x)
    block.held[0] = torch.ones(())
    compare(plain, blocks, "after a tensor from elsewhere", x, called)
    plain = make(Nested, True)[:1]
    blocks = sharded(plain)
    with pytest.raises(RecomputationError, match="of some tensors only"):
        torch.autograd.grad(blocks[0](x).sum(), x)
    compare(plain, blocks, "after some gradients only", x)
    with pytest.raises(RecomputationError, match="returned 0 tensors"):
        bmt.Block(Fewer(True))(x)[0].sum().backward()
