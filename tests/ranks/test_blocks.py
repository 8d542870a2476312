"""Blocks and lists of blocks against the same modules in plain PyTorch: values, gradients,
randomness, hooks, names.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
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
from bmtrain.errors import ParameterError, StaleParameterError

MODES = list(itertools.product((2, 3), (False, True)))  # ZeRO level, recomputation
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def mode_name(level: int, recompute: bool) -> str:
    return f"ZeRO-{level}, recompute={recompute}, {bmt.world_size()} ranks"


def share(loss: torch.Tensor) -> torch.Tensor:
    """This rank's part of a loss that all ranks compute alike: gradients then sum up to those of
    one process.
    """
    return loss / bmt.world_size()


def compare(
    make: Callable[[], nn.Module], call: Call, x: torch.Tensor, level: int, recompute: bool
) -> nn.Module:
    """Value, gradients of parameters and input, buffers: the Block has what the plain module has.

    Returns the Block.
    """
    what = mode_name(level, recompute)
    torch.manual_seed(1)
    plain = make()
    block = bmt.Block(copy.deepcopy(plain), use_checkpoint=recompute, zero_level=level)
    answers = []
    for module, whole in ((plain, True), (block, False)):
        own = x.clone().requires_grad_(x.is_floating_point())
        torch.manual_seed(2)
        loss = call(module, own)
        (loss if whole else share(loss)).backward()
        answers.append(
            (
                loss.detach(),
                None if own.grad is None else own.grad * (1 if whole else bmt.world_size()),
            )
        )
    models.assert_same(answers[1][0], answers[0][0], f"{what}: loss")
    if answers[0][1] is not None:
        assert answers[1][1] is not None, f"{what}: the input got no gradient"
        models.assert_same(answers[1][1], answers[0][1], f"{what}: gradient of the input")
    models.assert_same_dicts(models.full_gradients(block), models.plain_gradients(plain), what)
    models.assert_same_dicts(block.state_dict(), plain.state_dict(), f"{what}: state")
    assert list(block.state_dict()) == list(plain.state_dict()), what
    return block


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # a bias before the norm has no gradient
        self.convolution = nn.Conv1d(5, 7, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(8), torch.randn(8, 3)])
        self.dict = nn.ParameterDict({"a": torch.randn(3), "unused": torch.randn(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.list:
            x = x * param if param.dim() == 1 else x @ param
        return x * self.dict["a"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Spectral(nn.Module):
    """Its buffers move in every forward pass and enter the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5))
        # far from the weight that the buffers fit, so that every pass moves them
        with torch.no_grad():
            self.inner.get_parameter("parametrizations.weight.original").copy_(torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class BufferOnly(nn.Module):
    factor: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor([2.0]))
        self.register_buffer("hidden", torch.tensor([3.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.hidden


class Mixed(nn.Module):
    """Parameters of three dtypes in one block, one of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 9)
        self.b = nn.Linear(9, 5).bfloat16()
        self.c = nn.Parameter(torch.randn(5, 3).half())
        self.tiny = nn.Parameter(torch.randn(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(torch.tanh(self.a(x)).bfloat16())
        return ((h.half() @ self.c).float() * self.tiny).float()


def squared(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.linspace(-1, 2, out.shape[-1])).square().mean()


def twice(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return squared(module, module(x))


def in_reentrant(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return squared(lambda y: checkpoint(module, y * 2, use_reentrant=True), x)  # type: ignore[arg-type]


def in_checkpoint(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return squared(lambda y: checkpoint(module, y * 2, use_reentrant=False), x)  # type: ignore[arg-type]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(
            self.second(F.dropout(torch.tanh(self.first(F.dropout(x, 0.3))), 0.5)), 0.1
        )


def sequence() -> torch.Tensor:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))


CASES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "attention": (Attention, squared),
    "multihead itself": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: squared(lambda y: m(y, y, y), x),  # type: ignore[arg-type]
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True),
        squared,
    ),
    "lstm": (lambda: nn.LSTM(8, 7, num_layers=2, batch_first=True, bidirectional=True), squared),
    "gru": (lambda: nn.GRU(8, 3, batch_first=True), squared),
    "convolution": (Convolution, squared),
    "parameter lists": (Lists, squared),
    "weight norm": (Normed, squared),
    "spectral norm": (Spectral, squared),
    "no parameters": (nn.GELU, squared),
    "buffers only": (BufferOnly, squared),
    "frozen": (lambda: nn.Linear(8, 8).requires_grad_(False), squared),
    "twice": (lambda: nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 8)), twice),
    "user's reentrant checkpoint": (lambda: nn.Linear(8, 6), in_reentrant),
    "user's checkpoint": (lambda: nn.Linear(8, 6), in_checkpoint),
    "dropout": (Dropping, squared),
    "dropout twice": (Dropping, twice),
    "mixed dtypes": (Mixed, squared),
}


def run_case(name: str) -> None:
    make, call = CASES[name]
    for level, recompute in MODES:
        block = compare(make, call, sequence(), level, recompute)
        if any(param.requires_grad for param in block.parameters()):
            first = models.full_gradients(block)
            torch.manual_seed(2)
            # a second pass adds the same again
            share(call(block, sequence().requires_grad_())).backward()
            doubled = {key: None if grad is None else grad * 2 for key, grad in first.items()}
            if name not in ("convolution", "spectral norm"):  # whose buffers have moved
                models.assert_same_dicts(
                    models.full_gradients(block),
                    doubled,
                    f"second pass: {mode_name(level, recompute)}",
                )


@pytest.mark.parametrize(
    ("name", "world_size"),
    # Half precision: a loss divided by 3 rounds elsewhere, one divided by 2 does not.
    [(name, size) for name in CASES for size in ((1, 2) if name == "mixed dtypes" else (1, 3))],
)
def test_a_block_computes_what_its_module_computes(name: str, world_size: int) -> None:
    """Values, gradients, state and names, for every kind of module, with and without recomputation,
    ZeRO-2 and 3.
    """
    run_ranks(run_case, world_size, name, timeout=30)


def feed(levels: tuple[int, bool]) -> tuple[nn.Sequential, nn.Sequential]:
    """A plain net of three layers and its sharded twin, blocks nested."""
    level, recompute = levels
    torch.manual_seed(4)
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)) for _ in range(3))
    )
    sharded = copy.deepcopy(plain)
    for index, layer in enumerate(sharded):
        sharded[index] = bmt.Block(layer, use_checkpoint=recompute, zero_level=level)
    return plain, sharded


def check_step(plain: nn.Module, sharded: nn.Module, what: str) -> None:
    """Fresh gradients of one pass agree."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    plain.zero_grad()
    sharded.zero_grad()
    plain(x).square().sum().backward()
    share(sharded(x).square().sum()).backward()
    models.assert_same_dicts(models.full_gradients(sharded), models.plain_gradients(plain), what)


class Boom(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("boom")


def interrupted_backward() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        what = f"after a backward that raised, {mode_name(*mode)}"
        x = torch.ones(2, 6)
        with pytest.raises(KeyError, match="boom"):
            sharded[2](sharded[1](Boom.apply(sharded[0](x)))).sum().backward()
        sharded.zero_grad()
        check_step(plain, sharded, what)
        with pytest.raises(KeyError, match="boom"):
            sharded[2](sharded[1](Boom.apply(sharded[0](x)))).sum().backward()
        # new weights: nothing may be answered from what the failed pass had gathered
        with torch.no_grad():
            for module in (plain, sharded):
                for param in module.parameters():
                    param.mul_(0.5)
            models.assert_same(sharded(x), plain(x), f"new weights {what}")
        check_step(plain, sharded, f"new weights {what}")


def interrupted_inside() -> None:
    """The error comes from inside a block, whose buffers are in use."""
    for mode in MODES:
        what = f"after a backward that raised inside a block, {mode_name(*mode)}"
        plain, sharded = feed(mode)
        handle = (
            sharded[1]
            .get_submodule("1")
            .register_forward_hook(lambda _module, _args, out: Boom.apply(out))
        )
        with pytest.raises(KeyError, match="boom"):
            sharded(torch.ones(2, 6)).sum().backward()
        handle.remove()
        sharded.zero_grad()
        with torch.no_grad():
            for module in (plain, sharded):
                for param in module.parameters():
                    param.mul_(0.5)
            models.assert_same(sharded(torch.ones(2, 6)), plain(torch.ones(2, 6)), f"values {what}")
        check_step(plain, sharded, what)


@pytest.mark.parametrize("program", [interrupted_backward, interrupted_inside])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_that_raised_leaves_nothing_behind(
    world_size: int, program: Callable[[], None]
) -> None:
    """After zero_grad the next pass is exact, with changed weights too."""
    run_ranks(program, world_size, timeout=30)


def interrupted_forward() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            sharded(torch.ones(2, 7))
        handle = (
            sharded[1]
            .get_submodule("2")
            .register_forward_pre_hook(lambda *_: dict[str, Any]()["spam"])
        )
        with pytest.raises(KeyError, match="spam"):
            sharded(torch.ones(2, 6))
        handle.remove()
        for module in sharded:
            assert all(isinstance(param, bmt.DistributedParameter) for param in module.parameters())
        check_step(plain, sharded, f"after a forward that raised, {mode_name(*mode)}")


def without_grad() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(9))
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for _ in range(2):
                    models.assert_same(
                        sharded(x), plain(x), f"{context.__name__}, {mode_name(*mode)}"
                    )
            check_step(plain, sharded, f"after {context.__name__}, {mode_name(*mode)}")
        with torch.enable_grad():
            sharded(x)  # a graph that is never used
        check_step(plain, sharded, f"after a graph without backward, {mode_name(*mode)}")


def two_losses() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(9))
        for module, part in ((plain, 1), (sharded, bmt.world_size())):
            out = module(x) / part
            out.sum().backward(retain_graph=True)
            out.square().mul(part).sum().backward()
        models.assert_same_dicts(
            models.full_gradients(sharded),
            models.plain_gradients(plain),
            f"two losses, {mode_name(*mode)}",
        )
        check_step(plain, sharded, f"after two losses, {mode_name(*mode)}")


def input_gradient() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        grads = []
        for module in (plain, sharded):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(9)).requires_grad_()
            grads.append(torch.autograd.grad(module(x).square().sum(), x)[0])
            assert all(param.grad is None for param in module.parameters()), mode_name(*mode)
        models.assert_same(grads[1], grads[0], f"autograd.grad, {mode_name(*mode)}")
        check_step(plain, sharded, f"after autograd.grad, {mode_name(*mode)}")


def copies() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        block, wrapped = copy.deepcopy(sharded[0]), copy.deepcopy(bmt.BMTrainModelWrapper(sharded))
        check_step(plain, wrapped, f"deepcopy, {mode_name(*mode)}")
        with torch.no_grad():
            for param in itertools.chain(wrapped.parameters(), block.parameters()):
                param.zero_()
        check_step(plain, sharded, f"the original after its copy changed, {mode_name(*mode)}")
        assert not any(value.any() for value in block.state_dict().values()), mode_name(*mode)
        models.assert_same(
            wrapped(torch.ones(1, 6)), torch.zeros(1, 6), f"changed copy, {mode_name(*mode)}"
        )


def stale() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        loss = share(sharded(torch.ones(2, 6)).square().sum())
        with torch.no_grad():
            next(sharded.parameters()).add_(1)
        with pytest.raises(
            StaleParameterError, match=r"weight.*changed in place after the forward"
        ):
            loss.backward()
        with torch.no_grad():
            next(sharded.parameters()).sub_(1)
        sharded.zero_grad()
        check_step(plain, sharded, f"after a stale backward, {mode_name(*mode)}")


def hooks() -> None:
    """All kinds, on a module inside and on the block's own, registered before and after: full
    weights, values, counts.
    """
    for mode, early in itertools.product(MODES, (True, False)):
        torch.manual_seed(1)
        plain = nn.ModuleDict(
            {"whole": nn.Linear(6, 6), "part": nn.Sequential(nn.Linear(6, 6), nn.Tanh())}
        )
        sharded = copy.deepcopy(plain)
        seen: dict[int, dict[str, list[torch.Tensor]]] = {}
        for number, net in enumerate((plain, sharded)):
            seen[number] = {}
            if early:
                watch(net, seen[number])
            if net is sharded:
                for name in plain:
                    net[name] = bmt.Block(net[name], zero_level=mode[0], use_checkpoint=mode[1])
            if not early:
                watch(net, seen[number])
            x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
            (
                net["part"](net["whole"](x)).square().sum()
                / (1 if net is plain else bmt.world_size())
            ).backward()
        assert sorted(seen[0]) == sorted(seen[1]), mode_name(*mode)
        for key, values in seen[0].items():
            got = seen[1][key]
            # Those of the inner modules run again when their forward pass does, which stops at the
            # last tensor that is needed.
            again = mode[1] and "forward" in key and (early or "part" in key)
            assert len(got) in ((1, 2) if again else (1,)), (key, len(got), mode_name(*mode))
            scale = bmt.world_size() if "backward" in key and "weight" not in key else 1
            for a, b in zip(got, values * 2, strict=False):
                models.assert_same(a * scale, b, f"{key}, {early=}, {mode_name(*mode)}")
        models.assert_same_dicts(
            models.full_gradients(sharded), models.plain_gradients(plain), mode_name(*mode)
        )


def watch(net: nn.ModuleDict, seen: dict[str, list[torch.Tensor]]) -> None:
    """Note down what hooks of all kinds see, and the weight that they find."""

    def note(key: str) -> Callable[..., None]:
        def hook(module: nn.Module, *values: Any) -> None:
            seen.setdefault(f"{key}: weight", []).append(module.weight.detach().clone())  # type: ignore[operator]
            for place, value in enumerate(values):
                tensor = value[0] if isinstance(value, tuple) else value
                seen.setdefault(f"{key}: {place}", []).append(tensor.detach().clone())

        return hook

    for name, module in (("whole", net["whole"]), ("part", net["part"].get_submodule("0"))):
        module.register_forward_pre_hook(note(f"{name}, forward pre"))
        module.register_forward_hook(note(f"{name}, forward"))
        module.register_full_backward_pre_hook(note(f"{name}, backward pre"))
        module.register_full_backward_hook(note(f"{name}, backward"))


class Mutating(nn.Module):
    """Changes its parameter while it runs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            if self.how == "in place":
                self.inner.weight.clamp_(-0.1, 0.1)
            elif self.how == "data":
                self.inner.weight.data = self.inner.weight.data * 0.5
            elif self.how == "another":
                self.inner.weight = nn.Parameter(self.inner.weight * 0.5)
        return y


def mutating() -> None:
    for mode, how in itertools.product(MODES, ("in place", "data", "another")):
        block = bmt.Block(Mutating(how), zero_level=mode[0], use_checkpoint=mode[1])
        for context in (torch.enable_grad, torch.no_grad):
            with (
                context(),
                pytest.raises(
                    ParameterError, match=r"forward pass .*inner\.weight.*lost.*between passes"
                ),
            ):
                block(torch.ones(2, 6))
        assert all(isinstance(param, bmt.DistributedParameter) for param in block.parameters()), (
            mode_name(*mode)
        )


class Outside(nn.Module):
    """Modules outside of lists that read their weights in ways of their own, and one whose class a
    program asks for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.recurrent = nn.LSTM(8, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.head = nn.Linear(5, 6)
        forward = self.head.forward
        # a function that knows the module as it was
        self.head.forward = lambda x: forward(x) * 2  # type: ignore[method-assign, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.recurrent(self.spectral(self.normed(x)))[0]
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])


