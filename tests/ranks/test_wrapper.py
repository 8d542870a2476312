"""BMTrainModelWrapper, init_parameters, DistributedParameter and grouped_parameters against plain
modules.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.errors import AddressError, ParameterError, RanksDivergedError


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


class Plain(nn.Module):
    """Nested lists, ties between root, lists and list members, frozen and direct parameters,
    buffers.
    """

    shift: torch.Tensor

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        first, second = Encoder(), Encoder()
        self.encoders = nn.ModuleList([first, second])
        inner = nn.ModuleList([nn.Linear(6, 3)])
        self.heads: Any = nn.ModuleList([nn.Linear(6, 11, bias=False), inner])
        self.heads[0].weight = self.embedding.weight
        second.layers[0] = first.layers[0]  # the same module twice
        second.layers[1].bias = first.layers[1].bias  # the same parameter twice
        self.bias = nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.shift * self.frozen
        for encoder in self.encoders:
            x = encoder(x)
        scores = self.heads[1][0](x)[..., :2] + self.bias
        return self.heads[0](x).square().mean() + scores.square().mean()


def facts(model):
    named = [(name, param.requires_grad) for name, param in model.named_parameters()]
    return [*named, *model.state_dict()]


def wrapping():
    torch.manual_seed(1)
    plain = Plain()
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    assert isinstance(model, Plain) and isinstance(model.embedding, nn.Embedding)
    assert all(isinstance(param, bmt.DistributedParameter) for param in model.parameters())
    assert facts(model) == facts(plain)
    models.assert_same_state(model, plain, "state", 0.0)
    for _ in range(2):
        models.check_pass(model, plain, torch.arange(8).view(2, 4), fresh=False)
    with torch.no_grad():
        next(model.parameters()).fill_(2.0)
    state = model.state_dict()
    assert torch.equal(state["heads.0.weight"], state["embedding.weight"])


def several():
    modules = [nn.Linear(7, 5), nn.LayerNorm(5), nn.MultiheadAttention(4, 2), nn.Embedding(3, 2)]
    return nn.Sequential(*modules)


def initialised():
    """By init_method, on meta, and of plain modules: what constructors draw from the same seed,
    though the random state differs between ranks before.
    """
    torch.manual_seed(77 + bmt.rank())
    normal = bmt.ParameterInitializer(nn.init.normal_, mean=2.0, std=0.1)
    holder = bmt.DistributedModule()
    holder.weight = bmt.DistributedParameter(torch.empty(5, 3), init_method=normal)
    empty = torch.empty(1, device="meta")
    holder.tiny = bmt.DistributedParameter(empty, init_method=nn.init.ones_)
    bmt.init_parameters(holder)
    torch.manual_seed(5)
    with torch.device("meta"):
        meta = several()
    meta[0] = bmt.Block(meta[0])
    model = bmt.BMTrainModelWrapper(meta)
    bmt.init_parameters(model)
    torch.manual_seed(6)
    net = nn.ModuleDict({"a": nn.Linear(3, 7), "b": nn.Sequential(nn.Linear(2, 2))})
    bmt.init_parameters(net)
    assert all(isinstance(param, bmt.DistributedParameter) for param in net.parameters())
    found = [*models.cloned_state(net).values(), torch.rand(1)]
    torch.manual_seed(77)
    want = {"weight": torch.empty(5, 3).normal_(2.0, 0.1), "tiny": torch.ones(1)}
    models.assert_same_dicts(holder.state_dict(), want, "init_method", 0.0)
    torch.manual_seed(5)
    models.assert_same_dicts(model.state_dict(), several().state_dict(), "meta", 0.0)
    return found


def test_the_same_initial_values_at_any_world_size():
    (alone,), found = run_ranks(initialised, 1), run_ranks(initialised, 3)
    torch.testing.assert_close(found, [alone] * 3, rtol=0, atol=0)


@on_ranks(2)
def test_init_parameters_keeps_the_values_of_plain_modules():
    """A program draws them itself, as BMKG does; on meta there are none to keep."""
    drawn, other = nn.Embedding(5, 3), nn.Linear(2, 2)
    nn.init.xavier_uniform_(drawn.weight)
    nn.init.constant_(other.weight, bmt.rank())
    with pytest.raises(RanksDivergedError, match=r"0\.weight"):
        bmt.init_parameters(nn.Sequential(other))
    assert not isinstance(other.weight, bmt.DistributedParameter)
    net = nn.Sequential(drawn, nn.LayerNorm(3, device="meta"))
    want = {"0.weight": drawn.weight.detach().clone()}
    want |= {"1.weight": torch.ones(3), "1.bias": torch.zeros(3)}
    bmt.init_parameters(net)
    assert all(isinstance(param, bmt.DistributedParameter) for param in net.parameters())
    models.assert_same_dicts(net.state_dict(), want, "the program's own", 0.0)


def gathering():
    for shape in ((7, 3), (1,), (), (2,), (5, 1, 3)):
        torch.manual_seed(2)
        value = torch.randn(shape)
        param, plain = bmt.DistributedParameter(value), nn.Parameter(value.clone())
        assert param.shape == param._original_shape == shape and param.dim() == plain.dim()
        assert param.numel() == plain.numel() and param.local.dim() == 1
        full = param.gather()
        assert full.shape == plain.shape and torch.equal(full, plain), shape
        assert torch.equal(param.gather_all(), plain)
        assert torch.equal(param.tp_gather(), param.local)
        (full.sin() * (bmt.rank() + 1)).sum().backward()
        (plain.sin() * sum(range(1, bmt.world_size() + 1))).sum().backward()
        for got, want in ((param.grad, grad_of(plain)), (param.detach(), plain.detach())):
            assert got is not None
            models.assert_same(bmt.gather_result(got).view(shape), want, f"{shape}")
        with torch.no_grad():
            assert not param.gather().requires_grad


class Layer(bmt.DistributedModule):
    """As BMTrain's README writes layers."""

    def __init__(self, rows, columns):
        super().__init__()
        new = bmt.DistributedParameter
        init = nn.init.xavier_normal_
        self.weight = new(torch.empty(rows, columns), init_method=init, group="weights")
        self.bias = new(torch.zeros(rows), group="biases")
        self.other = new(torch.zeros(3))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def modules():
    first = Layer(5, 3)
    model = nn.Sequential(first, bmt.CheckpointBlock(Layer(2, 5)))
    bmt.init_parameters(model)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for layer, own in zip(plain, model, strict=True):
        layer.other = nn.Parameter(torch.zeros(3))
        layer.load_state_dict(own.state_dict())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    models.check_pass(model, plain, x, fresh=False)
    groups = dict(bmt.grouped_parameters(model))
    sizes = {name: len(params) for name, params in groups.items()}
    assert sizes == {"weights": 2, "biases": 2, None: 2}
    assert groups["weights"][0] is first.get_parameter("weight") is first.weight
    tied = Layer(5, 3)
    tied.weight, tied.bias = first.weight, first.bias
    assert tied.get_parameter("weight") is first.weight and tied.bias is first.bias
    with pytest.raises(ParameterError, match="to tie two parameters"):
        tied.bias = first.bias.gather()  # type: ignore[assignment]
    with pytest.raises(ParameterError, match="made of a sharded tensor"):
        tied.bias = nn.Parameter(first.bias.data)  # type: ignore[assignment]
    assert tied.bias is first.bias


