"""BMTrainModelWrapper, init_parameters, DistributedParameter and grouped_parameters against plain
modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import AddressError, ParameterError


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


class Plain(nn.Module):
    """Nested lists, ties between root, lists and list members, frozen and direct parameters,
    buffers.
    """

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        first, second = Encoder(), Encoder()
        self.encoders = nn.ModuleList([first, second])
        self.heads: Any = nn.ModuleList(
            [nn.Linear(6, 11, bias=False), nn.ModuleList([nn.Linear(6, 3)])]
        )
        self.heads[0].weight = self.embedding.weight
        second.layers[0] = first.layers[0]  # the same module twice
        second.layers[1].bias = first.layers[1].bias  # the same parameter twice
        self.bias = nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.shift * self.frozen
        for encoder in self.encoders:
            x = encoder(x)
        return (
            self.heads[0](x).square().mean()
            + (self.heads[1][0](x)[..., :2] + self.bias).square().mean()
        )


def wrapping() -> None:
    torch.manual_seed(1)
    plain = Plain()
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    assert isinstance(model, Plain) and isinstance(model.embedding, nn.Embedding)
    assert all(isinstance(param, bmt.DistributedParameter) for param in model.parameters())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    models.assert_same_dicts(model.state_dict(), plain.state_dict(), "state", 0.0)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in plain.parameters()
    ]
    tokens = torch.arange(8).view(2, 4)
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        want, got = plain(tokens), model(tokens)
        models.assert_same(got.detach(), want.detach(), "value")
        want.backward()
        (got / bmt.world_size()).backward()
        models.assert_same_dicts(
            models.full_gradients(model), models.plain_gradients(plain), "gradients"
        )
    with torch.no_grad():
        next(model.parameters()).fill_(2.0)
    assert torch.equal(model.state_dict()["heads.0.weight"], model.state_dict()["embedding.weight"])


def init_values() -> dict[str, dict[str, torch.Tensor]]:
    """By init_method, on meta, and of plain modules; the random state differs on every rank
    before.
    """
    out = {}
    torch.manual_seed(77 + bmt.rank() * (bmt.rank() > 0))
    weight = bmt.DistributedParameter(
        torch.empty(5, 3), init_method=bmt.ParameterInitializer(nn.init.normal_, mean=2.0, std=0.1)
    )
    holder = bmt.DistributedModule()
    holder.weight = weight
    holder.tiny = bmt.DistributedParameter(
        torch.empty(1, device="meta"), init_method=torch.nn.init.ones_
    )
    bmt.init_parameters(holder)
    out["init_method"] = holder.state_dict()
    torch.manual_seed(5)
    with torch.device("meta"):
        meta = nn.Sequential(
            nn.Linear(7, 5), nn.LayerNorm(5), nn.MultiheadAttention(4, 2), nn.Embedding(3, 2)
        )
    meta[0] = bmt.Block(meta[0])
    model = bmt.BMTrainModelWrapper(meta)
    bmt.init_parameters(model)
    out["meta"] = model.state_dict()
    torch.manual_seed(6)
    net = nn.ModuleDict({"a": nn.Linear(3, 7), "b": nn.Sequential(nn.Linear(2, 2))})
    bmt.init_parameters(net)
    assert all(isinstance(param, bmt.DistributedParameter) for param in net.parameters())
    out["plain"] = {name: value.detach().clone() for name, value in net.state_dict().items()}
    out["next random number"] = {"value": torch.rand(1)}
    return out


@pytest.fixture(scope="module")
def initialised() -> dict[str, dict[str, torch.Tensor]]:
    return run_ranks(init_values, 1)[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_initial_values_at_any_world_size(
    world_size: int, initialised: dict[str, dict[str, torch.Tensor]]
) -> None:
    """init_method, modules from the meta device and plain modules: bitwise those of one process."""
    for rank in run_ranks(init_values, world_size):
        for name in ("init_method", "meta", "plain", "next random number"):
            models.assert_same_dicts(
                rank[name], initialised[name], f"{name} on {world_size} ranks", 0.0
            )


def test_initial_values_are_those_of_plain_modules(
    initialised: dict[str, dict[str, torch.Tensor]],
) -> None:
    """What the modules' own constructors draw from the same seed."""
    torch.manual_seed(77)
    models.assert_same(
        initialised["init_method"]["weight"],
        torch.empty(5, 3).normal_(2.0, 0.1),
        "init_method",
        0.0,
    )
    assert initialised["init_method"]["tiny"].item() == 1
    torch.manual_seed(5)
    plain = nn.Sequential(
        nn.Linear(7, 5), nn.LayerNorm(5), nn.MultiheadAttention(4, 2), nn.Embedding(3, 2)
    )
    models.assert_same_dicts(initialised["meta"], plain.state_dict(), "from meta", 0.0)


