"""What a recording has taken from the host is told from what it would take now."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bmtrain.graphs.conditions import Conditions

CPU = torch.device("cpu")


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Options:
    window: int | None = 3
    inner: Any = None


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self, value: int) -> None:
        self.value = value


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.act = torch.nn.ReLU()
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(3.0))
        self.number, self.flag, self.text, self.nothing = 1, True, "one", None
        self.entries: list[Any] = [1, {"a": (2, {3})}]
        self.options = Options(inner=types.SimpleNamespace(value=collections.deque([1])))
        self.slotted = Slotted(1)
        self.kind, self.function = Kind.ONE, torch.sin
        self.held = torch.ones(2)
        self.elsewhere = torch.ones(2, device="meta")
        self.entries.append(self.entries)  # which holds itself
        self.strays: list[Any] = [torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


def part_class(part: Part) -> None:
    part.act.__class__ = torch.nn.Tanh  # type: ignore[assignment]


def transposed(part: Part) -> None:
    part.held = part.held[:1]


CHANGES: dict[str, Callable[[Part], object]] = {
    "number": lambda part: vars(part).update(number=2),
    "type": lambda part: vars(part).update(number=1.0),
    "flag": lambda part: vars(part).update(flag=1),
    "text": lambda part: vars(part).update(text="two"),
    "something": lambda part: vars(part).update(nothing=0),
    "more": lambda part: vars(part).update(more=1),
    "less": lambda part: vars(part).pop("nothing"),
    "training": lambda part: part.act.eval(),
    "entry": lambda part: part.entries.insert(0, 1),
    "inner entry": lambda part: part.entries[1]["a"][1].add(4),
    "key": lambda part: part.entries[1].update(b=1),
    "dataclass": lambda part: vars(part.options).update(window=4),
    "namespace": lambda part: part.options.inner.value.append(2),
    "slot": lambda part: part.slotted.__setattr__("value", 2),
    "empty slot": lambda part: part.slotted.__setattr__("empty", 2),
    "enum": lambda part: vars(part).update(kind=Kind.TWO),
    "function": lambda part: vars(part).update(function=torch.cos),
    "partial": lambda part: vars(part).update(function=functools.partial(torch.sin)),
    "forward": lambda part: vars(part.linear).update(forward=lambda x: x),
    "class": part_class,
    "child": lambda part: part.add_module("act", torch.nn.Tanh()),
    "further child": lambda part: part.add_module("norm", torch.nn.Identity()),
    "no child": lambda part: part.register_module("act", None),
    "buffer": lambda part: part.register_buffer("table", torch.arange(3.0)),
    "buffer's dtype": lambda part: part.register_buffer("table", part.table.view(torch.int32)),
    "no buffer": lambda part: part.register_buffer("table", None),
    "bias": lambda part: part.linear.register_parameter("bias", None),
    "beside a weight": lambda part: vars(part.linear.weight).update(scale=2),
    "tensor": lambda part: vars(part).update(held=torch.ones(2)),
    "shape": transposed,
    "stray module": lambda part: vars(part.strays[0]).update(number=2),
    "stray weight": lambda part: part.strays[0].weight.__setattr__("data", torch.ones(2, 2)),
    "stray parameter": lambda part: part.strays[1].__setattr__("data", torch.ones(2)),
    "elsewhere": lambda part: part.elsewhere.add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change: Callable[[Part], object]) -> None:
    outer = torch.nn.Sequential(Part())
    inner: Any = outer[0]
    kept = [inner.table, inner.held, inner.act]  # whose addresses nothing else gets
    kept += [inner.strays[0].weight.data, inner.strays[1].data]
    before = Conditions(outer, CPU)
    assert Conditions(outer, CPU) == before
    change(inner)
    after = Conditions(outer, CPU)
    assert after != before
    assert Conditions(outer, CPU) == after
    del kept


def test_values_in_place_are_not_conditions() -> None:
    """A recording reads them; and parameters by their addresses."""
    part = Part()
    before = Conditions(part, CPU)
    with torch.no_grad():
        part.linear.weight.mul_(2)
    part.table.add_(1)
    part.held.add_(1)
    assert Conditions(part, CPU) == before


SWITCHES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "flash": (torch.backends.cuda.enable_flash_sdp, False, True),
    "precision": (torch.set_float32_matmul_precision, "high", "highest"),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_switches_are_seen(switch: tuple[Callable[[Any], Any], Any, Any]) -> None:
    put, value, usual = switch
    part = Part()
    put(usual)
    before = Conditions(part, CPU)
    put(value)
    try:
        assert Conditions(part, CPU) != before
    finally:
        put(usual)
    assert Conditions(part, CPU) == before


def test_surroundings_are_seen() -> None:
    part = Part()
    before = Conditions(part, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert Conditions(part, CPU) != before
    with torch.inference_mode():
        assert Conditions(part, CPU) != before
    with torch.device("meta"):
        assert Conditions(part, CPU) != before
    assert Conditions(part, CPU) == before


def test_other_models_differ() -> None:
    assert Conditions(Part(), CPU) != Conditions(Part(), CPU)
    assert Conditions(Part(), CPU) != "conditions"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
    assert Conditions(script, CPU) != Conditions(script, CPU)  # nothing is known of it