def outside_of_lists() -> None:
    torch.manual_seed(1)
    plain = Outside()
    x = torch.randn(2, 3, 6)
    torch.manual_seed(1)
    model = bmt.BMTrainModelWrapper(Outside())
    assert (
        isinstance(model, Outside)
        and isinstance(model.recurrent, nn.LSTM)
        and model.__class__ is Outside
    )
    assert list(model.state_dict()) == list(plain.state_dict())
    for step in range(2):
        plain.zero_grad()
        model.zero_grad()
        want, got = plain(x), model(x)
        models.assert_same(got.detach(), want.detach(), f"value, step {step}")
        want.square().sum().backward()
        share(got.square().sum()).backward()
        models.assert_same_dicts(
            models.full_gradients(model), models.plain_gradients(plain), f"step {step}"
        )
        with torch.no_grad():
            for module in (plain, model):
                for param in module.parameters():
                    param.add_(grad_of(param) * 1e-2)
    models.assert_same_dicts(model.state_dict(), plain.state_dict(), "state")


def attributes() -> None:
    """What is set on a block is set on the module inside."""
    inner = nn.Sequential(nn.Linear(4, 4))
    inner.flag = None  # type: ignore[assignment]
    block = bmt.Block(inner)
    block.flag = "set"
    block.use_checkpoint = False
    assert inner.flag == "set" and "use_checkpoint" not in inner.__dict__
    block.flag = nn.Linear(2, 2)  # a module in the place of an attribute
    assert inner.flag is block.flag and "flag" in dict(block.named_children())
    del block.flag
    assert not any(name == "flag" for name, _ in inner.named_children())
    assert (
        isinstance(block, nn.Sequential)
        and isinstance(block, bmt.Block)
        and not isinstance(block, nn.Linear)
    )
    assert copy.deepcopy(block)(torch.ones(1, 4)).shape == (1, 4)


