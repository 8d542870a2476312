"""A recomputation finds what its forward pass found: generators, attributes, buffers, arguments and
switches are put back. Where that cannot be, a pass keeps its activations, or backward is refused.
Against plain PyTorch.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import gc
import importlib
import itertools
import math
import operator
import os
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import sharedctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.ranks.passes import Call, ask, compare
from tests.ranks.runner import on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.errors import RecomputationError
from bmtrain.recompute.level import Level

DIM, NUM_LAYERS = 16, 2
MODES = [(Level.CHEAP, 2), (Level.BLOCK, 3), (Level.OFFLOADED, 2)]
SDP = torch.backends.cuda
TOGGLES = [
    (SDP.flash_sdp_enabled, SDP.enable_flash_sdp),
    (SDP.mem_efficient_sdp_enabled, SDP.enable_mem_efficient_sdp),
    (SDP.math_sdp_enabled, SDP.enable_math_sdp),
    (SDP.cudnn_sdp_enabled, SDP.enable_cudnn_sdp),
]


def script(code, *traced):
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

    def __init__(self, scripted=False):
        super().__init__()
        self.linear, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))
        self.scripted, self.act = scripted, nn.Tanh()
        self.setup()

    def setup(self):
        """More state."""

    def map(self, x):
        if self.scripted:
            return drop_add(self.linear(rms(x, self.scale, 1e-6)), x, 0.3, self.training)
        return torch.dropout(self.act(self.linear(x) * self.scale), 0.3, self.training)

    def forward(self, x):
        return self.map(x)


CALLS, GENERATOR = [0], random.Random(7)  # as at the top of a program


@dataclasses.dataclass(slots=True)
class Tally:
    number: int = 0


class Texts(list[str]):
    number = 0


class Stateful(Base):
    """Draws from everything that draws, counts in what is put back, and reads what the program
    changes between forward and backward.
    """

    moving: Tensor
    replaced: Tensor
    factor: Tensor

    def setup(self):
        self.sources: list[Any] = [
            random.Random(1),
            {"a": np.random.default_rng(3)},
            np.random.RandomState(4),
        ]
        self.space = types.SimpleNamespace(generator=random.Random(3), number=0)
        self.bits, self.torch = np.random.PCG64(3), torch.Generator().manual_seed(5)
        self.number, self.log, self.table = 0, list[int](), dict[str, int]()
        self.order, self.pair = collections.OrderedDict[int, int](), (torch.zeros(()), [0])
        for name in ("moving", "replaced", "factor"):
            self.register_buffer(name, torch.ones(()))
        self.last = None
        self.flag = 2.0

    def drawn(self):
        first, second, third = self.sources
        ours = first.random() * second["a"].random() * third.normal()
        ours *= self.space.generator.random() * np.random.Generator(self.bits).random()
        ours *= torch.rand((), generator=self.torch, device="cpu").item()
        whole = random.random() * random.gauss(1, 0.1) * float(np.random.normal())
        whole *= GENERATOR.random()
        return float(10 * ours + whole + (np.random.rand() < 0.5))

    def counted(self):
        self.number += 1
        self.log.append(self.number)
        self.table["calls"] = self.table.get("calls", 0) + 1
        self.order[self.number] = self.number
        self.pair[1].append(1)
        self.space.number += 1
        CALLS[0] += 1
        self.moving.add_(1)
        self.replaced = self.replaced + 1
        before = 0.0 if self.last is None else self.last.detach().mean().item()
        return before + CALLS[0] + sum(n * float(x) for n, x in enumerate(self.counts(), 1))

    def counts(self):
        held = [self.log, self.order, self.pair[1]]
        numbers = [self.number, self.space.number, self.table.get("calls", 0), *map(len, held)]
        return [*numbers, self.moving, self.replaced]

    def around(self):
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

    def forward(self, x):
        total = self.drawn() + self.counted() + self.around() * self.flag
        number = 1 + math.sin(total) / 2  # as different for any difference
        self.last = self.map(x * number * self.factor)
        return self.last


class Noticed(Base):
    """Counts in one of the things that are not put back."""

    what = "iterator"
    number = 0

    def setup(self):
        self.tally, self.last_seen, self.known = Tally(), collections.deque([0]), set[int]()
        self.texts, self.bytes, self.small = Texts(), bytearray(1), array.array("l", [0])
        self.array, self.tensor = np.zeros(2), torch.zeros(())
        self.raw = ctypes.c_long(0)
        lock: Any = threading.Lock()
        self.shared: Any = sharedctypes.synchronized(ctypes.c_long(0), lock)
        self.steps = itertools.count(1) if self.what == "iterator" else None

    def count(self):
        held = vars(self).get(self.what)
        match self.what:
            case "iterator":
                return float(next(self.steps or iter([])))
            case "class":
                Noticed.number += 1
                return Noticed.number
            case "last_seen" | "known" | "texts":
                for add in ("append", "add"):
                    if hasattr(held, add):
                        getattr(held, add)(len(held or ()))
                return len(held or ())
            case "tally":
                held.number += 1  # type: ignore[union-attr]
                return float(held.number)  # type: ignore[union-attr]
            case "raw" | "shared":
                held.value += 1  # type: ignore[union-attr]
                return float(held.value)  # type: ignore[union-attr]
            case "tensor":
                self.tensor += 1
                return float(self.tensor)
        held[0] += 1  # type: ignore[index]
        return float(held[0])  # type: ignore[index]

    def forward(self, x):
        return self.map(x * (1 + math.sin(self.count()) / 2))


class Unseen(Noticed):
    """Counts where no version does."""

    def count(self):
        self.tensor.data.add_(1)
        return float(self.tensor)


COUNTED = [
    "unseen",
    "raw",
    "shared",
    "iterator",
    "tally",
    "texts",
    "last_seen",
    "known",
    "bytes",
    "small",
    "array",
    "tensor",
    "class",
]


class Pair(NamedTuple):
    numbers: list[int]
    tensor: Tensor


class Helper(nn.Module):
    """Not below the module that calls it."""

    moving: Tensor

    def __init__(self):
        super().__init__()
        self.norm, self.number = nn.BatchNorm1d(DIM), 0
        self.register_buffer("moving", torch.zeros(()))

    def forward(self, x):
        self.number += 1
        self.moving.add_(1)
        return self.norm(x) * (1 + self.number / 9) + self.moving.clone()


def counting():
    """Functions made here share their code, not what they count."""
    numbers = [0]

    def count(*given):
        numbers[0] += 1
        return given[-1] * (1 + numbers[0] / 9) if given else numbers[0]

    return count


OF_DEFAULT = {"number": 0}


def tallied(*, held=OF_DEFAULT):
    held["number"] += 1
    vars(tallied)["number"] += 1
    return held["number"] + vars(tallied)["number"]


vars(tallied)["number"] = 0


class Reached(Base):
    """Counts in what no attribute or argument holds by itself."""

    parents: tuple[Any, ...] = ()
    added: Tensor
    assigned: Tensor
    exchanged: Tensor

    def setup(self):
        self.helpers, self.pair = [Helper()], Pair([0], torch.zeros(()))
        self.first, self.second = counting(), counting()
        self.table, self.chain = weakref.WeakKeyDictionary({self.act: 0}), collections.ChainMap({})
        self.linear.register_forward_hook(counting())
        self.linear.register_forward_hook(counting())
        for name in ("added", "assigned", "exchanged"):
            self.register_buffer(name, torch.ones(()))
        # What torch.equal does not compare, or not with itself.
        self.unlike = [torch.full((2,), math.nan), torch.ones(2, device="meta"), torch.eye(2)]
        self.unlike[2] = self.unlike[2].to_sparse()
        self.owner = weakref.proxy(self.linear)

    def forward(self, x, helper):  # type: ignore[override]
        before = self.added.item() + 2 * self.assigned.item() + 3 * self.exchanged.item()
        self.added.data.add_(1)
        self.assigned.data = self.assigned.data + 1
        self.exchanged.numpy()[...] += 1
        self.pair.numbers[0] += 1
        self.table[self.act] += 1
        self.chain["number"] = self.chain.get("number", 0) + 1
        total = before + self.pair.numbers[0] + 2 * self.table[self.act] + self.chain["number"]
        total += self.first() + 2 * self.second() + self.second() + tallied()
        total += self.parents[0]().number
        y = helper(self.helpers[0](x)) * (1 + math.sin(total) / 2)
        return self.map(y)


@contextlib.contextmanager
def disturbed(layers):
    """What a program may do between forward and backward, and what it finds afterwards."""
    parts = [*layers]
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

    def forward(self, x, generator, held, *, seen):  # type: ignore[override]
        if not self.scripted:
            seen["rows"].append(self.map(x) + seen["rows"][0])
        held[1] += 1
        number = held[0].random() * held[1] * len(seen["rows"])
        held.append(1)
        y = torch.stack(seen["rows"]).sum(0) * torch.rand(DIM, generator=generator) * number
        return self.map(y), {"b": [y.sin(), x, None, len(held)]}


def give(module, x):
    held = [random.Random(3), 2]
    seen = {"rows": [x]}
    y, rest = module(x, torch.Generator().manual_seed(3), held, seen=seen)
    assert (len(held), held[1]) == (3, 3)
    assert rest["b"][2:] == [None, 3]
    return y + rest["b"][0].mul_(2) + rest["b"][1]


class CompiledNorm(nn.Module):
    """To be compiled: with a counter, and buffers that move."""

    if TYPE_CHECKING:  # TorchScript does not understand it
        moving: Tensor

    def __init__(self):
        super().__init__()
        self.norm, self.number = nn.BatchNorm1d(DIM), 0
        self.register_buffer("moving", torch.zeros(2))

    def forward(self, x):
        self.number += 1
        self.moving += 1
        return self.norm(x) * self.number * self.moving[0]


class Compiled(Base):
    def setup(self):
        self.norm = script(CompiledNorm())
        traced = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        self.traced = script(traced, torch.ones(2, DIM))

    def forward(self, x):
        return self.traced(self.norm(self.map(x)))


class CheckpointInside(Base):
    reentrant = False

    def forward(self, x):
        return x + checkpoint(self.map, rms(x, self.scale, 1e-6), use_reentrant=self.reentrant)


class ReentrantInside(CheckpointInside):
    reentrant = True


class Nested(Base):
    def setup(self):
        self.part: nn.Module = Base(self.scripted)

    def forward(self, x):
        return self.map(self.part(x)) + x


class Uncounted(Base):
    """Changes parts of a product in place that count writes for themselves, as GRUs on CPUs do."""

    def forward(self, x):
        left, right = self.linear(x).unsafe_chunk(2, -1)
        return x * torch.cat([left.sigmoid_(), right.tanh_()], -1)


def under_autocast(module, x):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = module(x)
    return y.float()


# Whether TorchScript runs in it; a checkpoint's argument is scripted anyway.
PROGRAMS = [
    (Stateful, ask, False),
    (Stateful, ask, True),
    (Stateful, under_autocast, True),
    (Given, give, False),
    (Given, give, True),
    (Compiled, ask, False),
    (CheckpointInside, ask, False),
    (ReentrantInside, ask, True),
    (Uncounted, ask, False),
    (Nested, ask, False),
    (Nested, ask, True),
]


COUNTS = operator.methodcaller("counts")


def make(kind, scripted=False):
    torch.manual_seed(1)
    return nn.ModuleList([kind(scripted) for _ in range(NUM_LAYERS)])


def sharded(plain, **options):
    """Blocks, and blocks inside of them."""
    first: Any = plain[0]
    layers = make(type(first), first.scripted)[: len(plain)]
    for layer in layers:
        if isinstance(layer, Nested):
            layer.part = bmt.Block(layer.part, **options)
    return nn.ModuleList([bmt.Block(layer, **options) for layer in layers])


def reset():
    CALLS[0], Noticed.number = 0, 0
    OF_DEFAULT["number"] = vars(tallied)["number"] = 0
    GENERATOR.seed(7)


@contextlib.contextmanager
def told_of_keeping(kind):
    """What is said of modules of a class that keep their activations, once each run has ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        messages = []
        yield messages
    messages += [str(x.message) for x in caught if f"{kind.__name__} keeps its" in str(x.message)]


