"""What `inspect` says on several ranks, against the numbers of plain PyTorch in one process."""

import contextlib
import copy
import fnmatch
import io
import math
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.ranks.saves import failing
from tests.tensors import grad_of, own_slice, sharded_parameter
from torch import nn
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.distributed import collectives, transport
from bmtrain.errors import ConfigurationError, UnknownNameError
from bmtrain.inspect import find_non_finite, inspect_model, inspect_tensor, record_tensor
from bmtrain.optim import AdamOptimizer
from bmtrain.runtime import world

VALUES, GRADIENTS = ("std", "mean", "max", "min"), ("grad_std", "grad_mean")


def row_of(name, x, grad):
    """The row of a summary, by plain torch in fp64."""

    def numbers(of):
        if of is None or not of.numel():
            return dict.fromkeys(VALUES)
        exact = of.detach().double()
        found = {key: getattr(exact, key)().item() for key in VALUES if key != "std"}
        return {"std": exact.std().item() if exact.numel() > 1 else math.nan, **found}

    slopes = numbers(grad)
    gradients = {"grad_std": slopes["std"], "grad_mean": slopes["mean"]}
    return {"name": name, "shape": tuple(x.shape), **numbers(x), **gradients}


def assert_same_rows(got, want, what):
    """Equal names and shapes in the same order, numbers that differ by rounding of the spread, and
    bitwise the same on every rank.
    """
    everyone = collectives.gather_objects(got, world.current().mesh.world, "a test")
    assert repr(everyone[0]) == repr(everyone[-1]) == repr(got), what  # NaN is not equal to itself
    assert names_of(got) == names_of(want), what
    for mine, other in zip(got, want, strict=True):
        assert mine.keys() == other.keys() and mine["shape"] == other["shape"], f"{what}: {mine}"
        for keys, scales in ((VALUES, ("max", "min")), (GRADIENTS, GRADIENTS)):
            found = [other[key] or 0.0 for key in scales]
            scale = max((abs(x) for x in found if not math.isnan(x)), default=0.0)
            for key in keys:
                text = f"{what}: {key} of {mine}, expected {other}"
                assert (mine[key] is None) == (other[key] is None), text
                if other[key] is not None and math.isnan(other[key]):
                    assert math.isnan(mine[key]), text
                elif other[key] is not None:
                    assert abs(mine[key] - other[key]) <= 1e-5 * scale + 1e-9, text


def names_of(summary):
    return [row["name"] for row in summary]


def plain_rows(plain, pattern="*"):
    """Gradients that are None count as zeros, as in BMTrain: programs format the numbers."""
    named = plain.named_parameters()
    rows = [row_of(name, x, x.grad) for name, x in named if fnmatch.fnmatch(name, pattern)]
    missing = {name for name, x in plain.named_parameters() if x.grad is None and x.numel()}
    return [row | dict.fromkeys(GRADIENTS, 0.0) if row["name"] in missing else row for row in rows]


# -- parameters


def parameters_of_odd_models():
    plain, model = models.make_whole(), models.shard_whole(3, True)
    manager = models.managed(AdamOptimizer(model.parameters()))
    for step in (2, 3):  # a whole block unused, then others
        plain.zero_grad()
        manager.zero_grad()
        assert_same_rows(inspect_model(model, "*"), plain_rows(plain), "before")
        models.loss_of(plain, *models.batch(step), step).backward()
        tokens, targets = (models.own(x) for x in models.batch(step))
        manager.backward(models.loss_of(model, tokens, targets, step))
        found = inspect_model(model, "*")
        assert_same_rows(found, plain_rows(plain), "after")
        assert bmt.inspect.format_summary(found).count("\n") == len(found)
    assert {row["grad_std"] == 0.0 for row in found} == {True, False}
    assert all(f"{row['grad_mean']:.4f}{row['grad_std']:.4f}" for row in found)
    for pattern in ("*.gain", "body.layers.[1-2].up.*", "nothing", "", "*.?.tiny"):
        assert names_of(inspect_model(model, pattern)) == names_of(plain_rows(plain, pattern))


