"""What a block knows of its module is thrown away when the module changes between calls; writes
inside of a call are refused.
"""

import copy
import ctypes
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn
from torch.nn.utils import prune

import bmtrain as bmt
from bmtrain.errors import ParameterError, StaleParameterError


class Pair(nn.Module):
    """Two maps, one after the other, and perhaps a third: (rows, 4) to the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), None

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return x if self.third is None else self.third(x)


def swap_modules(pair):
    pair.first, pair.second = pair.second, pair.first


def swap_weights(pair):
    first, second = pair.first._parameters, pair.second._parameters
    first["weight"], second["weight"] = second["weight"], first["weight"]


def tie(pair):
    pair.second._parameters["bias"] = pair.first._parameters["bias"]


def remove(pair):
    pair.first.bias = None


def add(pair):
    torch.manual_seed(8)
    pair.third = nn.Linear(4, 4)


def replace(pair):
    torch.manual_seed(9)
    pair.second = nn.Linear(4, 4, bias=False)


def freeze(pair):
    pair.first.weight.requires_grad_(False)


def rename(pair):
    prune.identity(pair.first, "weight")
    pair(torch.ones(3, 4))
    prune.remove(pair.first, "weight")


CHANGES = (swap_modules, swap_weights, tie, remove, add, replace, freeze, rename)


ROWS = torch.linspace(-1, 1, 12).view(3, 4)


def changed():
    """Two calls of the same block with a change in between, then of a copy of it."""
    for change, level in itertools.product(CHANGES, (2, 3)):
        plain, block = Pair(), bmt.Block(Pair(), use_checkpoint=False, zero_level=level)
        models.check_pass(block, plain, ROWS, "before")
        change(plain)
        change(block)
        block.shard()
        what = f"{change.__name__}, ZeRO-{level}"
        models.check_pass(block, plain, ROWS, what)
        models.check_pass(copy.deepcopy(block), copy.deepcopy(plain), ROWS, f"copy, {what}")


class Writing(nn.Module):
    """Changes its weight in its forward pass, and looks at it as at a parameter."""

    write: ClassVar[Callable[[Any], None] | None] = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        assert isinstance(self.weight, nn.Parameter) and not self.weight.data.requires_grad
        torch.save([self.weight.detach(), self.weight], io.BytesIO())
        if self.write is not None:
            self.write()
        return torch.tanh(x @ self.weight)


@torch.no_grad()
def in_place(module):
    module.weight.mul_(0.9)


@torch.no_grad()
def a_row(module):
    module.weight[2] = 0.5


def through_data(module):
    module.weight.data.clamp_(-0.1, 0.1)


def through_numpy(module):
    array = module.weight.detach().numpy()
    array *= 0.5


def around_torch(module):
    ctypes.memset(module.weight.data_ptr(), 0, 16)  # as a library in C


def anew(module):
    module.weight.data = module.weight.data * 0.9


@torch.no_grad()
def another(module):
    module.weight = nn.Parameter(module.weight * 0.5)


WRITES = (in_place, a_row, through_data, through_numpy, around_torch, anew, another)
OPTIONS: list[dict[str, Any]] = [
    {"use_checkpoint": True},
    {"use_checkpoint": False},
    {"zero_level": 2},
]


def written():
    """Found in every call, around torch in the first ones, and refused before anything changes: the
    next pass is right.
    """
    kinds = {write: type("Kind", (Writing,), {}) for write in WRITES}
    for write, options, with_grad in itertools.product(WRITES, OPTIONS, (True, False)):
        kind: Any = kinds[write]
        plain, block = kind(), bmt.Block(kind(), **options)
        with torch.set_grad_enabled(with_grad):
            for _ in range(0 if write in (through_numpy, around_torch) else 4):
                block(torch.ones(3, 4))
            kind.write = write
            # numpy's view of a gathered parameter is read-only, and numpy says so itself.
            refusal: Any = (
                pytest.raises(ValueError, match="read-only")
                if write is through_numpy
                else pytest.raises(
                    ParameterError, match=r"forward pass .*weight.*lost.*between passes"
                )
            )
            with refusal:
                block(torch.ones(3, 4))
            kind.write = None
        assert all(isinstance(param, bmt.DistributedParameter) for param in block.parameters())
        models.check_pass(block, plain, ROWS, f"after {write.__name__}")


def written_on_one_rank():
    """There the gathered tensor is the parameter: what is written through `.data` stays, as in one
    process.
    """
    plain, block = Writing(), bmt.Block(Writing(), use_checkpoint=False)
    for module in (plain, block._inner):
        through_data(module)
    Kind = type("Kind", (Writing,), {"write": through_data})
    block = bmt.Block(Kind(), use_checkpoint=False)
    for _ in range(2):
        block(torch.ones(3, 4))
    models.assert_same_state(block, plain, "as in one process")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the parameter": lambda weight: weight,
    "detached": torch.Tensor.detach,
    ".data": lambda weight: weight.data,
    "transposed": lambda weight: torch.transpose(weight, 0, 1),
    "flat": lambda weight: weight.view(-1),
    "a row": lambda weight: weight[1],
    "a view of a view": lambda weight: weight.detach().t()[:2].unsqueeze(0),
}


UNSEEN = ("detached", ".data", "a view of a view")  # writes into them


class KeepingViews(Writing):
    """Keeps a view of its weight in an attribute, in containers and in a closure."""

    def __init__(self, view):
        super().__init__()
        self.view, self.table, self.keeps = view, {"own": []}, True
        box: list[torch.Tensor] = []
        self.kept: Any = None
        self.put, self.get = box.append, lambda: box[-1]

    def forward(self, x):
        if self.keeps:
            weight = self.weight
            object.__setattr__(self, "kept", self.view(weight))
            self.table["own"].append(self.view(weight))
            self.put(self.view(weight))
        return super().forward(x)

    def views(self):
        return self.kept, self.table["own"][-1], self.get()


def kept():
    """A view that a pass has kept shows the parameter's values, with its gradient, until the
    parameter changes. From then on it is refused, and one that is taken again is right. So is a
    write into it, before anything changes.
    """
    ways = [*OPTIONS, {"use_checkpoint": False, "zero_level": 2}]
    for (name, view), options in itertools.product(VIEWS.items(), ways):
        plain, block = KeepingViews(view), bmt.Block(KeepingViews(view), **options)
        nets: Any = plain, block
        for number in range(3):
            plain.keeps = block.keeps = number != 1  # kept over a pass too
            x = ROWS + number
            losses = [net(x).square().sum() for net in nets]
            if number != 1:
                for one, other in zip(block.views(), plain.views(), strict=True):
                    models.assert_same(one.detach(), other.detach(), name)
                if options.get("use_checkpoint") is False and plain.kept.requires_grad:
                    losses = [loss + net.kept.sum() for loss, net in zip(losses, nets, strict=True)]
            losses[0].backward()
            (losses[1] / bmt.world_size()).backward()
            for net in nets:
                torch.optim.SGD(net.parameters(), lr=0.1).step()
                net.zero_grad()
            models.assert_same_dicts(block.state_dict(), plain.state_dict(), name)
            for one in block.views():
                for use in (torch.sum, repr, copy.deepcopy, torch.Tensor.numpy, torch.Tensor.zero_):
                    with pytest.raises(StaleParameterError, match="that a forward pass has kept"):
                        use(one)
                with pytest.raises(StaleParameterError, match="that a forward pass has kept"):
                    one.data.t()[0].sum()
        if name not in UNSEEN:
            optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
            ends: tuple[Callable[..., Any], ...] = functools.partial(block, x), optimizer.step
            for then in ends:
                with torch.no_grad():
                    block(x)
                    block.kept.mul_(2)
                with pytest.raises(ParameterError, match=r"kept was written.*module\.weight"):
                    then()
                models.assert_same_dicts(block.state_dict(), plain.state_dict(), name)
                models.assert_same(block(x), plain(x), name)


@pytest.mark.parametrize(
    ("program", "ranks"),
    [(changed, 2), (changed, 1), (written, 2), (written_on_one_rank, 1), (kept, 2)],
)
def test_program(program, ranks):
    """What the function of this name states."""
    run_ranks(program, ranks)