@pytest.mark.parametrize(("kind", "by", "scripted"), PROGRAMS)
@on_ranks(2)
def test_a_recomputation_finds_what_its_forward_pass_found(
    kind: type[Base], by: Call, scripted: bool
) -> None:
    """Values, gradients, buffers, counters, and what is drawn afterwards, over steps in which
    TorchScript changes its plans; of two backward passes each. Where TorchScript runs, activations
    are kept, and one warning says so.
    """
    around = disturbed if kind is Stateful else contextlib.nullcontext
    with told_of_keeping(kind) as messages:
        for level, zero_level in MODES:
            plain = make(kind, scripted)
            blocks = sharded(plain, use_checkpoint=level, zero_level=zero_level)
            for number in range(4 if scripted else 2):
                generator = torch.Generator().manual_seed(number)
                x = torch.randn(6 - number % 2, DIM, generator=generator)
                what = f"{kind.__name__}, {level}, ZeRO-{zero_level}, step {number}"
                tolerance = 1e-2 if by is under_autocast else 1e-5
                compare(
                    plain,
                    blocks,
                    what,
                    x,
                    by,
                    tolerance=tolerance,
                    times=2,
                    around=around,
                    before=reset,
                )
                if kind is Stateful:
                    assert str([*map(COUNTS, blocks)]) == str([*map(COUNTS, plain)]), what
            for block in blocks:
                block.last = None  # its graph knows the block
    runs_script = scripted or issubclass(kind, Compiled | CheckpointInside)
    assert len(messages) == runs_script, messages


