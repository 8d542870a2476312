"""Ordinary programs with parameters that are stored in slices and look whole, against one process
of plain PyTorch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bmtrain as bmt
from bmtrain.errors import ParameterError, RanksPartedError, StaleParameterError

DIM = 8
Tensors = dict[str, torch.Tensor]
Optimizers = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM + 3), nn.Linear(DIM + 3, DIM)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.b(torch.tanh(self.a(x)))


def plain() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(Layer(), nn.LayerNorm(DIM), Layer())


def in_blocks() -> Any:
    model = plain()
    return nn.Sequential(
        bmt.Block(model[0]),
        bmt.Block(model[1], zero_level=2),
        bmt.Block(model[2], use_checkpoint=False),
    )


def wrapped() -> Any:
    return bmt.BMTrainModelWrapper(plain())


SHARDED = [in_blocks, wrapped]


def batch() -> torch.Tensor:
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module, is_plain: bool) -> torch.Tensor:
    """The loss whose sum over ranks is one process's."""
    loss: torch.Tensor = model(batch()).square().mean()
    return loss if is_plain else loss / bmt.world_size()


def whole(x: torch.Tensor) -> torch.Tensor:
    found = (
        bmt.gather_result(x.detach())
        if isinstance(x, bmt.DistributedParameter) or type(x) is not torch.Tensor
        else x.detach()
    )
    return found.clone().cpu()


def state(model: nn.Module) -> Tensors:
    return {name: value.detach().clone().cpu() for name, value in model.state_dict().items()}


def grads(model: nn.Module) -> Tensors:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def compare(program: Callable[[nn.Module, bool], Tensors], tolerance: float = 1e-5) -> None:
    """What `program` returns for a plain model and for sharded ones."""
    expected = program(plain(), True)
    assert expected
    for make in SHARDED:
        found = program(make(), False)
        assert found.keys() == expected.keys(), (program, make)
        for name, value in expected.items():
            error = (found[name].cpu().double() - value.cpu().double()).abs().max().item()
            assert error <= tolerance * max(1e-3, value.double().abs().max().item()), (
                program,
                make.__name__,
                name,
                error,
            )


def train(
    make: Optimizers, model: nn.Module, is_plain: bool, *, extra: bool = False, steps: int = 3
) -> Tensors:
    optimizer = make(model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, is_plain)
        if extra:
            penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
            for p in model.parameters():
                if p.dim() == 2:
                    penalty = penalty + (p @ p.t() - torch.eye(p.shape[0])).square().mean()
            loss = loss + penalty * (1e-2 if is_plain else 1e-2 / bmt.world_size())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return float(loss.detach() if is_plain else bmt.sum_loss(loss.detach()) * bmt.world_size())

    for _ in range(steps):
        optimizer.step(closure)
    return state(model)


def matrices(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in params if p.dim() == 2]


def groups(params: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
    params = list(params)
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Optimizers] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(groups(p), lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(groups(p), lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(groups(p), lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon(matrices(p), lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True, maximize=True),
}


if not hasattr(torch.optim, "Muon"):  # torch 2.8 has none
    del OPTIMIZERS["Muon"]


def optimizers() -> None:
    for name, make in OPTIMIZERS.items():
        for extra in (False, True) if bmt.world_size() < 3 else (True,):
            if name == "Rprop" and extra:
                continue  # by signs of gradients, some of which are rounding errors of zero there
            # A line search chooses, and what it chooses may hang on the last bit of fp32.
            torch.set_default_dtype(torch.float64 if name == "LBFGS" else torch.float32)
            tolerance = (
                2e-3
                if name == "Muon"
                else 2e-4
                if name in ("RMSprop", "Adadelta", "Rprop")
                else 5e-5
            )
            compare(functools.partial(train, make, extra=extra), tolerance)


def clipping() -> None:
    for order in (1.0, 2.0, 3.0, float("inf")):

        def clip(model: nn.Module, is_plain: bool, order: float = order) -> Tensors:
            loss_of(model, is_plain).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, order)
            by_hand = (
                sum(
                    p.grad.detach().data.norm(2).item() ** 2
                    for p in model.parameters()
                    if p.grad is not None
                )
                ** 0.5
            )
            return {"norm": norm, "by hand": torch.tensor(by_hand), **grads(model)}

        compare(clip)

    def clip_value(model: nn.Module, is_plain: bool) -> Tensors:
        loss_of(model, is_plain).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        return grads(model)

    compare(clip_value, 1e-4)  # of values that are small beside the gradients they were


def scaling() -> None:
    def scaled(model: nn.Module, is_plain: bool) -> Tensors:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(bmt.device().type, init_scale=8.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, is_plain)).backward()
            if step == 1:  # one element, which one rank owns
                with torch.no_grad():
                    grad_of(list(model.parameters())[-1])[-1].fill_(float("inf"))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return {**state(model), "scale": torch.tensor(scaler.get_scale())}

    compare(scaled)


