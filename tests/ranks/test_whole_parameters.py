"""Ordinary programs with parameters that are stored in slices and look whole, against one process
of plain PyTorch.
"""

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bmtrain as bmt
from bmtrain.errors import ParameterError, RanksDivergedError, StaleParameterError
from bmtrain.shard.slices import Slices

DIM = 8
Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM + 3), nn.Linear(DIM + 3, DIM)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x + self.scale * self.b(torch.tanh(self.a(x)))


def plain():
    torch.manual_seed(1)
    return nn.Sequential(Layer(), nn.LayerNorm(DIM), Layer())


def in_blocks(model):
    options: list[dict[str, Any]] = [{}, {"zero_level": 2}, {"use_checkpoint": False}]
    return nn.Sequential(*[bmt.Block(x, **options[n % 3]) for n, x in enumerate(model)])


SHARDED = (in_blocks, bmt.BMTrainModelWrapper)


def batch():
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(3))


def whole(x):
    values = bmt.gather_result(x.detach()) if isinstance(x, Slices) else x.detach()
    return values.clone().cpu()


class Run:
    """A model that a program trains: plain, or sharded in some way.

    Attributes:
        ranks: the part of a loss that is this rank's is 1 / ranks of it.
        matrix: the first parameter of two dims.
    """

    def __init__(self, shard=None):
        self.is_plain = shard is None
        self.ranks = 1 if shard is None else bmt.world_size()
        self._shard = shard
        self.use(plain())

    def use(self, model):
        """Another model, which is not sharded yet."""
        self.model = model if self._shard is None else self._shard(model)
        self.params = list(self.model.parameters())
        self.matrix = next(p for p in self.params if p.dim() == 2)

    def out(self):
        return self.model(batch())

    def loss(self, more=0.0):
        """The loss whose sum over ranks is one process's."""
        return (self.out().square().mean() + more) / self.ranks

    def back(self, more=0.0):
        self.loss(more).backward()

    def state(self, name=""):
        return {name + key: whole(value) for key, value in self.model.state_dict().items()}

    def grads(self):
        named = self.model.named_parameters()
        return {f"grad {name}": whole(p.grad) for name, p in named if p.grad is not None}

    def steps(self, optimizer, number=1):
        for _ in range(number):
            optimizer.zero_grad()
            self.back()
            optimizer.step()
        return self.state()


def compare(program, ways=SHARDED, tolerance=1e-9, *, may_refuse=False):
    """With one process; how many of these ways to shard have refused it."""
    expected, num_refused = program(Run()), 0
    assert expected
    for shard in ways:
        try:
            found = program(Run(shard))
        except ParameterError:
            if not may_refuse:
                raise
            num_refused += 1
            continue
        assert found.keys() == expected.keys(), (program, shard)
        for name, value in expected.items():
            got: Any = found[name]
            want = value.detach()
            if isinstance(got, Slices):  # this rank's part, which may be empty
                assert got.shape == want.shape, (program, shard, name)
                got, want = got.local, got.cut.own(want)
            off = (got.double().cpu() - want.double().cpu()).abs()
            error = float(off.max()) if off.numel() else 0.0
            largest = max(1e-3, float(value.double().abs().max()))
            assert error <= tolerance * largest, (program, shard, name, error)
    return num_refused