@contextlib.contextmanager
def renumbered(layers):
    layers.number = 5
    yield
    assert layers.number == 5
    layers.number = 1


@on_ranks(2)
def test_what_is_reached_by_other_ways_is_put_back():
    """Modules that are arguments, in lists or around the block, closures of one code, defaults and
    attributes of functions, hooks, named tuples; buffers that are written without a version.
    """
    x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(1))
    helpers: dict[int, Any] = {}
    with told_of_keeping(Reached) as messages:
        for level, zero_level in MODES:
            plain = make(Reached)
            blocks = sharded(plain, use_checkpoint=level, zero_level=zero_level)
            for layers in (plain, blocks):
                layers.number = 1
                for layer in layers:
                    layer.parents = (weakref.ref(layers),)
                    helpers[id(layer)] = Helper()
            for number in range(2):
                compare(
                    plain,
                    blocks,
                    f"{level}, {number}",
                    x,
                    lambda layer, x: layer(x, helpers[id(layer)]),
                    times=2,
                    around=renumbered,
                    before=reset,
                )
            for mine, theirs in zip(blocks, plain, strict=True):
                for one, other in (
                    (helpers[id(mine)], helpers[id(theirs)]),
                    (mine.helpers[0], theirs.helpers[0]),
                ):
                    assert one.number == other.number
                    torch.testing.assert_close(one.state_dict(), other.state_dict())
    assert not messages