def moving_buffers() -> None:
    """Recomputation starts from the buffers of its own forward pass, though later passes have moved
    them.
    """
    for mode in MODES:
        torch.manual_seed(1)
        plain = Spectral()
        block = bmt.Block(copy.deepcopy(plain), zero_level=mode[0], use_checkpoint=mode[1])
        for module, part in ((plain, 1), (block, bmt.world_size())):
            losses = [squared(module, sequence() * scale) for scale in (1.0, 2.0, 3.0)]
            (sum(losses) / part).backward()  # type: ignore[union-attr]
        models.assert_same_dicts(
            models.full_gradients(block), models.plain_gradients(plain), mode_name(*mode)
        )
        models.assert_same_dicts(
            block.state_dict(), plain.state_dict(), f"buffers: {mode_name(*mode)}"
        )


def training_mode() -> None:
    for mode in MODES:
        net = bmt.BMTrainModelWrapper(
            nn.ModuleDict(
                {"list": nn.ModuleList([nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))])}
            )
        )
        lone = bmt.Block(nn.Dropout(0.5), use_checkpoint=mode[1], zero_level=mode[0])
        for module, inside in ((net, net.get_submodule("list.0.0")), (lone, lone)):
            module.eval()
            assert not inside.training, mode_name(*mode)
            assert torch.equal(lone(torch.ones(99)), torch.ones(99)) or module is not lone, (
                mode_name(*mode)
            )
            module.train()
            assert inside.training, mode_name(*mode)
        assert (lone(torch.ones(99)) == 0).any(), mode_name(*mode)