def about() -> None:
    """What needs no other rank."""
    expected = plain()
    for make in SHARDED:
        model = make()
        if bmt.rank() == 0:
            assert f"{model}" and repr(list(model.parameters())) and str(next(model.parameters()))
            shapes = {
                name: (p.shape, p.dim(), p.numel(), p.dtype, p.ndim, p.size(), p.stride())
                for name, p in expected.named_parameters()
            }
            assert {
                name: (p.shape, p.dim(), p.numel(), p.dtype, p.ndim, p.size(), p.stride())
                for name, p in model.named_parameters()
            } == shapes
            assert sum(p.numel() for p in model.parameters()) == sum(
                p.numel() for p in expected.parameters()
            )
            assert (
                model[0].a.weight.shape == (DIM + 3, DIM)
                and model[0].a.weight is dict(model.named_parameters())["0.a.weight"]
            )


def hooks() -> None:
    def hooked(model: nn.Module, is_plain: bool) -> Tensors:
        seen: Tensors = {}
        params = list(model.parameters())

        def note(name: str, grad: torch.Tensor) -> None:
            seen[f"seen {name} {len([known for known in seen if name in known])}"] = whole(grad)

        params[0].register_hook(lambda grad: grad * 2)
        params[1].register_hook(lambda grad: note("hook", grad))
        handle = params[2].register_hook(lambda grad: grad.zero_())
        params[3].register_post_accumulate_grad_hook(lambda p: note("sum", p.grad))
        loss_of(model, is_plain).backward()
        handle.remove()
        loss_of(model, is_plain).backward()
        assert len(seen) == 4
        return {**grads(model), **seen}

    compare(hooked)

    def in_backward(model: nn.Module, is_plain: bool) -> Tensors:
        """The optimizer's step in the hook, as torch's tutorial has it."""
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(p: Any) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(model, is_plain).backward()
        return state(model)

    compare(in_backward)


def writing() -> None:
    def write(model: Any, is_plain: bool) -> Tensors:
        linear, norm, last = model[0].a, model[1], model[2]
        with torch.no_grad():
            linear.weight.zero_()
            linear.weight[1] = 3.0
            linear.bias[2:].mul_(2.0)
            linear.bias += 1.0
            norm.weight.copy_(torch.arange(float(DIM)))
            last.b.weight.clamp_(-0.1, 0.1)
            last.scale.fill_(0.5)
        last.a.weight.data[0].zero_()
        last.a.weight.data.view(-1)[3:7] = 9.0
        last.a.bias.data *= 0.5
        last.b.bias.data.masked_fill_(torch.arange(DIM) > 4, 7.0)
        nn.init.constant_(norm.bias, 3.0)
        nn.init.orthogonal_(model[0].b.weight)
        model[0].b.weight.data.t()[1].add_(1.0)
        model[0].a.weight.requires_grad_(False)
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model[2].parameters()) * 2, model[2].parameters()
        )
        loss_of(model, is_plain).backward()
        return {**state(model), **{f"grad {name}": value for name, value in grads(model).items()}}

    torch.manual_seed(5)
    compare(lambda model, is_plain: (torch.manual_seed(5), write(model, is_plain))[1])

    for make in SHARDED:
        model = make()
        weight = model[0].a.weight
        with pytest.raises(ParameterError):
            weight.zero_()
        row = weight.data[0]
        flat = weight.data.view(-1)
        weight.data.add_(1.0)
        with pytest.raises(StaleParameterError):
            row.zero_()
        with pytest.raises(StaleParameterError):
            flat.sum()
        kept = model.state_dict()
        weight.data.add_(1.0)
        with pytest.raises(StaleParameterError):
            kept["0.a.weight"].zero_()
        assert not torch.equal(kept["0.a.weight"], model.state_dict()["0.a.weight"])
        assert type(copy.deepcopy(kept)["0.a.weight"]) is torch.Tensor
        for refused in (weight.data_ptr, weight.untyped_storage, weight.share_memory_):
            with pytest.raises(ParameterError):
                refused()
        loss_of(model, False).backward()
        with pytest.raises(ParameterError, match="tie a parameter to a gradient"):
            weight.data = weight.grad
        weight.data.copy_(weight.grad)
        assert torch.equal(whole(weight), whole(grad_of(weight)))