@on_ranks(2)
def test_what_hooks_collect_is_not_held():
    """The program clears it after each step, and the state of a block need not be read again."""
    plain = make(Base)
    blocks = sharded(plain, use_checkpoint=True)
    found: dict[Any, Any] = {}
    references = []
    for layers in (plain, blocks):
        for module in layers.modules():
            module.register_forward_hook(lambda module, _, out: found.update({module: out}))

    @contextlib.contextmanager
    def cleared(layers):
        references.extend(weakref.ref(out) for out in found.values())
        found.clear()
        yield

    x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(1))
    compare(plain, blocks, "hooks", x, around=cleared)
    states = [block._host_state._snapshot for block in blocks]
    compare(plain, blocks, "again", x, around=cleared)
    assert states == [block._host_state._snapshot for block in blocks]
    gc.collect()
    assert references and not any(reference() is not None for reference in references)


@pytest.mark.parametrize("what", COUNTED)
@on_ranks(2)
def test_what_is_not_put_back_is_kept(what):
    """A pass that changes it itself is not recomputed: the values of plain PyTorch, and one warning
    that names it.
    """
    names = {"iterator": "steps", "class": "number", "unseen": "tensor"}
    kind = Unseen if what == "unseen" else Noticed
    with told_of_keeping(kind) as messages:
        Noticed.what = what
        plain = make(kind)
        blocks = sharded(plain, use_checkpoint=True)
        for number in range(2):
            compare(plain, blocks, f"{what}, {number}", torch.ones(2, DIM), before=reset)
    assert len(messages) == 1 and repr(names.get(what, what)) in messages[0], messages