def gathering() -> None:
    for shape in ((7, 3), (1,), (), (2,), (5, 1, 3)):
        torch.manual_seed(2)
        value = torch.randn(shape)
        param, plain = bmt.DistributedParameter(value), nn.Parameter(value.clone())
        assert (
            tuple(param.shape) == tuple(param._original_shape) == shape
            and param.dim() == plain.dim()
        )
        assert param.numel() == plain.numel() and param.local.dim() == 1
        full = param.gather()
        assert full.shape == plain.shape and torch.equal(full, plain), shape
        assert torch.equal(param.gather_all(), plain) and torch.equal(
            param.tp_gather(), param.local
        )
        (full.sin() * (bmt.rank() + 1)).sum().backward()
        (plain.sin() * sum(range(1, bmt.world_size() + 1))).sum().backward()
        assert param.grad is not None and plain.grad is not None
        models.assert_same(
            bmt.gather_result(param.grad).view(shape), plain.grad, f"gradient of {shape}"
        )
        before = bmt.gather_result(param.detach())
        assert torch.equal(before.view(shape), plain.detach())
        with torch.no_grad():
            kept = param.gather()
            assert not kept.requires_grad


class Layer(bmt.DistributedModule):
    """As BMTrain's README writes layers."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(rows, columns), init_method=nn.init.xavier_normal_, group="weights"
        )
        self.bias = bmt.DistributedParameter(torch.zeros(rows), group="biases")
        self.other = bmt.DistributedParameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def modules() -> None:
    first = Layer(5, 3)
    model = nn.Sequential(first, bmt.CheckpointBlock(Layer(2, 5)))
    bmt.init_parameters(model)
    state = {
        name: value
        for layer, m in enumerate(model)
        for name, value in m.state_dict(prefix=f"{layer}.").items()
    }
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    weights = {name: nn.Parameter(value) for name, value in state.items()}
    want = F.linear(
        F.linear(x, weights["0.weight"], weights["0.bias"]), weights["1.weight"], weights["1.bias"]
    )
    models.assert_same(model(x).detach(), want.detach(), "value")
    want.square().sum().backward()
    (model(x).square().sum() / bmt.world_size()).backward()
    models.assert_same_dicts(
        models.full_gradients(model), {n: w.grad for n, w in weights.items()}, "gradients"
    )
    groups = dict(bmt.grouped_parameters(model))
    assert {name: len(params) for name, params in groups.items()} == {
        "weights": 2,
        "biases": 2,
        None: 2,
    }
    assert groups["weights"][0] is first.get_parameter("weight") is first.weight
    tied = Layer(5, 3)
    tied.weight, tied.bias = first.weight, first.bias
    assert tied.get_parameter("weight") is first.weight and tied.bias is first.bias
    with pytest.raises(ParameterError, match="to tie two parameters"):
        tied.bias = first.bias.gather()  # type: ignore[assignment]


class Mixed:
    """What another library mixes into a module's class."""


def parametrized_afterwards() -> None:
    """Inside of a block and outside; then taken off again. Other classes are refused."""
    torch.manual_seed(1)
    plain: Any = nn.Sequential(Encoder(), nn.Linear(6, 3))
    model: Any = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    for each in (plain, model):
        torch.manual_seed(2)
        for layer in (each[0].layers[1], each[1]):
            nn.utils.parametrizations.spectral_norm(layer)
    model = bmt.BMTrainModelWrapper(model)
    for _ in range(2):
        plain(x).square().sum().backward()
        (model(x).square().sum() / bmt.world_size()).backward()
    models.assert_same_dicts(model.state_dict(), plain.state_dict(), "values")
    models.assert_same_dicts(
        models.full_gradients(model),
        {name: param.grad for name, param in plain.named_parameters()},
        "gradients",
    )
    with pytest.raises(AddressError, match="set_ of a sharded tensor"):
        nn.utils.parametrizations.orthogonal(model[0].layers[0])
    with pytest.raises(ParameterError, match="cannot become a Other"):
        model[1].__class__ = type("Other", (Mixed, nn.Linear), {})
    for each in (plain, model):
        nn.utils.parametrize.remove_parametrizations(each[1], "weight", leave_parametrized=False)
        assert each[1].__class__ is nn.Linear
    models.assert_same(model(x).detach(), plain(x).detach(), "taken off")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("program", [wrapping, gathering, modules, parametrized_afterwards])
def test_program(program: Callable[[], None], world_size: int) -> None:
    """What the function of this name states, against plain PyTorch."""
    run_ranks(program, world_size, timeout=30)