class Mixed:
    """What another library mixes into a module's class."""


def parametrized_afterwards():
    """Inside of a block and outside; then taken off again. Other classes are refused."""
    torch.manual_seed(1)
    plain: Any = nn.Sequential(Encoder(), nn.Linear(6, 3))
    model: Any = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    for each in (plain, model):
        torch.manual_seed(2)
        for layer in (each[0].layers[1], each[1]):
            nn.utils.parametrizations.spectral_norm(layer)
        nn.utils.parametrizations.orthogonal(each[0].layers[0])
    model = bmt.BMTrainModelWrapper(model)
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for _ in range(2):
        models.check_pass(model, plain, x, fresh=False)
    models.assert_same_state(model, plain, "values")
    with pytest.raises(AddressError, match="set_ of a sharded tensor"):
        model[1].bias.set_(torch.ones(6))
    with pytest.raises(ParameterError, match="cannot become a Other"):
        model[1].__class__ = type("Other", (Mixed, nn.Linear), {})
    for each in (plain, model):
        each.zero_grad()
        nn.utils.parametrize.remove_parametrizations(each[1], "weight", leave_parametrized=False)
        for layer in each[0].layers[:2]:
            nn.utils.parametrize.remove_parametrizations(layer.eval(), "weight")
        assert each[1].__class__ is nn.Linear
    models.assert_same_state(model, plain, "left as they were")
    models.check_pass(model, plain, x, fresh=False)
    x = torch.ones(2, 6)
    models.assert_same(model(x).detach(), plain(x).detach(), "taken off")


@pytest.mark.parametrize(
    "program",
    [wrapping, gathering, modules, pytest.param(parametrized_afterwards, marks=pytest.mark.fresh)],
)
def test_program(program):
    """What the function of this name states, against plain PyTorch."""
    run_ranks(program, 3)


def test_wrapping_on_one_rank():
    for program in (wrapping, gathering):
        run_ranks(program, 1)
