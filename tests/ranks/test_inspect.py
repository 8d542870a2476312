"""What `inspect` says on several ranks, against the numbers of plain PyTorch in one process."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of, own_slice, sharded_parameter
from torch import nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.distributed import collectives, transport
from bmtrain.errors import ConfigurationError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.runtime import world
from bmtrain.shard.recording import Recorder

MODES = list(itertools.product((2, 3), (False, True)))  # ZeRO level, recomputation
Summary = list[dict[str, Any]]
VALUES, GRADIENTS = ("std", "mean", "max", "min"), ("grad_std", "grad_mean")


def numbers_of(x: torch.Tensor) -> dict[str, float | None]:
    """What torch says of a tensor, in fp64."""
    exact = x.detach().double()
    if exact.numel() == 0:
        return dict.fromkeys(VALUES)
    std = exact.std().item() if exact.numel() > 1 else None
    return {
        "std": std,
        "mean": exact.mean().item(),
        "max": exact.max().item(),
        "min": exact.min().item(),
    }


def row_of(name: str, x: torch.Tensor, grad: torch.Tensor | None) -> dict[str, Any]:
    """The row of a summary, by plain torch."""
    found = dict.fromkeys(("std", "mean")) if grad is None else numbers_of(grad)
    return {
        "name": name,
        "shape": tuple(x.shape),
        **numbers_of(x),
        "grad_std": found["std"],
        "grad_mean": found["mean"],
    }


def assert_same_rows(got: Summary, want: Summary, what: str, tolerance: float = 1e-5) -> None:
    """Equal names and shapes in the same order, and numbers that differ by less than `tolerance` of
    the spread.
    """
    assert [row["name"] for row in got] == [row["name"] for row in want], what
    for mine, other in zip(got, want, strict=True):
        assert mine.keys() == other.keys(), what
        assert mine["shape"] == other["shape"], f"{what}: {mine}"
        for keys, scales in ((VALUES, ("max", "min")), (GRADIENTS, GRADIENTS)):
            scale = max((abs(other[key]) for key in scales if other[key] is not None), default=0.0)
            for key in keys:
                assert (mine[key] is None) == (other[key] is None), (
                    f"{what}: {mine}, expected {other}"
                )
                if other[key] is not None:
                    assert abs(mine[key] - other[key]) <= tolerance * scale + 1e-9, (
                        f"{what}: {key} of {mine}, expected {other}"
                    )


def assert_same_everywhere(summary: Summary) -> None:
    """Bitwise the same on every rank."""
    for other in bmt.distributed.collectives.gather_objects(
        summary, world.current().mesh.world, "a test"
    ):
        assert other == summary


def my_rows(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch."""
    return x.chunk(bmt.world_size())[bmt.rank()]


# -- parameters


def parameters_of_odd_models() -> None:
    for level, recompute in MODES:
        what = f"ZeRO-{level}, recompute={recompute}, {bmt.world_size()} ranks"
        plain, model = models.make_whole(), models.shard_whole(level, recompute)
        manager = OptimManager()
        manager.add_optimizer(AdamOptimizer(model.parameters()))
        for step in (2, 3):  # a whole block unused, then others
            for param in plain.parameters():
                param.grad = None
            manager.zero_grad()
            assert_same_rows(
                bmt.inspect.inspect_model(model, "*"), plain_rows(plain), f"{what}, before backward"
            )
            models.loss_of(plain, *models.batch(step), step).backward()
            tokens, targets = (my_rows(x) for x in models.batch(step))
            manager.backward(models.loss_of(model, tokens, targets, step))
            found = bmt.inspect.inspect_model(model, "*")
            assert_same_rows(found, plain_rows(plain), what)
            assert_same_everywhere(found)
            assert any(row["grad_std"] is None for row in found) and any(
                row["grad_std"] for row in found
            ), what
            assert bmt.inspect.format_summary(found).count("\n") == len(found)
        patterns = [
            "body.layers.*.gain",
            "body.layers.[1-2].up.*",
            "*.norm.weight",
            "nothing",
            "",
            "body.layers.?.tiny",
        ]
        for pattern in patterns:
            names = [row["name"] for row in bmt.inspect.inspect_model(model, pattern)]
            assert names == [row["name"] for row in plain_rows(plain, pattern)], pattern
        assert bmt.inspect.inspect_model(model, "nothing") == []


def plain_rows(plain: nn.Module, pattern: str = "*") -> Summary:
    named = [
        (name, param) for name, param in plain.named_parameters() if fnmatch.fnmatch(name, pattern)
    ]
    return [row_of(name, param, param.grad) for name, param in named]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_and_gradients(world_size: int) -> None:
    """Prime sizes, scalars, tied, frozen, unused and replicated parameters, before and after
    backward, in every mode.
    """
    run_ranks(parameters_of_odd_models, world_size)