class Elsewhere(Base):
    """Reads globals, also by strings, an attribute of a class, a closure and functions of torch."""

    tau = 1.0

    def setup(self):
        sigma = 1.0

        def scale(new=None):
            nonlocal sigma
            sigma = sigma if new is None else new
            return sigma

        self.scale_of = scale
        self.shown = [nn.Linear(DIM, DIM).requires_grad_(False)]
        self.shown[0].weight.fill_(1.0)

    @torch.no_grad()
    def first(self, x):
        return x.sin()

    @torch.no_grad()
    def second(self, x):
        return x * OF_DECORATED

    def forward(self, x):
        x = x + self.first(x) + self.second(x) + self.shown[0](x)
        y = self.map(
            looked_at(x) * TEMPERATURE * self.tau * self.scale_of() * LONG[0] * by_strings()
        )
        return activation(y) * GAIN + functional.silu(y) * torch.nn.functional.mish(y) * math.cos(1)


SETTINGS = sys.modules["settings_of_test"] = types.ModuleType("settings_of_test")
vars(SETTINGS).update(dict.fromkeys(["a", "b", "c", "d", "e"], 1.0))
OF_DECORATED = EVALUATED = OF_GLOBALS = OF_PROPERTY = OF_CACHE = 1.0


class Properties(type):
    @property
    def number(cls):
        return OF_PROPERTY


class WithProperty(metaclass=Properties):
    pass


@functools.cache
def cached():
    return OF_CACHE


def looked_at(x):
    """Names in a message and of attributes are not read among globals."""
    if not x.isfinite().all():
        print("linear layers got", x.linear, file=sys.stderr)
    return x


def by_strings():
    """Reads what its code does not load by its name."""
    import settings_of_test  # type: ignore[import-not-found]

    product = eval("1 * EVALUATED") * globals()["OF_GLOBALS"] * WithProperty.number * cached()
    product *= vars(SETTINGS)["a"] * getattr(SETTINGS, "b") * settings_of_test.c  # noqa: B009
    name = "settings_of_test"
    return product * sys.modules[name].d * importlib.import_module("settings_of_test").e


def forget(value):
    globals().update(OF_CACHE=value)
    cached.cache_clear()


linear = None  # a variable with the name of an attribute
TEMPERATURE, LONG, GAIN = 1.0, [1.0] * 5000, nn.Parameter(torch.ones(()), requires_grad=False)
activation = torch.tanh


def exchange(owner, name, function, _, value):
    """As `mock.patch` does."""
    setattr(owner, name, function if value == 1 else lambda *args: function(*args) * value)


ELSEWHERE: dict[str, Callable[[Any, float], Any]] = {
    "'TEMPERATURE' among globals": lambda _, value: globals().update(TEMPERATURE=value),
    "'activation' among globals": lambda _, value: globals().update(
        activation=torch.tanh if value == 1 else torch.sin
    ),
    "'GAIN' among globals": lambda _, value: GAIN.fill_(value),
    "'tau' of class Elsewhere": lambda _, value: setattr(Elsewhere, "tau", value),
    "'sigma' of a closure": lambda block, value: block.scale_of(value),
    "'silu' of functional": functools.partial(exchange, functional, "silu", functional.silu),
    "'mish' of functional": functools.partial(exchange, functional, "mish", functional.mish),
    "'cos' of math": functools.partial(exchange, math, "cos", math.cos),
    "'forward' of class Tanh": functools.partial(exchange, nn.Tanh, "forward", nn.Tanh.forward),
    "'OF_DECORATED' among globals": lambda _, value: globals().update(OF_DECORATED=value),
    "a parameter of Linear": lambda block, value: block.shown[0].weight.fill_(value),
    "'EVALUATED' among globals": lambda _, value: globals().update(EVALUATED=value),
    "'OF_GLOBALS' among globals": lambda _, value: globals().update(OF_GLOBALS=value),
    "'OF_PROPERTY' among globals": lambda _, value: globals().update(OF_PROPERTY=value),
    "'OF_CACHE' among globals": lambda _, value: forget(value),
    "'a' of": lambda _, value: setattr(SETTINGS, "a", value),
    "'b' of": lambda _, value: setattr(SETTINGS, "b", value),
    "'c' of": lambda _, value: setattr(SETTINGS, "c", value),
    "'d' of": lambda _, value: setattr(SETTINGS, "d", value),
    "'e' of": lambda _, value: setattr(SETTINGS, "e", value),
    "'linear' of F": functools.partial(exchange, functional, "linear", functional.linear),
}