def training_mode_overridden() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def train(self, mode: bool = True) -> Stubborn:
            super().train(mode)
            self.dropout.training = False
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(x)

    block = bmt.Block(Stubborn()).train()
    assert torch.equal(block(torch.ones(99)), torch.ones(99)), (
        "the module's own train() was not called"
    )


class Returning(nn.Module):
    """Returns its parameter, whole and in part, in every kind of container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "tensor":
            return self.weight
        if self.kind == "view":
            return self.weight[1:3].T
        if self.kind == "dict":
            return {"x": x, "w": [self.weight[2]]}
        return models.Answer(x, {"w": self.weight[2]})


def weight_in(out: Any) -> torch.Tensor:
    if isinstance(out, models.Answer):
        return out.extra["w"]
    return out["w"][0] if isinstance(out, dict) else out


def returned_parameters() -> None:
    for mode, kind in itertools.product(MODES, ("tensor", "view", "dict", "dataclass")):
        torch.manual_seed(0)
        plain = nn.ModuleList([Returning(kind) for _ in range(6)])
        sharded = nn.ModuleList(
            [bmt.Block(copy.deepcopy(m), use_checkpoint=mode[1], zero_level=mode[0]) for m in plain]
        )
        outs = [[weight_in(layer(torch.ones(2))) for layer in net] for net in (plain, sharded)]
        for index, (a, b) in enumerate(zip(*outs, strict=True)):
            models.assert_same(
                b.detach(), a.detach(), f"returned {kind} of layer {index}, {mode_name(*mode)}"
            )
        sum(out.square().sum() for out in outs[0]).backward()  # type: ignore[union-attr]
        share(sum(out.square().sum() for out in outs[1])).backward()  # type: ignore[arg-type]
        models.assert_same_dicts(
            models.full_gradients(sharded),
            models.plain_gradients(plain),
            f"{kind}, {mode_name(*mode)}",
        )


def nested() -> None:
    for mode in MODES:
        torch.manual_seed(6)
        plain = nn.Sequential(
            nn.Linear(6, 9),
            nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Sequential(nn.Linear(9, 6))),
            nn.Tanh(),
        )
        sharded: Any = copy.deepcopy(plain)
        options: dict[str, Any] = {"use_checkpoint": mode[1], "zero_level": mode[0]}
        sharded[1][2] = bmt.Block(sharded[1][2], **options)
        sharded[1] = bmt.Block(sharded[1], **options)
        sharded = bmt.Block(sharded, **options)
        assert list(sharded.state_dict()) == list(plain.state_dict())
        check_step(plain, sharded, f"nested, {mode_name(*mode)}")
        check_step(plain, sharded, f"nested again, {mode_name(*mode)}")


def loading() -> None:
    for mode in MODES:
        plain, sharded = feed(mode)
        net = bmt.BMTrainModelWrapper(sharded)
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(3)
        net.load_state_dict(plain.state_dict())
        models.assert_same_dicts(net.state_dict(), plain.state_dict(), mode_name(*mode), 0.0)
        check_step(plain, net, f"after load_state_dict, {mode_name(*mode)}")
        for state in (net.state_dict(), net[0].state_dict()):
            assert all(
                value.device.type == "cpu" and not value.requires_grad for value in state.values()
            )
        names = [name for name, _ in net.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()], mode_name(*mode)


def extra_attributes() -> None:
    linear = nn.Linear(4, 3)
    linear.note = "kept"  # type: ignore[assignment]
    block = bmt.Block(linear)
    assert (block.note, block.in_features, block.out_features) == ("kept", 4, 3)
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = block.nothing_here


PROGRAMS = [
    interrupted_forward,
    without_grad,
    two_losses,
    input_gradient,
    copies,
    stale,
    hooks,
    training_mode,
    training_mode_overridden,
    returned_parameters,
    nested,
    loading,
    extra_attributes,
    attributes,
    mutating,
    outside_of_lists,
    moving_buffers,
]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: Callable[[], None], world_size: int) -> None:
    """What the function of this name states, for every mode, against plain PyTorch."""
    run_ranks(program, world_size, timeout=30)


class Pair(nn.Module):
    """Two hidden values and two further arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, gain: float, shift: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.a(x) * gain + y), y + self.b(x) + shift


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(
        self, x: torch.Tensor, gain: float = 1.0, *, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.tanh(self.inner(x) * gain)
        return out if shift is None else out + shift


def lists() -> None:
    torch.manual_seed(7)
    shared = Pair()
    plain = nn.ModuleList([Pair(), shared, Pair(), shared])
    copied = copy.deepcopy(plain)
    blocks = bmt.TransformerBlockList(
        [copied[0], bmt.Block(copied[1], zero_level=2), copied[2], copied[3]], num_hidden=2
    )
    x, y, shift = torch.randn(3, 2, 6).unbind(0)
    steps = []
    a, b = x, y
    for layer in plain:
        steps.append((a, b))
        a, b = layer(a, b, 1.5, shift)
    got = blocks(x, y, 1.5, shift, return_hidden_states=True)
    want = (a, b, torch.stack([s[0] for s in steps]), torch.stack([s[1] for s in steps]))
    for index, pair in enumerate(zip(got, want, strict=True)):
        models.assert_same(pair[0], pair[1], f"output {index}")
    sum(out.square().sum() * (i + 1) for i, out in enumerate(want)).backward()  # type: ignore[union-attr]
    share(sum(out.square().sum() * (i + 1) for i, out in enumerate(got))).backward()
    whole = models.full_gradients(blocks)
    for name, grad in models.plain_gradients(plain).items():
        assert grad is not None
        models.assert_same(whole[name], grad, name)
    assert len(blocks) == 4
    assert len(list(blocks.parameters())) == len(list(plain.parameters()))
    assert blocks.state_dict().keys() == plain.state_dict().keys()
    two = blocks(x, y, 1.5, shift)
    assert isinstance(two, tuple) and len(two) == 2


def single_lists() -> None:
    torch.manual_seed(8)
    plain = nn.ModuleList([Single() for _ in range(3)])
    blocks = bmt.TransformerBlockList([bmt.Block(copy.deepcopy(m)) for m in plain])
    x, shift = torch.randn(2, 6), torch.randn(6)
    want = x
    for layer in plain:
        want = layer(want, 2.0, shift=shift)
    models.assert_same(blocks(x, 2.0, shift=shift), want, "list")
    by_hand = x
    for block in blocks:
        by_hand = block(by_hand, 2.0, shift=shift)
    models.assert_same(by_hand, want, "iterated")
    models.assert_same(
        blocks[2](blocks[1](blocks[0](x))), plain[2](plain[1](plain[0](x))), "indexed"
    )
    assert blocks[-1] is list(blocks)[2] and [*blocks[:2]] == list(blocks)[:2]
    out, hidden = blocks(x, return_hidden_states=True)
    assert hidden.shape == (3, 2, 6) and out.shape == (2, 6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("program", [lists, single_lists])
def test_transformer_block_list(program: Callable[[], None], world_size: int) -> None:
    """Threaded hidden values, rest arguments, hidden states with gradients, sharing, iteration,
    indexing.
    """
    run_ranks(program, world_size, timeout=30)


def accumulate(
    accumulate_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, deferred: bool
) -> torch.Tensor:
    torch.manual_seed(3)
    layer = nn.Linear(16, 16, bias=False).bfloat16()
    block = bmt.Block(layer, accumulate_dtype=accumulate_dtype, reduce_dtype=reduce_dtype)
    optimizer = bmt.optim.AdamOptimizer(block.parameters())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    inputs = torch.randn(
        64, bmt.world_size(), 4, 16, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    for number, x in enumerate(inputs):
        loss = (block(x[bmt.rank()]).float() + 3).square().sum()
        manager.backward(loss, reduce_gradients=not deferred or number == len(inputs) - 1)
    grads = models.full_gradients(block)
    assert grads["weight"] is not None and grads["weight"].dtype == torch.bfloat16
    return grads["weight"].double() * bmt.world_size()


def accumulate_exact(world_size: int) -> torch.Tensor:
    """The same gradients, added up in fp64."""
    torch.manual_seed(3)
    layer = nn.Linear(16, 16, bias=False).bfloat16()
    total = torch.zeros(16, 16, dtype=torch.float64)
    inputs = torch.randn(
        64, world_size, 4, 16, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    for x in inputs.flatten(0, 1):
        ((layer(x).float() + 3).square().sum()).backward()
        total += layer.weight.grad.double()  # type: ignore[union-attr]
        layer.weight.grad = None
    return total


def accumulate_all() -> dict[str, torch.Tensor]:
    wide = torch.float32
    settings = {
        "narrow": (None, None, False),
        "wide": (wide, wide, False),
        "deferred": (wide, wide, True),
        "only accumulate": (wide, None, False),
    }
    return {name: accumulate(*setting) for name, setting in settings.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fp32_accumulation_is_closer_to_the_truth(world_size: int) -> None:
    """64 micro-batches of bf16 gradients: fp32 sums end at the bf16 rounding of the truth, bf16
    sums far from it.
    """
    exact = accumulate_exact(world_size)
    errors = {
        name: ((grad - exact).abs().max() / exact.abs().max()).item()
        for name, grad in run_ranks(accumulate_all, world_size)[0].items()
    }
    assert errors["wide"] < 2**-8, errors
    assert errors["deferred"] < 2**-8, errors
    assert errors["only accumulate"] < 2**-7, errors
    assert errors["narrow"] > 3 * errors["wide"], errors