class Holder(nn.Module):
    """One parameter under two names, an empty one, a scalar, and two levels."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(3, 5)
        self.head.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.first(x) + self.head(x) * self.scalar) + self.empty.sum()


def names_and_oddities():
    """Statistics travel in one collective, whatever the size of parameters."""
    torch.manual_seed(4)
    plain, refuse = Holder(), AssertionError("gathered")
    block = bmt.Block(copy.deepcopy(plain))
    for module, scale in ((plain, 1), (block, bmt.world_size())):
        (module(torch.linspace(-1, 1, 6).view(2, 3)).square().sum() / scale).backward()
    shapes = []
    gather = collectives.all_gather

    def counted(x, *args):
        shapes.append(tuple(x.shape))
        return gather(x, *args)

    with (
        failing(collectives, "all_reduce_", refuse, bmt.rank()),
        failing(transport.Transport, "gather", refuse, bmt.rank()),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(collectives, "all_gather", counted)
        found = inspect_model(block, "*")
    assert_same_rows(found, plain_rows(plain), "holder")
    assert shapes == [(2 * len(found), 5)]
    assert names_of(inspect_model(block, "head.weight")) == ["first.weight"]
    found = inspect_model(block, "model.*.bias", "model.")
    assert names_of(found) == ["model.first.bias", "model.head.bias"]
    with pytest.raises(ConfigurationError, match=r"ranks see other parameters \(rank 0: "):
        inspect_model(block, "*" if bmt.rank() == 1 else "scalar")
    with pytest.raises(ConfigurationError, match="inspect_model got 3 as prefix: expected a str"):
        inspect_model(block, "*", 3)  # type: ignore[arg-type]
    assert_same_rows(inspect_model(block, "*"), plain_rows(plain), "after errors")


def bad_values_and_missing_gradients():
    """NaN on one rank; as with pipeline stages, `.grad` is None where a rank owns nothing."""
    block = bmt.Block(nn.Linear(64, 7))
    block(torch.ones(2, 64)).square().sum().backward()
    weight = sharded_parameter(dict(block.named_parameters())["weight"])
    grads = collectives.gather_objects(own_slice(grad_of(weight)), world.current().mesh.world, "a")
    if bmt.rank() == 0:
        weight.grad = None
    elif bmt.rank() == 1:
        weight.local[3] = math.nan
    (row,) = summary = inspect_model(block, "weight")
    rest = torch.cat(grads[1:]).double()
    slopes = [row["grad_mean"], row["grad_std"]]
    assert slopes == pytest.approx([rest.mean().item(), rest.std().item()], rel=1e-6)
    assert all(math.isnan(row[key]) for key in VALUES)
    assert "nan" in bmt.inspect.format_summary(summary)


@on_ranks(3)
def test_parameters_and_gradients():
    """Prime sizes, scalars, tied, frozen, unused and replicated parameters, before and after
    backward; NaN, gradients that some ranks lack; errors on all ranks.
    """
    parameters_of_odd_models()
    names_and_oddities()
    bad_values_and_missing_gradients()


def tensor_parallel_parameters():
    tp = world.current().mesh.tp
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(6))
    model = bmt.DistributedModule()
    for dim, name in enumerate(("column", "row")):
        own = whole.chunk(tp.size, dim)[tp.index]
        setattr(model, name, bmt.DistributedParameter(own, tp_mode=True, tp_split_dim=dim))
    model.plain = bmt.DistributedParameter(whole, group="g")
    want = [row_of(name, whole, whole * 0) for name in ("column", "row", "plain")]
    assert_same_rows(inspect_model(model, "*"), want, "tensor parallel")
    bmt.inspect.print_inspect(model, file=(out := io.StringIO()))
    assert out.getvalue().count("1 x (6, 4)") == (3 if bmt.rank() == 0 else 0)


def test_tensor_parallel_parameters():
    """Split parameters have the shape and the numbers of the whole tensor."""
    run_ranks(tensor_parallel_parameters, 2, init={"tp_size": 2})


# -- activations


class Layer(nn.Module):
    """Shows two hidden states to `show`."""

    show = staticmethod(record_tensor)

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x):
        h = self.up(self.norm(x))
        self.show(h, "wide", "layer")
        out = x + self.down(torch.relu(h))
        self.show(out, "hidden")
        return out * 1.5


class Stack(nn.Module):
    """Some layers and a head."""

    def __init__(self, layers, head):
        super().__init__()
        self.layers, self.head = layers, head

    def forward(self, x):
        Layer.show(x, "input")
        out = self.head(self.layers(x))
        Layer.show(out, "output")
        return out


def plain_stack(num_layers):
    torch.manual_seed(7)
    return Stack(nn.Sequential(*[Layer() for _ in range(num_layers)]), nn.Linear(6, 2))


X = torch.randn(12, 4, 6, generator=torch.Generator().manual_seed(8))


def seen_by(plain):
    """What a plain model shows of the whole batch: names, values, the tensors; and their rows."""
    seen = []

    def show(x, name, group=None):
        if x.requires_grad:
            x.retain_grad()
        start = "" if group is None else f"{group}."
        count = sum(full.startswith(start) and full.endswith(f".{name}") for full, _, _ in seen)
        seen.append((f"{start}{count}.{name}", x.detach().clone(), x))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "show", staticmethod(show))
        plain(X).square().sum().backward()
    return seen, [row_of(name, values, x.grad) for name, values, x in seen]


class OwnCheckpoint(nn.Module):
    """A model's own recomputation around a block or a plain layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def activations():
    plain = plain_stack(3)
    seen, want = seen_by(plain)
    assert names_of(want)[:3] == ["0.input", "layer.0.wide", "0.hidden"]
    model = copy.deepcopy(plain)
    layers = list(model.layers)
    own = [OwnCheckpoint(bmt.Block(layers[0])), *map(OwnCheckpoint, layers[1:])]
    blocks = [bmt.Block(layer, zero_level=2) for layer in copy.deepcopy(layers)]
    for kind, joined in {
        "own": nn.Sequential(*own),
        "list": bmt.TransformerBlockList(blocks),
    }.items():
        sharded = Stack(joined, model.head)
        with inspect_tensor() as inspector:
            out = sharded(models.own(X))
            forward_only = inspector.get_summary()
            out.square().sum().backward()
            assert_same_rows(inspector.get_summary(), want, f"{kind}, inside")
        sharded(models.own(X)).square().sum().backward()  # nobody looks
        assert_same_rows(inspector.get_summary(), want, kind)
        assert {row["grad_std"] for row in forward_only} == {None}
        for name, values, y in seen:
            *group, index, last = name.split(".")
            mine = inspector.get_tensor(last, group[0] if group else None, int(index))
            models.assert_same(mine, models.own(values), f"{kind}: {name}")
            grad = None if y.grad is None else models.own(y.grad)
            models.assert_same_dicts({name: mine.grad}, {name: grad}, f"{kind}: gradient")