def averages() -> None:
    def by_class(model: nn.Module, is_plain: bool) -> Tensors:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, is_plain).backward()
            optimizer.step()
            average.update_parameters(model)
        return state(average.module)

    def by_data(model: nn.Module, is_plain: bool) -> Tensors:
        """Shadows that are swapped in for an evaluation."""
        shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        out = {}
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, is_plain).backward()
            optimizer.step()
            for name, p in model.named_parameters():
                shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
            backup = {name: p.data for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.data = shadow[name]
            with torch.no_grad():
                out[f"evaluation {step}"] = model(batch())
            for name, p in model.named_parameters():
                p.data = backup[name]
        return {**out, **state(model)}

    def by_states(model: nn.Module, is_plain: bool) -> Tensors:
        average = copy.deepcopy(model)
        for _ in range(2):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.1)
                theirs = model.state_dict()
                for name, value in average.state_dict().items():
                    value.mul_(0.9)
                    value += 0.1 * theirs[name].detach()  # noqa: PLW2901 (as programs write it)
        return state(average)

    for program in (by_class, by_data, by_states):
        compare(program)


def copies() -> None:
    def together(model: nn.Module, is_plain: bool) -> Tensors:
        optimizer = (
            torch.optim.AdamW(model.parameters(), lr=1e-2)
            if is_plain
            else bmt.optim.AdamOptimizer(model.parameters(), 1e-2)
        )
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, is_plain).backward()
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
            optimizer.step()
        model2, optimizer2 = copy.deepcopy((model, optimizer))
        for m, o in ((model2, optimizer2), (model, optimizer)):
            for _ in range(2 if m is model2 else 1):
                o.zero_grad()
                loss_of(m, is_plain).backward()
                o.step()
        return {**state(model), **{f"copy {name}": value for name, value in state(model2).items()}}

    compare(together)
    for make in SHARDED:
        model = make()
        model[0].a.weight.mark = "kept"
        model[0].a.weight.register_hook(lambda grad: grad * 0)
        twin = copy.deepcopy(model)
        loss_of(twin, False).backward()
        assert twin[0].a.weight.mark == "kept" and twin[0].a.weight is not model[0].a.weight
        # Torch's copies have no hooks of parameters.
        assert (
            float(whole(twin[0].a.weight.grad).abs().max()) > 0.0 and model[0].a.weight.grad is None
        )