@on_ranks(2)
def test_what_is_read_elsewhere_may_not_change_before_backward():
    """Refused on all ranks, by its name; the next step is that of plain PyTorch, with the new value
    too.
    """
    plain = make(Elsewhere)
    x = torch.ones(2, DIM)
    for level in (Level.CHEAP, Level.BLOCK, Level.OFFLOADED):
        blocks = sharded(plain, use_checkpoint=level)
        for where, change in ELSEWHERE.items():
            loss = blocks[1](blocks[0](x)).sum()
            for layer in (*plain, *blocks):
                change(layer, 3.0)
            with pytest.raises(RecomputationError, match=where):
                loss.backward()
            compare(plain, blocks, f"{level}, {where}", x)
            for layer in (*plain, *blocks):
                change(layer, 1.0)
            compare(plain, blocks, f"{level}, {where}, as before", x)
        loss = blocks[1](blocks[0](x)).sum()
        globals()["linear"] = (level,)  # which nothing reads
        loss.backward()


class OfThread(Base):
    """Reads what each thread has of its own."""

    def forward(self, x):
        return self.map(x * getattr(OF_THREAD, "factor", 1.0)).sin()


OF_THREAD = threading.local()


@on_ranks(2)
def test_values_of_a_thread_keep_activations():
    """Backward may run in another thread, and after the program has taken them back."""

    def call(module, x):
        OF_THREAD.factor = 2.0
        out = module(x)
        del OF_THREAD.factor
        return out

    plain, x = make(OfThread), torch.randn(4, DIM)
    with told_of_keeping(OfThread) as messages:
        for level in (Level.CHEAP, Level.BLOCK, Level.OFFLOADED):
            compare(plain, sharded(plain, use_checkpoint=level), str(level), x, call)
    assert len(messages) == 1 and "'OF_THREAD' among globals" in messages[0]


class Surrounded(Base):
    """Reads a context variable and the environment."""

    def forward(self, x):
        factor = float(os.environ.get("FACTOR", "1")) * float(os.getenv("OTHER", "1"))
        return self.map(x * FACTOR.get() * factor).sin()


FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.nn.functional.linear else out


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out


@contextlib.contextmanager
def factor():
    token = FACTOR.set(2.0)
    yield
    FACTOR.reset(token)


@contextlib.contextmanager
def environment(name):
    os.environ[name] = "2"
    yield
    del os.environ[name]


def after_maps(module, args, out):
    return 2 * out if type(module) is nn.Linear else None


def before_maps(module, args):
    return (2 * args[0],) if type(module) is nn.Linear else None


REGISTRY = nn.modules.module
SURROUNDINGS = [
    factor,
    functools.partial(environment, "FACTOR"),
    functools.partial(environment, "OTHER"),
    Functions,
    Operators,
    functools.partial(REGISTRY.register_module_forward_hook, after_maps),
    functools.partial(REGISTRY.register_module_forward_pre_hook, before_maps),
]


@on_ranks(2)
def test_what_surrounds_a_forward_pass_is_found_again():
    """A context around forward that has ended before backward."""
    plain, x = make(Surrounded), torch.randn(4, DIM)
    with told_of_keeping(Surrounded) as messages:
        for level in (Level.CHEAP, Level.BLOCK, Level.OFFLOADED):
            blocks = sharded(plain, use_checkpoint=level)
            for enter in SURROUNDINGS:

                def call(module, x, enter=enter):
                    with enter():
                        return module(x)

                compare(plain, blocks, f"{level}, {enter}", x, call)
    assert len(messages) == 1 and "a mode of the program" in messages[0]
    blocks = sharded(plain, use_checkpoint=True)
    linears = [layer.linear for layer in (*plain, *blocks)]
    for linear in linears:
        handle = linear.register_forward_hook(lambda *given: 2 * given[-1], with_kwargs=True)
        linear.handle = handle

    @contextlib.contextmanager
    def without_hooks(layers):
        for layer in layers:
            layer.linear.handle.remove()
        yield

    compare(plain, blocks, "a hook with keywords", x, around=without_hooks)