def test_activations_and_their_gradients():
    """Blocks and lists, with recomputation, the model's own too: each tensor once, as it was, with its
    gradient.
    """
    run_ranks(activations, 3)


@pytest.mark.compiler
@on_ranks(2)
def test_compiled_blocks_record_too():
    """Recording costs no graph; while an inspector is open, blocks run uncompiled."""
    plain = plain_stack(2)
    _, want = seen_by(plain)
    layers = copy.deepcopy(list(plain.layers))
    model = Stack(nn.Sequential(*map(bmt.Block, layers)), copy.deepcopy(plain.head))
    backend = models.Counting()
    for layer in model.layers:
        layer.compile(backend=backend)
    for step in range(3):
        model.zero_grad()
        with inspect_tensor() if step == 1 else contextlib.nullcontext() as inspector:
            model(models.own(X)).square().sum().backward()
        assert 1 <= backend.num_graphs <= 2, "the call of record_tensor broke the graph"
        models.assert_same_gradients(model.layers, plain.layers, f"step {step}")
        if inspector is not None:
            assert_same_rows(inspector.get_summary(), want, "compiled")


def contexts():
    """Closed, empty, failed, nested; gradients add up; values as they were when recorded."""
    x = torch.arange(1.0, 4.0).requires_grad_()
    record_tensor(x, "x")
    assert x._backward_hooks is None
    with pytest.raises(ZeroDivisionError), inspect_tensor() as failed:
        z = x * 3
        record_tensor(z, "z")
        raise ZeroDivisionError
    z.sum().backward()
    assert failed.get_tensor("z").grad is None, "backward ran outside"
    with inspect_tensor() as outer:
        record_tensor(x * 1, "x")
        with inspect_tensor() as inner:
            y = x * 2
            record_tensor(y, "x")
        (y * y).sum().backward(retain_graph=True)
        (y * y).sum().backward()
        y.data.mul_(5)
    record_tensor(y, "y")
    for inspector, names in ((failed, ["0.z"]), (inner, ["0.x"]), (outer, ["0.x", "1.x"])):
        assert names_of(inspector.get_summary()) == names, "recorded outside"
    assert inner.get_tensor("x").grad is None and outer.get_tensor("x", index=0).grad is None
    kept = outer.get_tensor("x", index=1)
    models.assert_same(kept, torch.tensor([2.0, 4.0, 6.0]), "as it was")
    models.assert_same(kept.grad, torch.tensor([8.0, 16.0, 24.0]), "two backward passes add up")
    with inspect_tensor() as empty:
        pass
    assert empty.get_summary() == []
    with pytest.raises(UnknownNameError, match=r"inspector does not know '0\.x'"):
        empty.get_tensor("x")
    with inspect_tensor() as inspector:  # reentrant: its forward pass has no graph
        given = torch.ones(2, 6, requires_grad=True)
        checkpoint(Layer(), given, use_reentrant=True).sum().backward()
    found = [(row["name"], row["grad_mean"]) for row in inspector.get_summary()]
    assert found == [("layer.0.wide", None), ("0.hidden", None)]