class Holder(nn.Module):
    """One parameter under two names, an empty one, a scalar, and two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) + self.head(x) * self.scalar) + self.empty.sum()


def names_and_oddities() -> None:
    torch.manual_seed(4)
    plain = Holder()
    block = bmt.Block(copy.deepcopy(plain))
    for module, scale in ((plain, 1), (block, bmt.world_size())):
        (module(torch.linspace(-1, 1, 6).view(2, 3)).square().sum() / scale).backward()
    assert_same_rows(bmt.inspect.inspect_model(block, "*"), plain_rows(plain), "holder")
    (tied,) = bmt.inspect.inspect_model(block, "head.weight")
    assert tied["name"] == "first.weight"
    for prefix in ("model", "model."):
        names = [row["name"] for row in bmt.inspect.inspect_model(block, "model.*.bias", prefix)]
        assert names == ["model.first.bias", "model.head.bias"]
        assert bmt.inspect.inspect_model(block, "first.*", prefix) == []
    (scalar,) = bmt.inspect.inspect_model(block, "scalar")
    assert (scalar["shape"], scalar["mean"], scalar["std"], scalar["grad_std"]) == (
        (),
        2.0,
        None,
        None,
    )
    assert scalar["grad_mean"] is not None
    (empty,) = bmt.inspect.inspect_model(block, "empty")
    assert empty == {"name": "empty", "shape": (0, 4), **dict.fromkeys(VALUES + GRADIENTS)}


def bad_values() -> None:
    block = bmt.Block(nn.Linear(64, 16, bias=False))
    weight = sharded_parameter(*block.parameters())
    assert weight.local.numel() == 1024 // bmt.world_size()
    if bmt.rank() == bmt.world_size() - 1:
        weight.local[3] = math.nan
    summary = bmt.inspect.inspect_model(block, "weight")
    assert all(math.isnan(summary[0][key]) for key in VALUES)
    assert "nan" in bmt.inspect.format_summary(summary)


def gradients_on_some_ranks() -> None:
    """As with pipeline stages: `.grad` is None where a rank owns nothing, and present elsewhere."""
    torch.manual_seed(5)
    block = bmt.Block(nn.Linear(64, 7))
    block(torch.ones(2, 64)).square().sum().backward()
    weight = dict(block.named_parameters())["weight"]
    (before,) = bmt.inspect.inspect_model(block, "weight")
    grads = bmt.distributed.collectives.gather_objects(
        own_slice(grad_of(weight)), world.current().mesh.world, "a test"
    )
    if bmt.rank() == 0:
        weight.grad = None
    (after,) = bmt.inspect.inspect_model(block, "weight")
    assert_same_everywhere([before, after])
    if bmt.world_size() == 1:
        assert (after["grad_std"], after["grad_mean"]) == (None, None)
    else:
        rest = numbers_of(torch.cat(grads[1:]))
        assert after["grad_mean"] == pytest.approx(rest["mean"], rel=1e-6)
        assert after["grad_std"] == pytest.approx(rest["std"], rel=1e-6)


def no_gathers() -> None:
    block = bmt.Block(models.OddBlock("tensor"))
    calls: list[str] = []
    watched: list[tuple[Any, str, str]] = [
        (dist, "all_reduce", "all_reduce"),
        (dist, "all_gather_object", "all_gather_object"),
        (collectives, "all_gather_flat", "gather"),
        (transport, "all_gather_flat", "gather"),
    ]
    originals = [getattr(module, name) for module, name, _ in watched]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return call(*args, **kwargs)

        return wrapper

    for (module, name, word), call in zip(watched, originals, strict=True):
        setattr(module, name, counted(word, call))
    bmt.inspect.inspect_model(block, "*")
    for (module, name, _), call in zip(watched, originals, strict=True):
        setattr(module, name, call)
    assert set(calls) == {"all_gather_object", "all_reduce"}, calls


def ranks_that_disagree() -> None:
    block = bmt.Block(nn.Linear(6, 5))
    with pytest.raises(
        ConfigurationError, match=r"inspect_model: ranks \[1\] see other parameters than rank 0"
    ):
        bmt.inspect.inspect_model(block, "*" if bmt.rank() == 1 else "weight")
    assert len(bmt.inspect.inspect_model(block, "*")) == 2


def tensor_parallel_parameters() -> None:
    tp = world.current().mesh.tp
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(6))
    model = bmt.DistributedModule()
    model.column = bmt.DistributedParameter(
        whole.chunk(tp.size, 0)[tp.index], tp_mode=True, tp_split_dim=0
    )
    model.row = bmt.DistributedParameter(
        whole.chunk(tp.size, 1)[tp.index], tp_mode=True, tp_split_dim=1
    )
    model.plain = bmt.DistributedParameter(whole, group="g")
    found = bmt.inspect.inspect_model(model, "*")
    assert_same_rows(
        found, [row_of(name, whole, None) for name in ("column", "row", "plain")], "tensor parallel"
    )
    assert_same_everywhere(found)
    rows = bmt.inspect.print_inspect(model, file=io.StringIO())
    assert [(row.shape, row.group) for row in rows] == [
        ((6, 4), None),
        ((6, 4), None),
        ((6, 4), "g"),
    ]


def wrong_arguments() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(
        ConfigurationError, match=r"inspect_model got str: expected a torch\.nn\.Module"
    ):
        bmt.inspect.inspect_model("model", "*")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match=r"inspect_model got None as pattern: expected a string"
    ):
        bmt.inspect.inspect_model(model, None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match=r"inspect_model got 3 as prefix: expected a string"
    ):
        bmt.inspect.inspect_model(model, "*", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_names_and_odd_parameters(world_size: int) -> None:
    """Tied names, prefixes, empty and 0-dim parameters, NaNs of one rank, gradients that some ranks
    lack, bad arguments.
    """
    run_ranks(names_and_oddities, world_size)
    run_ranks(bad_values, world_size)
    run_ranks(gradients_on_some_ranks, world_size)
    run_ranks(wrong_arguments, world_size)


def test_parameters_are_not_gathered() -> None:
    """One agreement on names and three small reductions for all parameters."""
    run_ranks(no_gathers, 2)


def test_ranks_that_look_at_different_parameters() -> None:
    """An error on every rank, and no sum of what does not belong together."""
    run_ranks(ranks_that_disagree, 3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallel_parameters(world_size: int) -> None:
    """Split parameters have the shape and the numbers of the whole tensor."""
    run_ranks(tensor_parallel_parameters, world_size, init={"tp_size": 2})


# -- activations


class Layer(nn.Module):
    """Shows two hidden states to `show`."""

    show = staticmethod(bmt.inspect.record_tensor)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        self.show(h, "wide", "layer")
        out = x + self.down(torch.relu(h))
        self.show(out, "hidden")
        return out * 1.5


class Stack(nn.Module):
    layers: Any  # a list of modules, or one module

    def __init__(self, layers: nn.Module | Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.layers = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Layer.show(x, "input")
        if isinstance(self.layers, nn.ModuleList):
            for layer in self.layers:
                x = layer(x)
        else:
            x = self.layers(x)
        out = self.head(x)
        Layer.show(out, "output")
        return out


class Seen:
    """The plain way: keep what is shown, with its gradient."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def __call__(self, x: torch.Tensor, name: str, group: str | None = None) -> None:
        if x.requires_grad:
            x.retain_grad()
        start = "" if group is None else f"{group}."
        count = sum(
            full.startswith(start) and full.endswith(f".{name}") for full, _, _ in self.tensors
        )
        self.tensors.append((f"{start}{count}.{name}", x.detach().clone(), x))

    def rows(self) -> Summary:
        return [row_of(name, values, x.grad) for name, values, x in self.tensors]