@on_ranks(2)
def test_a_list_at_the_top_of_a_program_is_put_back():
    """However long it is."""

    @contextlib.contextmanager
    def changed(_):
        LONG[0] = 3.0
        globals()["linear"] = LONG
        yield
        assert LONG[0] == 3.0

    plain = make(Elsewhere)
    blocks = sharded(plain, use_checkpoint=True)
    for _ in range(2):
        compare(
            plain,
            blocks,
            "a long list",
            torch.ones(2, DIM),
            around=changed,
            before=lambda: LONG.__setitem__(0, 1.0),
        )
    LONG[0] = 1.0


@on_ranks(2)
def test_hooks_of_the_program_reach_what_stays_until_backward():
    """Activations rounded to bf16 in between: those of a plain layer where the block keeps them, and
    its inputs where it does not; never parameters.
    """
    rounded = []

    def pack(x):
        rounded.append(x.numel())
        return x if x.is_leaf or not x.is_floating_point() else x.detach().bfloat16()

    def unpack(x):
        return x.float() if x.dtype is torch.bfloat16 else x

    def hooked(module, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return module(x)

    def checkpointed(module, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            if isinstance(module, bmt.Block):
                y = module(x)
            else:
                y = checkpoint(module, x, use_reentrant=False)
        return y

    for zero_level, recompute in itertools.product((2, 3), (False, True)):
        plain = make(Base)
        blocks = sharded(plain, use_checkpoint=recompute, zero_level=zero_level)
        by = checkpointed if recompute else hooked
        compare(plain, blocks, f"ZeRO-{zero_level}, {recompute}", torch.randn(5, DIM), by)
        assert rounded
        rounded.clear()


class Reading(Base):
    """Adds an argument, a buffer and a held tensor, and may write the argument."""

    shift: Tensor

    def setup(self):
        self.register_buffer("shift", torch.ones(()))
        self.held, self.large = [torch.ones(())], torch.ones(300, DIM)
        self.pair = Pair([], torch.ones(()))

    def forward(self, x, plus, writes=False):  # type: ignore[override]
        y = self.map(x + plus + self.shift + self.held[0] + self.large[0] + self.pair[1])
        if writes:
            plus.add_(1)
        return y


def called(module, x):
    return module(x, torch.ones(DIM))


WRITTEN = {
    "argument 1": lambda block, plus: plus,
    "argument 'plus'": lambda block, plus: plus,
    "argument": lambda block, plus: plus.sub_(2),
    "buffer 'shift' of Reading": lambda block, plus: block.shift,
    "attribute 'large' of Reading": lambda block, plus: block.large,
    "attribute 'held' of Reading": lambda block, plus: block.held[0],
    "attribute 'pair' of Reading": lambda block, plus: block.pair.tensor,
}


@on_ranks(2)
def test_what_has_changed_is_refused():
    """A tensor that was given, written by the program or by the module, a buffer and what the
    module holds; the next step is that of plain PyTorch.
    """
    x = torch.ones(2, DIM)
    plain = make(Reading)
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


@on_ranks(2)
def test_what_a_block_keeps_may_not_change_before_backward():
    """Its input, written after forward, is refused as in plain PyTorch; the next step is right."""
    plain, leaf = make(Base)[:1], torch.randn(3, DIM, requires_grad=True)
    for zero_level, recompute in itertools.product((2, 3), (False, True)):
        blocks = sharded(plain, use_checkpoint=recompute, zero_level=zero_level)
        x = leaf * 1.5
        y = blocks[0](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        compare(plain, blocks, f"ZeRO-{zero_level}, {recompute}", torch.ones(3, DIM))