def tensors_of_every_kind():
    """Ragged, missing and empty ones; on some ranks only, with gradients."""
    rank, n = bmt.rank(), bmt.world_size()
    special = torch.full((1,), 3.0, requires_grad=True)
    tensors = {
        "ragged": torch.full((rank + 1, 2), float(rank)),
        "lengths": torch.ones(2, rank + 1),
        "empty": torch.ones(0, 3),
        "some": torch.ones(3 if rank == 0 else 0, 3),
        "number": torch.tensor(float(rank)),
        "mask": torch.tensor([True, False]),
        "half": torch.full((70000,), 4.0, dtype=torch.float16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "dims": torch.ones((2,) * (1 + rank)),
        "rows": torch.ones((3,) * min(rank, 1)),
        **({"special": special} if rank == 1 else {}),
    }
    with inspect_tensor() as inspector:
        for name, x in tensors.items():
            record_tensor(x, name)
        (special * 5).backward()
    summary = inspector.get_summary()
    found = [(row["shape"], row["mean"], row["std"], row["max"]) for row in summary]
    ragged = torch.cat([torch.full((rank + 1, 2), float(rank)) for rank in range(n)])
    assert_same_rows(summary[:1], [row_of("0.ragged", ragged, None)], "ragged")
    assert found[1:5] == [
        ((2 * n, -1), 1.0, 0.0, 1.0),
        ((0, 3), None, None, None),
        ((3, 3), 1.0, 0.0, 1.0),
        ((n,), (n - 1) / 2, 1.0, n - 1),
    ]
    assert [mean for _, mean, _, _ in found[5:]] == [0.5, 4.0, None, 1.0, 1.0, 3.0]
    assert [shape for shape, *_ in found[8:10]] == [(-1,), (1 + 3 * (n - 1),)]
    assert (summary[-1]["name"], summary[-1]["grad_mean"]) == ("0.special", 5.0)
    if rank == 0:
        with pytest.raises(KeyError, match=r"inspector does not know '0\.special'"):
            inspector.get_tensor("special")


class RecordsItsWeight(nn.Linear):
    def forward(self, x):
        record_tensor(self.weight, "w")
        return super().forward(x)


def bad_records():
    bias = dict(bmt.Block(Layer()).named_parameters())["up.bias"]
    one = torch.ones(1)
    given: tuple[Any, ...]
    for given, message in (
        ((nn.Parameter(one), "w"), r"parameter of shape \(1,\) as 'w'.*inspect_model"),
        ((bias, "w"), "parameter of shape"),
        (([1.0], "x"), "got list as 'x': expected a tensor"),
        ((one, ""), "name is ''"),
        ((one, "x", 3), "group is 3"),
    ):
        for context in (contextlib.nullcontext, inspect_tensor):
            with pytest.raises(ConfigurationError, match=message), context():
                record_tensor(*given)
    with pytest.raises(ConfigurationError, match=r"parameter of shape \(2, 2\) as 'w'"):
        bmt.Block(RecordsItsWeight(2, 2))(torch.ones(1, 2))
    with inspect_tensor() as inspector:
        record_tensor(one, "hidden", "encoder")
        record_tensor(one, "logits")
    for arguments, message in (
        (("hiden", "encoder"), r"nearest: 'encoder\.0\.hidden'"),
        (("logit",), r"nearest: '0\.logits'"),
    ):
        with pytest.raises(KeyError, match=message):
            inspector.get_tensor(*arguments)
    assert names_of(inspector.get_summary()) == ["encoder.0.hidden", "0.logits"]


@on_ranks(3)
def test_records_of_every_kind():
    """Contexts; ragged, 0-dim, empty and integer tensors; ranks that differ; bad input."""
    contexts()
    tensors_of_every_kind()
    bad_records()


def pipelined_list():
    bare = Stack(plain_stack(5).layers, Layer())
    seen, want = seen_by(bare)
    layers = copy.deepcopy(list(bare.layers))
    model = Stack(bmt.PipelineTransformerBlockList(layers), copy.deepcopy(bare.head))
    stage = world.current().mesh.pipe.index
    for _ in range(2):
        model(models.own(X)).sum().backward()  # a pass that nobody looks at
        model.zero_grad()
        with inspect_tensor() as inspector:
            model(models.own(X)).square().sum().backward()
        with pytest.raises(
            ConfigurationError, match=r"depends on other stages: call get_summary\(\)"
        ):
            inspector.get_tensor("hidden", index=0)
        with pytest.raises(ConfigurationError, match="pipelined pass cannot be taken into a loss"):
            _ = inspector.summary
        assert_same_rows(inspector.get_summary(), want, "pipeline")
        own, other = (0, 4) if stage == 0 else (4, 0)
        _, whole, y = next(entry for entry in seen if entry[0] == f"{own}.hidden")
        mine = inspector.get_tensor("hidden", index=own)
        ranks = world.current().mesh.pipe.ranks
        for got, all_rows in ((mine, whole), (mine.grad, grad_of(y))):
            rows = torch.cat([all_rows.chunk(bmt.world_size())[rank] for rank in ranks])
            models.assert_same(got, rows, "a stage's rows")
        with pytest.raises(KeyError, match=rf"inspector does not know '{other}\.hidden'"):
            inspector.get_tensor("hidden", index=other)
    rows_of_all = inspect_model(model, "layers.*.up.weight")
    assert_same_rows(rows_of_all, plain_rows(bare, "layers.*.up.weight"), "parameters")


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_pipelined_lists_record_like_plain_ones(world_size):
    """All layers of all stages, once each, with their gradients; parameters of other stages too."""
    run_ranks(pipelined_list, world_size, init={"pipe_size": 2})


# -- where numbers are not finite


class Spoilt(nn.Module):
    """Layers between which gradients may be spoilt."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 2)
        self.grad_factor = 1.0

    def forward(self, x):
        h = self.up(x) * 1
        if h.requires_grad:
            h.register_hook(lambda grad: grad * self.grad_factor)
        return self.down(h)


def not_finite():
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(Spoilt())
    last, x = bmt.rank() == 1, torch.ones(3, 4)

    def find(spoilt=-1):
        def losses():
            for number in range(3):
                yield model(x * (torch.inf if number == spoilt and last else 1)).sum()

        return find_non_finite(model, losses())

    fine = [bmt.inspect.NonFinite(rank=rank) for rank in range(2)]
    assert find() == fine and not any(found.is_cause for found in fine)
    first, second = find(spoilt=1)
    assert (second.output, second.micro_batch) == ("up (Linear): NaN", 1)
    assert not first.is_cause and second.is_cause and first.gradient is not None
    assert "first module whose output was not finite is up" in second.text()
    model.grad_factor = math.nan if last else 1.0
    first, second = find()
    assert (second.output, second.loss, second.micro_batch) == (None, None, 0)
    assert second.output_gradient == "up (Linear): NaN"
    assert not first.is_cause and "first parameter whose gradient" in first.text()
    model.grad_factor = 1.0
    bias = sharded_parameter(dict(model.named_parameters())["up.bias"])
    with torch.no_grad():
        bias.fill_(-torch.inf)
    found = find()
    assert any(one.weight for one in found)
    assert all(one.weight is None or "up.bias: -inf" in one.weight for one in found)
    with torch.no_grad():
        bias.fill_(0)
    assert find() == fine
    assert not any(module._forward_hooks for module in model.modules())


def test_where_numbers_are_not_finite():
    """Outputs, gradients, weights; nothing stays behind."""
    run_ranks(not_finite, 2)


# -- tables


@on_ranks(3)
def test_tables():
    """Equal layers are one line; only rank 0 prints."""
    layers = nn.ModuleList([bmt.Block(nn.Linear(16, 16)) for _ in range(12)])
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(16, 3)})
    out = io.StringIO()
    bmt.inspect.print_inspect(model, file=out)
    text = out.getvalue()
    words = [
        "layers.*.weight  12 x (16, 16)  float32     3,072",
        "1 x (3, 16)  float32",
        "26 parameters of 3,315 elements",
    ]
    assert all(word in text for word in words) if bmt.rank() == 0 else not text