@contextlib.contextmanager
def plain_recording() -> Iterator[Seen]:
    seen, before = Seen(), Layer.show
    Layer.show = staticmethod(seen)
    try:
        yield seen
    finally:
        Layer.show = staticmethod(before)


def plain_stack(num_layers: int = 3) -> Stack:
    torch.manual_seed(7)
    return Stack([Layer() for _ in range(num_layers)], nn.Linear(6, 2))


def whole_batch() -> torch.Tensor:
    return torch.randn(12, 4, 6, generator=torch.Generator().manual_seed(8))


def shard_stack(kind: str, plain: Stack, level: int, recompute: bool) -> Stack:
    model = copy.deepcopy(plain)
    if kind == "wrapper":
        return bmt.BMTrainModelWrapper(model)
    blocks = [
        bmt.Block(layer, use_checkpoint=recompute, zero_level=level) for layer in model.layers
    ]
    return Stack(bmt.TransformerBlockList(blocks) if kind == "list" else list(blocks), model.head)


def activations() -> None:
    plain, x = plain_stack(), whole_batch()
    with plain_recording() as seen:
        plain(x).square().sum().backward()
    want = seen.rows()
    assert [row["name"] for row in want][:3] == ["0.input", "layer.0.wide", "0.hidden"]
    for kind, (level, recompute) in [
        *itertools.product(("list", "blocks"), MODES),
        ("wrapper", (3, True)),
    ]:
        what = f"{kind}, ZeRO-{level}, recompute={recompute}, {bmt.world_size()} ranks"
        model = shard_stack(kind, plain, level, recompute)
        with bmt.inspect.inspect_tensor() as inspector:
            out = model(my_rows(x))
            forward_only = inspector.get_summary()
            (out.square().sum()).backward()
            assert_same_rows(inspector.get_summary(), want, f"{what}, inside")
        summary = inspector.get_summary()
        assert_same_rows(summary, want, what)
        assert_same_everywhere(summary)
        assert {row["grad_std"] for row in forward_only} == {None}
        for name, values, y in seen.tensors:
            *group, index, last = name.split(".")
            mine = inspector.get_tensor(last, group[0] if group else None, int(index))
            models.assert_same(mine, my_rows(values), f"{what}: {name}")
            assert (mine.grad is None) == (y.grad is None), name
            if mine.grad is not None:
                models.assert_same(mine.grad, my_rows(grad_of(y)), f"{what}: gradient of {name}")
        first = inspector.get_tensor("wide", group="layer")
        assert (
            torch.equal(first, inspector.get_tensor("wide", group="layer", index=0))
            and (first < 0).any()
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_activations_and_their_gradients(world_size: int) -> None:
    """Blocks, lists and wrapped models, with recomputation and without: each tensor once, as it
    was, with its gradient.
    """
    run_ranks(activations, world_size)


def nothing_happens_unless_open() -> None:
    torch.manual_seed(9)
    block = bmt.Block(Layer())
    x = torch.randn(3, 6, requires_grad=True)
    bmt.inspect.record_tensor(x, "x")
    assert x._backward_hooks is None
    block(x).sum().backward()
    with bmt.inspect.inspect_tensor() as empty:
        pass
    assert empty.get_summary() == [] and bmt.inspect.format_summary(empty.get_summary())
    with bmt.inspect.inspect_tensor() as inspector:
        y = x * 2
        bmt.inspect.record_tensor(y, "y")
    y.sum().backward()
    assert inspector.get_tensor("y").grad is None, "backward ran outside"
    bmt.inspect.record_tensor(y, "y")
    assert [row["name"] for row in inspector.get_summary()] == ["0.y"], "recorded after the end"
    with pytest.raises(ZeroDivisionError), bmt.inspect.inspect_tensor() as failed:
        raise ZeroDivisionError
    bmt.inspect.record_tensor(y, "y")
    assert failed.get_summary() == []


def nested_and_repeated() -> None:
    x = torch.arange(3.0).requires_grad_()
    with bmt.inspect.inspect_tensor() as outer:
        bmt.inspect.record_tensor(x * 1, "x")
        with bmt.inspect.inspect_tensor() as inner:
            y = x * 2
            bmt.inspect.record_tensor(y, "x")
        (y * y).sum().backward(retain_graph=True)
        (y * y).sum().backward()
    assert [row["name"] for row in outer.get_summary()] == ["0.x", "1.x"]
    assert [row["name"] for row in inner.get_summary()] == ["0.x"]
    assert inner.get_tensor("x").grad is None
    models.assert_same(
        outer.get_tensor("x", index=1).grad, 8 * torch.arange(3.0), "two backward passes add up"
    )
    assert outer.get_tensor("x", index=0).grad is None, "no gradient came by"


def changed_in_place() -> None:
    x = torch.arange(1.0, 4.0).requires_grad_()
    with bmt.inspect.inspect_tensor() as inspector:
        y = x * 2
        bmt.inspect.record_tensor(y, "y")
        y.mul_(5)
        y.sum().backward()
    models.assert_same(inspector.get_tensor("y"), 2 * torch.arange(1.0, 4.0), "as it was recorded")
    models.assert_same(
        inspector.get_tensor("y").grad, torch.full((3,), 5.0), "of what was recorded"
    )
    (row,) = inspector.get_summary()
    assert (row["max"], row["grad_mean"]) == (6.0, 5.0)


def reentrant_recomputation() -> None:
    """Its forward pass has no graph: values once, no gradient."""
    layer, x = Layer(), torch.ones(2, 6, requires_grad=True)
    with bmt.inspect.inspect_tensor() as inspector:
        checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert [(row["name"], row["grad_mean"]) for row in inspector.get_summary()] == [
        ("layer.0.wide", None),
        ("0.hidden", None),
    ]


def tensors_of_every_kind() -> None:
    rows = bmt.rank() + 1
    with bmt.inspect.inspect_tensor() as inspector:
        for name, x in {
            "ragged": torch.full((rows, 2), float(bmt.rank())),
            "lengths": torch.ones(2, rows),
            "empty": torch.ones(0, 3),
            "some": torch.ones(3 if bmt.rank() == 0 else 0, 3),
            "number": torch.tensor(float(bmt.rank())),
            "mask": torch.tensor([True, False]),
            "tokens": torch.arange(5),
            "half": torch.full((70000,), 4.0, dtype=torch.float16),
            "complex": torch.ones(2, dtype=torch.complex64),
        }.items():
            bmt.inspect.record_tensor(x, name)
    found = {row["name"]: row for row in inspector.get_summary()}
    n = bmt.world_size()
    total = n * (n + 1) // 2
    ragged = torch.cat([torch.full((rank + 1, 2), float(rank)) for rank in range(n)])
    assert_same_rows([found["0.ragged"]], [row_of("0.ragged", ragged, None)], "ragged")
    assert found["0.lengths"]["shape"] == (2 * n, 1 if n == 1 else -1)
    assert (found["0.lengths"]["mean"], found["0.lengths"]["std"]) == (1.0, 0.0)
    assert (found["0.empty"]["shape"], found["0.empty"]["mean"], found["0.empty"]["max"]) == (
        (0, 3),
        None,
        None,
    )
    assert (found["0.some"]["shape"], found["0.some"]["mean"]) == ((3, 3), 1.0)
    assert (found["0.number"]["shape"], found["0.number"]["mean"]) == ((n,), (total - n) / n)
    assert (found["0.mask"]["mean"], found["0.tokens"]["mean"], found["0.half"]["mean"]) == (
        0.5,
        2.0,
        4.0,
    )
    assert found["0.complex"]["mean"] is None
    assert bmt.inspect.format_summary(found.values()).count("\n") == len(found)


def ranks_that_record_different_tensors() -> None:
    with bmt.inspect.inspect_tensor() as inspector:
        bmt.inspect.record_tensor(torch.ones(2), "shared")
        for count in range(bmt.rank()):
            x = torch.full((1,), float(count), requires_grad=True)
            bmt.inspect.record_tensor(x * 1, "own", "g")
        if bmt.rank() == 1:
            y = x * 2
            bmt.inspect.record_tensor(y, "special")
            (y * 3).backward()
    summary = inspector.get_summary()
    assert_same_everywhere(summary)
    n = bmt.world_size()
    names = (
        ["0.shared", "g.0.own", "0.special", *(f"g.{i}.own" for i in range(1, n - 1))]
        if n > 1
        else ["0.shared"]
    )
    assert [row["name"] for row in summary] == names
    for row in summary[1:]:
        if row["name"] == "0.special":
            assert (row["shape"], row["grad_mean"]) == ((1,), 3.0)
        else:
            index = int(row["name"].split(".")[1])
            assert (row["shape"], row["mean"], row["grad_mean"]) == (
                (n - 1 - index,),
                float(index),
                None,
            )
    if n > 1 and bmt.rank() == 0:
        with pytest.raises(KeyError, match=r"no tensor 'g\.0\.own' was recorded on this rank"):
            inspector.get_tensor("own", "g")


def bad_records() -> None:
    block = bmt.Block(Layer())
    record = bmt.inspect.record_tensor
    expected = [
        (
            lambda: record(nn.Parameter(torch.ones(3)), "w"),
            r"parameter of shape \(3,\) as 'w'.*inspect_model",
        ),
        (lambda: record(dict(block.named_parameters())["up.bias"], "w"), "parameter of shape"),
        (lambda: record([1.0], "x"), r"got list as 'x': expected a tensor"),  # type: ignore[arg-type]
        (lambda: record(torch.ones(1), 3), r"the name 3: expected a string"),  # type: ignore[arg-type]
        (lambda: record(torch.ones(1), ""), r"the name ''"),
        (lambda: record(torch.ones(1), "x", 3), r"the group 3 for 'x'"),  # type: ignore[arg-type]
    ]
    for call, message in expected:
        with pytest.raises(ConfigurationError, match=message):
            call()
        with pytest.raises(ConfigurationError, match=message), bmt.inspect.inspect_tensor():
            call()
    with pytest.raises(ConfigurationError, match=r"parameter of shape \(2, 2\) as 'w'"):
        bmt.Block(RecordsItsWeight())(torch.ones(1, 2))
    with bmt.inspect.inspect_tensor() as inspector:
        record(torch.ones(1), "hidden", "encoder")
        record(torch.ones(1), "logits")
    for arguments, near in (
        (("hiden", "encoder"), r"'encoder\.0\.hidden'"),
        (("logit",), r"'0\.logits'"),
    ):
        with pytest.raises(
            KeyError, match=f"no tensor .*was recorded on this rank: the nearest are {near}"
        ):
            inspector.get_tensor(*arguments)
    with pytest.raises(KeyError, match=r"no tensor 'encoder\.1\.hidden'"):
        inspector.get_tensor("hidden", "encoder", 1)
    with bmt.inspect.inspect_tensor() as nothing:
        pass
    with pytest.raises(KeyError, match="nothing was recorded on this rank"):
        nothing.get_tensor("x")


class RecordsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bmt.inspect.record_tensor(self.weight, "w")
        return x @ self.weight


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_records_of_every_kind(world_size: int) -> None:
    """Closed, nested, failed and empty contexts; ragged, 0-dim, empty and integer tensors; ranks
    that differ; bad input.
    """
    for case in (
        nothing_happens_unless_open,
        nested_and_repeated,
        changed_in_place,
        reentrant_recomputation,
        tensors_of_every_kind,
        ranks_that_record_different_tensors,
        bad_records,
    ):
        run_ranks(case, world_size)


class OwnCheckpoint(nn.Module):
    """A model's own recomputation around blocks and plain layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def own_recomputation() -> None:
    plain, x = plain_stack(2), whole_batch()
    with plain_recording() as seen:
        plain(x).square().sum().backward()
    model = copy.deepcopy(plain)
    layers = [OwnCheckpoint(bmt.Block(model.layers[0])), OwnCheckpoint(model.layers[1])]
    with bmt.inspect.inspect_tensor() as inspector:
        Stack(layers, model.head)(my_rows(x)).square().sum().backward()
    assert_same_rows(
        inspector.get_summary(), seen.rows(), "checkpoint around a block and a plain layer"
    )


def compiled_blocks(recompute: bool) -> None:
    plain, x = plain_stack(2), whole_batch()
    with plain_recording() as seen:
        plain(x).square().sum().backward()
    model = shard_stack("blocks", plain, 3, recompute)
    backend = models.Counting()
    for layer in model.layers:
        layer.compile(backend=backend)
    for step in range(3):
        model.zero_grad()
        with bmt.inspect.inspect_tensor() if step == 1 else contextlib.nullcontext() as inspector:
            model(my_rows(x)).square().sum().backward()
        assert 1 <= backend.num_graphs <= 2, "the call of record_tensor broke the graph"
        models.assert_same_dicts(
            models.full_gradients(model.layers),
            models.plain_gradients(plain.layers),
            f"step {step}",
        )
        if inspector is not None:
            assert_same_rows(inspector.get_summary(), seen.rows(), "compiled")
    with bmt.inspect.inspect_tensor() as inspector:
        out = model(my_rows(x))
    out.square().sum().backward()
    assert {row["grad_std"] for row in inspector.get_summary()} == {None}


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_record_too(recompute: bool) -> None:
    """Recording costs no graph; while an inspector is open, blocks run uncompiled."""
    run_ranks(compiled_blocks, 2, recompute)


def test_recomputation_of_the_model() -> None:
    """torch's checkpoint around a block and around a plain layer: one record each."""
    run_ranks(own_recomputation, 2)


# -- pipelines


class Pipelined:
    """Stages by hand: rows of all ranks of a pipeline, in micro-batches, through the layers of one
    stage on each rank.
    """

    def __init__(self, layers: list[nn.Module], num_parts: int, order: list[int]) -> None:
        mesh = world.current().mesh
        self.axis, self.recorder = mesh.pipe, world.current().service(Recorder)
        count = len(layers) // self.axis.size
        self.before = layers[: count * self.axis.index]
        self.own = layers[count * self.axis.index : count * (self.axis.index + 1)]
        self.after = layers[count * (self.axis.index + 1) :]
        self.num_parts, self.order = num_parts, order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank computes all layers, but records those of its stage only: what a real pipeline
        would record.
        """
        rows = torch.cat(list(bmt.distributed.all_gather(x, self.axis)))
        parts: dict[int, torch.Tensor] = {}
        with self.recorder.pipelined_pass(self.axis.index) as micro_batch:
            for number in self.order:
                y = rows.chunk(self.num_parts)[number]
                y = unrecorded(self.before, y)
                with micro_batch(number):
                    for layer in self.own:
                        y = layer(y)
                parts[number] = unrecorded(self.after, y)
        joined = torch.cat([parts[number] for number in range(self.num_parts)])
        return joined.chunk(self.axis.size)[self.axis.index]


def unrecorded(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    recorder = world.current().service(Recorder)
    before, recorder._listeners = recorder._listeners, []
    for layer in layers:
        x = layer(x)
    recorder._listeners = before
    return x


def pipelined_by_hand() -> None:
    plain, x = plain_stack(4), whole_batch()
    with plain_recording() as seen:
        out = plain(x)
        Layer.show(plain.layers[0](out @ torch.ones(2, 6) * 0.1), "again")
    want = seen.rows()
    for parts, order in ((3, [0, 1, 2]), (2, [1, 0]), (1, [0])):
        model = copy.deepcopy(plain)
        layers = list(model.layers)
        pipelined = Pipelined(layers, parts, order)
        pipelined(my_rows(x))  # a pass that nobody looks at
        with bmt.inspect.inspect_tensor() as inspector:
            Layer.show(my_rows(x), "input")
            y = pipelined(my_rows(x))
            out = model.head(y)
            Layer.show(out, "output")
            again = layers[0](out @ torch.ones(2, 6) * 0.1)
            Layer.show(again, "again")
        with pytest.raises(RuntimeError, match=r"depends on other stages: call get_summary\(\)"):
            inspector.get_tensor("hidden", index=0)
        got = inspector.get_summary()
        assert_same_everywhere(got)
        without = dict.fromkeys(GRADIENTS)
        assert_same_rows(
            [{**row, **without} for row in got],
            [{**row, **without} for row in want],
            f"{parts} micro-batches",
        )
        last = pipelined.axis.index == pipelined.axis.size - 1
        layer = 4 // pipelined.axis.size * (pipelined.axis.index + 1) - 1
        _, whole, _ = next(entry for entry in seen.tensors if entry[0] == f"{layer}.hidden")
        mine = torch.cat([whole.chunk(bmt.world_size())[rank] for rank in pipelined.axis.ranks])
        models.assert_same(inspector.get_tensor("hidden", index=layer), mine, f"layer {layer}")
        if not last:
            with pytest.raises(KeyError, match=r"no tensor '3\.hidden' was recorded on this rank"):
                inspector.get_tensor("hidden", index=3)


@pytest.mark.parametrize(("world_size", "pipe_size"), [(2, 2), (4, 2), (4, 4), (1, 1)])
def test_pipelined_passes_are_one_record(world_size: int, pipe_size: int) -> None:
    """Each layer once, numbered over stages, with the rows of all micro-batches in any order; on
    every rank the same.
    """
    run_ranks(pipelined_by_hand, world_size, init={"pipe_size": pipe_size})


class Bare(nn.Module):
    """Layers, one pipelined list or several blocks, and nothing else."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Layer.show(x * 1, "input")
        out = self.layers(x)
        Layer.show(out, "output")
        return out


def pipelined_list() -> None:
    plain, x = plain_stack(5), whole_batch()
    bare = Bare(nn.Sequential(*plain.layers))
    with plain_recording() as seen:
        bare(x).square().sum().backward()
    model = Bare(bmt.PipelineTransformerBlockList(copy.deepcopy(list(plain.layers))))
    for _ in range(2):
        for param in model.parameters():
            param.grad = None
        with bmt.inspect.inspect_tensor() as inspector:
            model(my_rows(x)).square().sum().backward()
        summary = inspector.get_summary()
        assert_same_everywhere(summary)
        assert_same_rows(summary, seen.rows(), "pipeline")
    parameters = bmt.inspect.inspect_model(model, "*.up.weight")
    assert_same_everywhere(parameters)
    assert_same_rows(parameters, plain_rows(bare, "*.up.weight"), "parameters of a pipeline")


@pytest.mark.parametrize(("world_size", "pipe_size"), [(2, 2), (4, 2), (3, 3)])
def test_pipelined_lists_record_like_plain_ones(world_size: int, pipe_size: int) -> None:
    """All layers of all stages, once each, with their gradients; parameters of other stages too."""
    run_ranks(pipelined_list, world_size, init={"pipe_size": pipe_size})


# -- tables


class Precise(nn.Module):
    """Layers in bf16, one frozen, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [bmt.Block(nn.Linear(8, 8).bfloat16(), reduce_dtype=torch.float32) for _ in range(3)]
        )
        self.layers[1].requires_grad_(False)
        self.exact = bmt.Block(nn.Linear(4, 4), accumulate_dtype=torch.float64)
        self.plain = nn.Parameter(torch.ones(3))


def precision() -> None:
    single, half, double = torch.float32, torch.bfloat16, torch.float64
    model, out = Precise(), io.StringIO()
    adam = AdamOptimizer(model.layers.parameters())
    torch_adam = torch.optim.AdamW(model.exact.parameters())
    rows = bmt.inspect.precision_report(model, [adam, torch_adam], file=out)
    dtypes = ("stored", "computed", "reduced", "accumulated", "optimizer", "master", "moments")
    found = [
        (row.names, row.num_elements, *(getattr(row, name) for name in dtypes)) for row in rows
    ]
    assert found == [
        (("plain",), 3, single, single, None, single, None, None, ()),
        (
            ("layers.[0,2].weight", "layers.[0,2].bias"),
            144,
            half,
            half,
            single,
            half,
            "AdamOptimizer",
            single,
            (single,),
        ),
        (
            ("layers.1.weight", "layers.1.bias"),
            72,
            half,
            half,
            None,
            None,
            "AdamOptimizer",
            single,
            (single,),
        ),
        (
            ("exact.weight", "exact.bias"),
            20,
            single,
            single,
            single,
            double,
            "AdamW",
            None,
            (single,),
        ),
    ]
    assert [row.state_exists for row in rows] == [False, True, True, False]
    assert [(row.num_parameters, row.trainable, row.sharded) for row in rows] == [
        (1, True, False),
        (4, True, True),
        (2, False, True),
        (2, True, True),
    ]
    text = out.getvalue()
    assert ("AdamOptimizer" in text and "float32*" in text and "(frozen)" in text) == (
        bmt.rank() == 0
    )
    model.exact(torch.ones(1, 4)).sum().backward()
    torch_adam.step()
    assert bmt.inspect.precision_report(model, [adam, torch_adam], file=out)[-1].state_exists


def optimizer_state(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> tuple[Any, Any]:
    block = bmt.Block(nn.Linear(8, 8).to(dtype))
    optimizer = make(block.parameters())
    (before,) = bmt.inspect.precision_report(block, optimizer, file=io.StringIO())
    block(torch.ones(1, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    (after,) = bmt.inspect.precision_report(block, [optimizer], file=io.StringIO())
    assert after.state_exists == bool(after.moments)
    return (before.master, before.moments), (after.master, after.moments)


class Foreign(torch.optim.Optimizer):
    """Not torch's: keeps fp64 state from its first step on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.zeros_like(param, dtype=torch.float64)


def precision_of_optimizers() -> None:
    single, half = torch.float32, torch.bfloat16
    cases: list[tuple[Callable[..., torch.optim.Optimizer], torch.dtype, Any, Any]] = [
        (AdamOptimizer, half, (single, (single,)), (single, (single,))),
        (AdamOptimizer, single, (None, (single,)), (None, (single,))),
        (AdamOffloadOptimizer, half, (single, (single,)), (single, (single,))),
        (torch.optim.AdamW, half, (None, (half,)), (None, (half,))),
        (lambda p: torch.optim.SGD(p, lr=0.1), half, (None, ()), (None, ())),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            half,
            (None, (half,)),
            (None, (half,)),
        ),
        (Foreign, half, (None, None), (None, (torch.float64,))),
    ]
    for make, dtype, before, after in cases:
        assert optimizer_state(make, dtype) == (before, after), make