@contextlib.contextmanager
def doubles():
    """Tensors are made in fp64 inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def groups(params):
    params = list(params)
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


optim = torch.optim
OPTIMIZERS = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW foreach": lambda p: optim.AdamW(groups(p), lr=1e-2, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(groups(p), lr=1e-2, fused=True),
    "AdamW": lambda p: optim.AdamW(groups(p), lr=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2, t0=2),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda p: optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True, maximize=True),
}


def train(run, name):
    """With an L2 and an orthogonality term, and clipped."""
    optimizer = OPTIMIZERS[name](run.params)

    def closure():
        optimizer.zero_grad()
        penalty = torch.zeros(())
        # Rprop goes by signs of gradients, some of which are rounding errors of zero there.
        for p in run.params if name != "Rprop" else ():
            penalty = penalty + p.square().sum()
            if p.dim() == 2:
                penalty = penalty + (p @ p.t() - torch.eye(p.shape[0])).square().mean()
        loss = run.loss(penalty * 1e-2)
        loss.backward()
        nn.utils.clip_grad_norm_(run.params, 0.5)
        total = loss.detach() if run.is_plain else bmt.sum_loss(loss.detach()) * run.ranks
        return float(total)

    for _ in range(3):
        optimizer.step(closure)
    return run.state()


# The others go the same ways through torch's functions.
SOME = ("Adafactor", "Adam", "AdamW foreach", "AdamW fused", "Muon", "SGD", "SGD foreach")


def optimizers(names):
    with doubles():
        for number, name in enumerate(names):
            if hasattr(optim, name.split()[0]):  # torch 2.8 has no Muon
                tolerance = 2e-3 if name == "Muon" else 1e-6  # its iteration is in bf16
                compare(lambda run, name=name: train(run, name), [SHARDED[number % 2]], tolerance)


def some_optimizers():
    optimizers(SOME)


def other_optimizers():
    optimizers(name for name in OPTIMIZERS if name not in SOME)


def clipped(run):
    out = {}
    for order in (1.0, 2.0, 3.0, float("inf")):
        run.back()
        out[f"norm {order}"] = nn.utils.clip_grad_norm_(run.params, 0.01, order)
        by_hand = sum(grad_of(p).detach().data.norm(2).item() ** 2 for p in run.params)
        out[f"by hand {order}"] = torch.tensor(by_hand**0.5)
    nn.utils.clip_grad_value_(run.params, 1e-3)
    return {**out, **run.grads()}


def scaled(run):
    optimizer = optim.SGD(run.params, lr=0.1)
    scaler = torch.amp.GradScaler(bmt.device().type, init_scale=8.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(run.loss()).backward()
        if step == 1:  # one element, which one rank owns
            with torch.no_grad():
                grad_of(run.params[-1])[-1].fill_(float("inf"))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(run.params, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return {**run.state(), "scale": torch.tensor(scaler.get_scale())}


def about():
    """What needs no other rank."""

    def facts(model):
        return [
            (name, p.shape, p.dim(), p.numel(), p.dtype, p.ndim, p.size(), p.stride())
            for name, p in model.named_parameters()
        ]

    for shard in SHARDED:
        model = shard(plain())
        if bmt.rank() == 0:
            assert f"{model}" and repr([*model.parameters()]) and str(next(model.parameters()))
            assert facts(model) == facts(plain())
            assert model[0].a.weight is dict(model.named_parameters())["0.a.weight"]
        # On all ranks: views are gathered. BMCook calls torch.IntTensor(x.shape).
        seen, expected = views(Run(shard)), views(Run())
        assert [torch.IntTensor(x.shape).shape for x in seen] == [x.shape for x in expected]
        assert [(x.shape.numel(), *x.size()[:1]) for x in seen] == [
            (x.numel(), *x.shape[:1]) for x in expected
        ]


def views(run):
    """Of a parameter and its gradient, and all values of the state dict."""
    run.back()
    of = (run.matrix, run.matrix.data, run.matrix.detach(), grad_of(run.matrix))
    cut = [(x.view(-1), x.t(), x.transpose(0, 1), x[1:], x.detach().t()) for x in of]
    return [*of, *itertools.chain(*cut), *run.model.state_dict().values()]


def hooked(run):
    seen = {}

    def note(grad):
        seen[f"seen {len(seen)}"] = whole(grad)

    run.params[0].register_hook(lambda grad: grad * 2)
    run.params[1].register_hook(note)
    handle = run.params[2].register_hook(lambda grad: grad.zero_())
    run.params[1].register_post_accumulate_grad_hook(lambda p: note(p.grad))
    run.back()
    handle.remove()
    run.back()
    assert len(seen) == 4
    return {**run.grads(), **seen}


def stepped_in_backward(run):
    """The optimizer's step in the hook, as torch's tutorial has it."""
    optimizers = {p: optim.SGD([p], lr=0.1, momentum=0.9) for p in run.params}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in run.params:
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        run.back()
    return run.state()


def indexed_writes(run):
    p = run.matrix
    sums = torch.stack([row.sum() for row in p]).detach()
    out = {"row": p[0].detach().clone(), "turned": p.T.detach().clone(), "sums": sums}
    with torch.no_grad():
        nn.init.eye_(run.params[3])  # under no_grad it becomes a leaf that requires grad
        p[1] = 0.5
        p[:, 2] += 1
        p.view(-1)[5] = 7
        p.data[3, 4] = 9
        p.T[0, 1] = 3
        p.diagonal().fill_(2.0)
        p[p > 2.5] = 0.0
        p.masked_fill_(torch.eye(*p.shape).bool(), 1.0)
        p.index_fill_(0, torch.tensor([2]), 4.0)
        p.triu_()
        run.params[1][2:].mul_(2.0)
    p.requires_grad_(False)
    run.back()
    return {**out, **run.state(), **run.grads()}


def refused_writes():
    """What is refused has changed nothing; the next pass is right."""
    for shard in SHARDED:
        run, plain_run = Run(shard), Run()
        weight = run.matrix
        with pytest.raises(ParameterError):
            weight.zero_()
        row, flat = weight.data[0], weight.data.view(-1)
        weight.data.add_(1.0)
        for stale in (row.zero_, flat.sum):
            with pytest.raises(StaleParameterError):
                stale()
        kept = run.model.state_dict()
        weight.data.add_(1.0)
        with pytest.raises(StaleParameterError):
            kept["0.a.weight"].zero_()
        assert not torch.equal(kept["0.a.weight"], run.model.state_dict()["0.a.weight"])
        assert type(copy.deepcopy(kept)["0.a.weight"]) is torch.Tensor
        for refused in (weight.data_ptr, weight.untyped_storage, weight.share_memory_):
            with pytest.raises(ParameterError):
                refused()
        run.back()
        with pytest.raises(ParameterError, match="tie a parameter to a gradient"):
            weight.data = weight.grad
        plain_run.matrix.data.add_(2.0)
        plain_run.back()
        found, want = ([each.state(), each.grads()] for each in (run, plain_run))
        torch.testing.assert_close(found, want)
        weight.data.copy_(grad_of(weight))
        assert torch.equal(whole(weight), whole(weight.grad))


def averaged(run):
    """By torch's class, and by values of state dicts."""
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer, twin = optim.SGD(run.params, lr=0.5), copy.deepcopy(run.model)
    for _ in range(3):
        run.steps(optimizer)
        average.update_parameters(run.model)
        theirs = run.model.state_dict()
        for name, value in twin.state_dict().items():
            value.mul_(0.9)
            value += 0.1 * theirs[name].detach()  # noqa: PLW2901 (as programs write it)
    found = run.state()
    for name, model in (("average ", average.module), ("twin ", twin)):
        run.model = model
        found |= run.state(name)
    return found


