"""What a recording has taken from the host is told from what it would take now."""

import collections
import dataclasses
import enum
import functools
import types
import warnings
from typing import Any

import pytest
import torch

from model_center.generation.fingerprint import HostStateFingerprint

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

    def __init__(self, value):
        self.value = value


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = torch.nn.Linear(4, 4), torch.nn.ReLU()
        self.register_buffer("table", torch.arange(3.0))
        self.number, self.flag, self.text, self.nothing = 1, True, "one", None
        self.entries = [1, {"a": (2, {3})}]
        self.options = Options(inner=types.SimpleNamespace(value=collections.deque([1])))
        self.slotted, self.kind, self.function = Slotted(1), Kind.ONE, torch.sin
        self.held, self.elsewhere = torch.ones(2), torch.ones(2, device="meta")
        self.entries.append(self.entries)  # which holds itself
        self.strays: list[Any] = [torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))]


CHANGES = """
part.number = 2
part.number = 1.0
part.number = 1 + 1e-9
part.flag = 1
part.text = "two"
part.nothing = 0
part.more = 1
del part.nothing
part.act.eval()
part.entries.insert(0, 1)
part.entries[1]["a"][1].add(4)
part.entries[1]["b"] = 1
part.options.window = 4
part.options.inner.value.append(2)
part.slotted.value = 2
part.slotted.empty = 2
part.kind = Kind.TWO
part.function = torch.cos
part.function = functools.partial(torch.sin)
part.linear.forward = lambda x: x
part.act.__class__ = torch.nn.Tanh
part.act = torch.nn.Tanh()
part.norm = torch.nn.Identity()
part.act = None
part.table = torch.arange(3.0)
part.table = part.table.view(torch.int32)
part.table = None
part.linear.bias = None
part.linear.weight.scale = 2
part.held = torch.ones(2)
part.held = part.held[:1]
part.strays[0].number = 2
part.strays[0].weight.data = torch.ones(2, 2)
part.strays[1].data = torch.ones(2)
part.elsewhere.add_(1)
"""


@pytest.mark.parametrize("change", CHANGES.strip().splitlines())
def test_changes_are_seen(change):
    outer = torch.nn.Sequential(Part())
    inner: Any = outer[0]
    # whose addresses nothing else gets
    kept = [inner.table, inner.held, inner.act, *(x.data for x in inner.strays[0].parameters())]
    kept.append(inner.strays[1].data)
    before = HostStateFingerprint(outer, CPU)
    assert HostStateFingerprint(outer, CPU) == before
    exec(change, {"part": inner, "torch": torch, "functools": functools, "Kind": Kind})
    after = HostStateFingerprint(outer, CPU)
    assert after != before
    assert HostStateFingerprint(outer, CPU) == after
    del kept


def test_what_differs_and_what_does_not():
    """A recording reads values in place, and parameters by their addresses."""
    part: Any = Part()
    before = HostStateFingerprint(part, CPU)
    with torch.no_grad():
        part.linear.weight.mul_(2)
    part.table.add_(1)
    part.held.add_(1)
    for surroundings in (
        torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode(),
        torch.device("meta"),
    ):
        with surroundings:
            assert HostStateFingerprint(part, CPU) != before
    assert HostStateFingerprint(part, CPU) == before
    assert HostStateFingerprint(Part(), CPU) != before
    assert before != "fingerprint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
    assert HostStateFingerprint(script, CPU) != HostStateFingerprint(
        script, CPU
    )  # nothing is known of it


@pytest.mark.parametrize(
    ("put", "value", "usual"),
    [
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.use_deterministic_algorithms, True, False),
        (torch.backends.cuda.enable_flash_sdp, False, True),
        (torch.set_float32_matmul_precision, "high", "highest"),
    ],
)
def test_switches_are_seen(put, value, usual):
    part = Part()
    put(usual)
    before = HostStateFingerprint(part, CPU)
    put(value)
    try:
        assert HostStateFingerprint(part, CPU) != before
    finally:
        put(usual)
    assert HostStateFingerprint(part, CPU) == before