def inputs() -> None:
    def of_some(model: nn.Module, is_plain: bool) -> Tensors:
        params = dict(model.named_parameters())
        loss_of(model, is_plain).backward()
        some = [params["0.a.weight"], params["2.b.bias"]]
        before = grads(model)
        loss = loss_of(model, is_plain)
        found = torch.autograd.grad(loss, some, retain_graph=True)
        after = grads(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        for p in params.values():
            p.grad = None
        loss.backward(inputs=some)
        return {**grads(model), "first": whole(found[0]), "second": whole(found[1])}

    compare(of_some)

    def set_by_hand(model: nn.Module, is_plain: bool) -> Tensors:
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        loss_of(model, is_plain).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.mul_(0.5)
            p.grad += torch.full_like(p.grad, 0.25)
        loss_of(model, is_plain).backward()
        return grads(model)

    compare(set_by_hand)


class Double(torch.autograd.Function):
    """It keeps the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x, w
        return x @ w * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad @ ctx.w.t() * 2, ctx.x.t() @ grad * 2


class Custom(nn.Module):
    number: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.register_parameter("number", nn.Parameter(torch.arange(3), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Double.apply(x, self.w)) + self.number.sum()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.w * 2).t()


def others() -> None:
    def custom(kind: str) -> Tensors:
        torch.manual_seed(2)
        model: Any = nn.Sequential(*[Custom() for _ in range(4)])
        if kind == "wrapped":
            model = bmt.BMTrainModelWrapper(model)
        elif kind == "blocks":
            model = nn.Sequential(*[bmt.Block(layer) for layer in model])
        n = 1 if kind == "plain" else bmt.world_size()
        for _ in range(2):
            loss = model(batch()).square().mean() + model[1].project(batch()).square().mean()
            with torch.no_grad():
                model(batch())
            (loss / n).backward()
        return {**grads(model), **state(model)}

    expected = custom("plain")
    for kind in ("wrapped", "blocks"):
        found = custom(kind)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)

    def embedding(kind: str, **options: Any) -> Tensors:
        torch.manual_seed(2)
        model: Any = nn.ModuleDict(
            {"e": nn.Embedding(11, DIM, **options), "h": nn.Linear(DIM, 11, bias=False)}
        )
        if kind == "tied":
            model["h"].weight = model["e"].weight
        if kind != "plain":
            model = bmt.BMTrainModelWrapper(model)
        n = 1 if kind == "plain" else bmt.world_size()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model["h"](model["e"](torch.tensor([[1, 4, 4], [0, 9, 2]]))).square().mean()
            (loss / n).backward()
            optimizer.step()
        return state(model)

    for options in (
        {},
        {"sparse": True},
        {"max_norm": 1.0},
        {"padding_idx": 4},
        {"max_norm": 0.5, "norm_type": 1.0},
    ):
        expected, found = embedding("plain", **options), embedding("wrapped", **options)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-5, atol=1e-6, msg=f"{options} {name}"
            )


def before_wrapping() -> None:
    """Attributes, hooks, lists and optimizers that know the parameters before they are sharded."""
    expected = plain()
    weight = expected[0].a.weight
    weight.register_hook(lambda grad: grad * 3)
    loss_of(expected, True).backward()
    shard: Callable[[Any], nn.Module]
    for shard in (
        bmt.BMTrainModelWrapper,
        lambda model: nn.Sequential(*[bmt.Block(part) for part in model]),
    ):
        model = plain()
        weight = model[0].a.weight
        weight.mark = "kept"
        weight.register_hook(lambda grad: grad * 3)
        known = list(model.parameters())
        sharded = shard(model)
        assert all(a is b for a, b in zip(known, sharded.parameters(), strict=True))
        assert weight.mark == "kept" and isinstance(weight, bmt.DistributedParameter)
        loss_of(sharded, False).backward()
        for (name, p), q in zip(sharded.named_parameters(), expected.parameters(), strict=True):
            assert q.grad is not None
            torch.testing.assert_close(whole(p.grad), q.grad.cpu(), rtol=1e-5, atol=1e-6, msg=name)
    for shard in (
        bmt.BMTrainModelWrapper,
        lambda model: nn.Sequential(*[bmt.Block(part) for part in model]),
    ):
        expected, model = plain(), plain()
        for one in (expected, model):
            one(batch()).square().sum().backward()  # all rows on all ranks
        sharded = shard(model)
        for one in (expected, sharded):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        for name, value in state(expected).items():
            torch.testing.assert_close(
                whole(state(sharded)[name]).cpu(), value.cpu(), rtol=1e-5, atol=1e-6, msg=name
            )
        if bmt.world_size() > 1:
            model = plain()
            (model(batch()).square().sum() * (bmt.rank() + 1)).backward()
            with pytest.raises(RanksPartedError, match="gradient"):
                shard(model)
    tables = [nn.Embedding(9, 4, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        table(torch.tensor([1, 4, 4])).square().sum().backward()
    sharded = bmt.BMTrainModelWrapper(nn.Sequential(tables[1]))
    torch.testing.assert_close(
        whole(grad_of(sharded.get_parameter("0.weight"))).cpu(),
        grad_of(tables[0].weight).to_dense().cpu(),
    )
    model = plain()
    bmt.optim.AdamOptimizer(model.parameters())
    if bmt.world_size() > 1:
        with pytest.raises(ParameterError, match="shard the model first"):
            bmt.BMTrainModelWrapper(model)
        with pytest.raises(ParameterError, match="shard the model first"):
            bmt.Block(model[0])
    model = plain()
    model[2].b.weight.data = model[0].b.weight.data
    for shard in (bmt.BMTrainModelWrapper, bmt.Block):
        with pytest.raises(ParameterError, match="share memory"):
            shard(model)
        with pytest.raises(ParameterError, match="lazy"):
            shard(nn.LazyLinear(3))


def writing_graphs() -> None:
    """Values with a graph, written in place into what is frozen, as adapters are merged."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        model = nn.Module()
        for name, shape in {"weight": (3, 5), "a": (3, 2), "b": (2, 5)}.items():
            model.register_parameter(name, nn.Parameter(torch.randn(shape), name != "weight"))
        return model

    tables: list[Any] = [make(), bmt.BMTrainModelWrapper(make())]
    for model in tables:
        model.weight.data += model.a @ model.b
        model.weight.data -= 0.5 * (model.a @ model.b)
        written = model.weight.data
        written.mul_(model.a @ model.b)
        written += 3 * model.weight
        written *= 2
        share = bmt.world_size() if model is tables[1] else 1
        (written.square().sum() / share).backward()
    want, got = tables
    torch.testing.assert_close(whole(got.weight).cpu(), want.weight.cpu())
    for name in ("a", "b"):
        torch.testing.assert_close(
            whole(grad_of(got.get_parameter(name))).cpu(), grad_of(want.get_parameter(name)).cpu()
        )
    assert not got.weight.requires_grad and not got.weight.local.requires_grad
    before = whole(got.weight)
    with pytest.raises(ParameterError, match=r"changed in place by values that require grad.*data"):
        got.weight.add_(got.a @ got.b)
    assert torch.equal(whole(got.weight), before)


def norms() -> None:
    """Of all elements, and along dims, of which 0 is one."""
    values = torch.arange(15.0).view(3, 5) - 4
    plain, sharded = (nn.Parameter(values.clone(), requires_grad=False) for _ in range(2))
    model = nn.ParameterDict({"x": sharded})
    x = bmt.BMTrainModelWrapper(model)["x"]
    for options in ({}, {"dim": 0}, {"dim": 1}, {"dim": (0, 1)}, {"dim": 0, "keepdim": True}):
        for function in (torch.norm, torch.linalg.norm, torch.linalg.vector_norm):
            settings: dict[str, Any] = dict(options)
            want, got = function(plain, **settings), function(x, **settings)
            torch.testing.assert_close(got, want, msg=f"{function.__name__} {options}")
    torch.testing.assert_close(x.norm(2, 0), plain.norm(2, 0))
    torch.testing.assert_close(x.norm(p=1, dim=0), plain.norm(p=1, dim=0))


PROGRAMS = [
    writing_graphs,
    norms,
    optimizers,
    clipping,
    scaling,
    about,
    hooks,
    writing,
    averages,
    copies,
    inputs,
    others,
    before_wrapping,
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: Callable[[], None], world_size: int) -> None:
    """What the function of this name states."""
    run_ranks(program, world_size, timeout=300)