@pytest.mark.parametrize("world_size", [1, 2])
def test_precision_in_force(world_size: int) -> None:
    """What is told before the first step is what the optimizers then have."""
    run_ranks(precision, world_size)
    run_ranks(precision_of_optimizers, world_size)


def parameter_table() -> tuple[list[Any], str]:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList([bmt.Block(nn.Linear(16, 16)) for _ in range(12)]),
            "head": nn.Linear(16, 3),
        }
    )
    out = io.StringIO()
    return bmt.inspect.print_inspect(model, file=out), out.getvalue()


@pytest.mark.parametrize("world_size", [1, 3])
def test_table_of_parameters(world_size: int) -> None:
    """Equal layers are one line; slices of all ranks make the whole; only rank 0 prints."""
    results = run_ranks(parameter_table, world_size)
    for rows, _ in results:
        assert [(row.name, row.count, row.shape, row.sharded) for row in rows] == [
            ("layers.[0-11].weight", 12, (16, 16), True),
            ("layers.[0-11].bias", 12, (16,), True),
            ("head.weight", 1, (3, 16), False),
            ("head.bias", 1, (3,), False),
        ]
    for place in range(2):
        assert sum(rows[place].num_local for rows, _ in results) == math.prod(
            results[0][0][place].shape
        )
    text = results[0][1]
    assert (
        "layers.[0-11].weight" in text
        and "12 x (16, 16)" in text
        and "26 parameters of 3,315 elements" in text
    )
    assert not any(printed for _, printed in results[1:])