def copied(run):
    """Model and optimizer together; hooks stay, attributes go along."""
    run.matrix.mark = "kept"
    make = optim.AdamW if run.is_plain else bmt.optim.AdamOptimizer
    optimizer = make(run.params, 1e-2, weight_decay=0.0)
    run.steps(optimizer, 2)
    run.matrix.register_hook(lambda grad: grad * 0)
    twin = copy.copy(run)
    twin.model, other = copy.deepcopy((run.model, optimizer))
    weight = twin.model[0].a.weight
    assert weight is not run.matrix and (run.is_plain or weight.mark == "kept")
    out = twin.steps(other, 2)
    return {**out, **twin.grads(), **{f"own {name}": x for name, x in run.steps(optimizer).items()}}


def for_some_inputs(run):
    run.back()
    some, before = [run.params[0], run.params[-1]], run.grads()
    loss = run.loss()
    first, second = torch.autograd.grad(loss, some, retain_graph=True)
    assert all(torch.equal(before[name], grad) for name, grad in run.grads().items())
    for p in run.params:
        p.grad = None
    loss.backward(inputs=some)
    return {**run.grads(), "first": whole(first), "second": whole(second)}


class Double(torch.autograd.Function):
    """It keeps the weight itself."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w
        return x @ w * 2

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.w.t() * 2, ctx.x.t() @ grad * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.number = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x):
        return torch.tanh(Double.apply(x, self.w)) + self.number.sum()


class Adjoint(torch.autograd.Function):
    """As an adjoint of an ODE solver: backward runs the module again, and asks for gradients with
    respect to the parameters that forward was given.
    """

    @staticmethod
    def forward(ctx, run, x, *params):
        ctx.run = run
        ctx.save_for_backward(x, *params)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.run(x), (x, *params), grad, allow_unused=True)
        return None, *[torch.zeros_like(g) + g for g in grads]


class Solved(nn.Module):
    def __init__(self, listed):
        super().__init__()
        layers = [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
        self.f = nn.ModuleList(layers) if listed else nn.Sequential(*layers)

    def forward(self, x):
        return x + Adjoint.apply(
            lambda y: self.f[1](torch.tanh(self.f[0](y))), x, *self.parameters()
        )


def custom_functions(run):
    torch.manual_seed(2)
    solved = [Solved(listed) for listed in (False, True, False)]
    run.use(nn.Sequential(*[Custom() for _ in range(4)], *solved))
    for _ in range(2):
        with torch.no_grad():
            run.out()
        run.back((batch() @ (run.model[1].w * 2).t()).square().mean())
    return {**run.grads(), **run.state()}


def embedded(run):
    out = {}
    for options in (
        {},
        {"sparse": True},
        {"max_norm": 1.0},
        {"padding_idx": 4},
        {"max_norm": 0.5, "norm_type": 1.0},
    ):
        torch.manual_seed(2)
        table = nn.Embedding(11, DIM, **options)
        head = nn.Linear(DIM, 11, bias=False)
        if "sparse" in options:  # there before the model is sharded
            table(torch.tensor([1, 4, 4])).square().sum().backward()
        else:
            head.weight = table.weight
        model = nn.Sequential(table, head)
        run.model = model if run.is_plain else bmt.BMTrainModelWrapper(model)
        optimizer = optim.SGD(run.model.parameters(), lr=0.5)
        for _ in range(3):
            loss = run.model(torch.tensor([[1, 4, 4], [0, 9, 2]])).square().mean()
            (loss / run.ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        out |= run.state(f"{options} ")
    return out


def known_before(run):
    """Attributes, hooks, gradients and lists are of parameters that are sharded afterwards."""
    model = plain()
    model[0].a.weight.mark = "kept"
    model[0].a.weight.register_hook(lambda grad: grad * 3)
    known = list(model.parameters())
    model(batch()).square().sum().backward()  # all rows on all ranks
    run.use(model)
    assert all(a is b for a, b in zip(known, run.params, strict=True))
    assert run.matrix.mark == "kept" and isinstance(
        run.matrix, bmt.DistributedParameter | nn.Parameter
    )
    out = run.grads()
    optim.SGD(known, lr=0.1).step()
    run.back()
    return {**out, **run.state()}


def refused_models():
    for shard in SHARDED:
        model = plain()
        (model(batch()).square().sum() * (bmt.rank() + 1)).backward()
        if bmt.world_size() > 1:
            with pytest.raises(RanksDivergedError, match="gradient"):
                shard(model)
            model = plain()
            bmt.optim.AdamOptimizer(model.parameters())
            with pytest.raises(ParameterError, match="shard the model first"):
                shard(model)
        model = plain()
        model[2].b.weight.data = model[0].b.weight.data
        for wrap in (bmt.BMTrainModelWrapper, bmt.Block):
            with pytest.raises(ParameterError, match="share memory"):
                wrap(model)
            with pytest.raises(ParameterError, match=r"'0\.weight' is lazy.*run the model once"):
                wrap(nn.Sequential(nn.LazyLinear(3)))
        compare(known_before, [shard])


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in {"weight": (3, 5), "a": (3, 2), "b": (2, 5)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape), name != "weight"))


def merged(run):
    """Values with a graph, written in place into what is frozen, as adapters are merged."""
    torch.manual_seed(3)
    adapted: Any = Adapted()
    if not run.is_plain:
        adapted = bmt.BMTrainModelWrapper(adapted)
    run.model = adapted
    adapted.weight.data += adapted.a @ adapted.b
    adapted.weight.data -= 0.5 * (adapted.a @ adapted.b)
    written = adapted.weight.data
    written.mul_(adapted.a @ adapted.b)
    written += 3 * adapted.weight
    written *= 2
    (written.square().sum() / run.ranks).backward()
    if not run.is_plain:
        assert not adapted.weight.requires_grad and not adapted.weight.local.requires_grad
        with pytest.raises(ParameterError, match=r"place by values that require grad.*data"):
            adapted.weight.add_(adapted.a @ adapted.b)
    return {**run.state(), **run.grads()}


COMPARED = [
    clipped,
    scaled,
    hooked,
    stepped_in_backward,
    indexed_writes,
    averaged,
    copied,
    for_some_inputs,
    custom_functions,
    embedded,
    known_before,
    merged,
]


def compare_all():
    with doubles():
        for program in COMPARED:
            compare(program)


PROGRAMS = [compare_all, some_optimizers, other_optimizers, about, refused_writes, refused_models]


@pytest.mark.parametrize(
    "program",
    [pytest.param(x, marks=pytest.mark.long) if x is other_optimizers else x for x in PROGRAMS],
)
def test_program(program):
    """What the function of this name states."""
    run_ranks(program, 3 if program in (about, refused_writes) else 2, timeout=200)
