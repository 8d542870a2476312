"""Wrapped small models run as one compiled graph: values of plain PyTorch, on all ranks or none."""

import collections
import contextlib
import copy
import functools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.garbage import without_collector
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import Tensor, nn

import bmtrain as bmt
from bmtrain.block import whole_model
from bmtrain.block.whole_model import Stage
from bmtrain.compile import backend
from bmtrain.errors import ConfigurationError, StaleParameterError
from bmtrain.runtime import world
from model_center.model import GPT2, Bert, BertConfig, GPT2Config

pytestmark = pytest.mark.compiler
COMPILED = {"compile": True}


class Lowering(models.Counting):
    """A backend that traces forward and backward as torch's does; on a rank that is named it fails."""

    def __init__(self, fails_on=-1):
        super().__init__()
        self.fails_on = fails_on

    def __call__(self, graph, inputs, **options):
        super().__call__(graph, inputs)
        if bmt.rank() == self.fails_on:
            raise RuntimeError("this processor is unknown")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.map = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.map(self.norm(x)))


class Net(nn.Module):
    """Layers in a list, what stands around them, a tie, and a buffer that training changes."""

    seen: Tensor

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))
        self.temperature = 1.0

    def forward(self, ids, labels):
        x = self.dropout(self.tokens(ids))
        if self.training:
            self.seen += 1
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.logits(x), labels.reshape(-1))

    def logits(self, x):
        return self.head(x).view(-1, 11) / self.temperature


def half(forward):
    return lambda self, *args: forward(self, *args) / 2


def lowering(fails_on=-1):
    """What compiles from now on."""
    torch._dynamo.reset()
    backend.inductor = own = Lowering(fails_on)
    return own


def pair(make=Net, fails_on=-1):
    """A model and a wrapped copy."""
    torch.manual_seed(0)
    lowering(fails_on)
    plain: Any = make()
    return plain, bmt.BMTrainModelWrapper(copy.deepcopy(plain))


def stage_of(model):
    return model.__dict__["_whole_model"]._stage


def batch(number, length=5):
    """Rows of all ranks, two each."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 11, (2 * bmt.world_size(), length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def own_batch(number, length=5):
    return map(models.own, batch(number, length))


def check(model, plain, number, length=5):
    """One more pass adds the gradients of plain PyTorch, and leaves its buffers."""
    loss = model(*own_batch(number, length))
    loss.backward()
    expected = plain(*batch(number, length))
    (expected * bmt.world_size()).backward()
    mean = bmt.distributed.all_reduce(loss.detach(), "avg")
    torch.testing.assert_close(mean, expected.detach())
    models.assert_same_gradients(model, plain, f"pass {number}", 1e-6)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@on_ranks(2, init=COMPILED)
def test_a_small_model_is_one_graph_and_exact():
    """Accumulation, other lengths, evaluation between, several passes before backward, an attribute
    that the program changes, a frozen parameter, a copy of the model.
    """
    plain, model = pair()
    own: Any = backend.inductor
    for number in range(3):
        check(model, plain, number)
    assert stage_of(model) is Stage.WHOLE and own.num_graphs == 1
    with without_collector():
        model(*batch(3)), plain(*batch(3))  # which never come to their backward passes
        assert model.__dict__["_whole_model"]._last() is None
    check(model, plain, 3, length=7)
    with torch.no_grad():
        model.eval()(*batch(4)), plain.eval()(*batch(4))
    model.train(), plain.train()
    sum(model(*own_batch(5)) * k for k in (1, 2)).backward()
    (sum(plain(*batch(5)) * k for k in (1, 2)) * bmt.world_size()).backward()
    model.temperature = plain.temperature = 0.5
    check(model, plain, 6)
    model.get_parameter("layers.0.map.weight").requires_grad_(False)
    plain.get_parameter("layers.0.map.weight").requires_grad_(False)
    check(model, plain, 7)
    assert stage_of(model) is Stage.WHOLE
    values = {name: param.gather().detach() * 2 for name, param in model.named_parameters()}
    expected = torch.func.functional_call(plain, values, batch(5))
    assert torch.equal(torch.func.functional_call(model, values, batch(5)), expected)
    again, twin = copy.deepcopy((model, plain))
    check(again, twin, 8)
    assert stage_of(again) is Stage.WHOLE
    with mock.patch.object(Layer, "forward", half(Layer.forward)):
        check(model, plain, 9)
    check(model, plain, 10)
    assert stage_of(model) is Stage.WHOLE


@pytest.mark.long
@on_ranks(2, init=COMPILED)
def test_methods_of_classes_may_be_exchanged():
    plain, model = pair()
    check(model, plain, 0)
    methods = ((Net, "forward"), (Layer, "forward"), (nn.Linear, "forward"), (Net, "logits"))
    for kind, name in methods:  # before and after it is exchanged
        with mock.patch.object(kind, name, half(getattr(kind, name))):
            check(model, plain, 9)
        check(model, plain, 10)
    assert stage_of(model) is Stage.WHOLE


@pytest.mark.parametrize(
    "what", ["fails", "hook", "memory", pytest.param("written", marks=pytest.mark.long)]
)
@on_ranks(2, init=COMPILED)
def test_all_ranks_run_whole_or_none(what):
    """What one rank cannot do none does; buffers and random numbers are as if it was not tried."""
    plain, model = pair(fails_on=1 if what == "fails" else -1)
    if what == "hook" and bmt.rank() == 1:
        model.layers[0].register_forward_hook(lambda *_: None)
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if what == "memory":
            check(model, plain, 0)
            whole = model.__dict__["_whole_model"]
            whole._memory.limit_is_open, whole._memory._limit = False, 1
            check(model, plain, 1, length=9)
        else:
            for number in range(3):
                check(model, plain, number)
        if what == "written":
            whole = model.__dict__["_whole_model"]
            whole._gate._lower = Lowering(fails_on=0)
            for number, length in enumerate((6, 7, 8)):
                check(model, plain, number, length)
    told = [str(each.message) for each in said if "block by block" in str(each.message)]
    assert stage_of(model) is (Stage.UNTRIED if what == "hook" else Stage.APART)
    assert bool(told) is (what != "hook")
    assert torch.equal(torch.get_rng_state(), before)
    check(model, plain, 9)


def doubled(layer):
    """Exchange the layer's forward by one that calls it."""
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


def train_without_compiled_code():
    plain, model = pair()
    check(model, plain, 0)
    assert stage_of(model) is Stage.WHOLE
    model.__dict__["_whole_model"]._gate._lower = Lowering(fails_on=0)
    nets = (model, plain)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for net in nets:
        doubled(net.layers[0])
    with pytest.warns(UserWarning, match="block by block"):
        for number in range(1, 4):
            check(model, plain, number)
            for optimizer in optimizers:
                optimizer.step()
    assert stage_of(model) is Stage.APART


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_training_goes_on_without_compiled_code(num_ranks):
    """A later call does not compile: it and all further steps are those of plain PyTorch."""
    run_ranks(train_without_compiled_code, num_ranks, init=COMPILED)


@on_ranks(2, init=COMPILED)
def test_hooks_of_all_modules_run():
    plain, model = pair()
    check(model, plain, 0)

    def double(module, _, out):
        return 2 * out if isinstance(module, Layer) else None

    with nn.modules.module.register_module_forward_hook(double):
        check(model, plain, 1)
    check(model, plain, 2)
    assert stage_of(model) is Stage.WHOLE


class Bounded(Net):
    """Writes a parameter in each pass, and counts them."""

    def __init__(self, how):
        super().__init__()
        self.how, self.count = how, 0
        self.mean = nn.Parameter(torch.zeros(11, 8), requires_grad=False)

    def forward(self, ids, labels):
        self.count += 1
        with torch.no_grad():
            if self.how == "written":
                self.mean.data.add_(1).clamp_(max=2.5)
            elif self.how == "in a view":
                self.mean.data.view(-1)[:9].add_(1)
            else:
                self.mean.data = self.mean.data + 1
        return super().forward(ids, labels) * self.mean.mean()


@pytest.mark.parametrize(
    "how", ["written", *(pytest.param(how, marks=pytest.mark.long) for how in ("in a view", "set"))]
)
@on_ranks(2, init=COMPILED)
def test_what_writes_its_parameters_runs_apart(how):
    """Where the writes count, and once per pass."""
    plain, model = pair(functools.partial(Bounded, how))
    with pytest.warns(UserWarning, match=r"block by block.*writes to x\.data"):
        for number in range(4):
            check(model, plain, number)
            torch.testing.assert_close(model.mean.full_tensor(), plain.mean.detach())
    assert stage_of(model) is Stage.APART and model.count == plain.count


class Keeping(Net):
    """Keeps a parameter where its owner does not look for it, as it is or in containers, from its
    first call on or from a later one; and counts.
    """

    def __init__(self, in_containers, since):
        super().__init__()
        self.in_containers, self.since = in_containers, since
        self.calls, self.kept = 0, {"own": []}

    def forward(self, ids, labels):
        first: Any = self.layers[0]
        self.calls += 1
        if self.calls > self.since and self.in_containers:
            self.kept["own"].append(first.map.weight)
        elif self.calls > self.since:
            self.kept = first.map.weight
        return super().forward(ids, labels) * self.calls


class Twofold(Net):
    """Gives its loss twice, in one place of the memory."""

    def __init__(self, view):
        super().__init__()
        self.view = view

    def forward(self, ids, labels):
        loss = super().forward(ids, labels)
        return self.view(loss), loss


@pytest.mark.parametrize(
    ("in_containers", "since"),
    [pytest.param(False, 0, marks=pytest.mark.long), (True, 0), (True, 1)],
)
@on_ranks(2, init=COMPILED)
def test_parameters_that_the_program_keeps_run_apart(in_containers, since):
    """A parameter that is kept in the first call follows the optimizer; one that is kept later is
    refused. A call that is undone counts once.
    """
    plain, model = pair(functools.partial(Keeping, in_containers, since))
    with pytest.warns(UserWarning, match="keeps a parameter"):
        for number in range(since + 1):
            check(model, plain, number)
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        found: list[Any] = [x.kept for x in (model, plain)]
        kept, known = (x["own"][0] for x in found) if in_containers else found
        if since:
            with pytest.raises(StaleParameterError, match="that a forward pass has kept"):
                kept.clone()
        else:
            torch.testing.assert_close(kept.full_tensor(), known.detach())
        check(model, plain, since + 1)
    assert stage_of(model) is Stage.APART and model.calls == plain.calls


@on_ranks(2, init=COMPILED)
def test_writes_into_a_result_are_seen_in_its_views():
    for view, stage in ((torch.Tensor.detach, Stage.WHOLE), (nn.Flatten(0), Stage.APART)):
        plain, model = pair(functools.partial(Twofold, view))
        apart = pytest.warns(UserWarning, match="lies in the memory of another")
        with apart if stage is Stage.APART else contextlib.nullcontext():
            for _ in range(3):
                shared, loss = model(*own_batch(2))
                _, known = plain(*own_batch(2))
                shared.mul_(3)
                torch.testing.assert_close(loss, known * 3)
        assert stage_of(model) is stage


class Recurrent(Net):
    """With a layer whose block does not compile."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids, labels):
        x, _ = self.rnn(self.tokens(ids))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).view(-1, 11), labels.reshape(-1))


@on_ranks(2, init=COMPILED)
def test_a_block_that_does_not_compile_keeps_all_apart():
    plain, model = pair(Recurrent)
    for number in range(2):
        check(model, plain, number)
    assert stage_of(model) is Stage.APART


@on_ranks(2, init=COMPILED)
def test_dropout_is_that_of_the_rank():
    """Other masks on other ranks, the generator as one draw later on all of them."""
    _, model = pair(functools.partial(Net, dropout=0.5))
    world.current().draws.same_rows = False
    ids, labels = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    losses = [model(ids, labels).detach() for _ in range(3)]
    assert stage_of(model) is Stage.WHOLE
    both = bmt.distributed.all_gather(torch.stack(losses))
    assert len({float(x) for x in both.flatten()}) == 6
    states = bmt.distributed.all_gather(torch.get_rng_state())
    assert torch.equal(states[0], states[1])


class TwoHeads(nn.Module):
    """Takes a tensor that requires grad; gives two losses, a count, and its argument."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(8, 1) for _ in range(3)])  # the last is not used

    def forward(self, x):
        y = self.layers[1](self.layers[0](x))
        one, two = (head(y).square().mean() for head in self.heads[:2])
        return {"one": one, "two": two, "count": (y > 0).sum(), "x": x}


def _passes(model):
    """Gradients of passes through a part of the graph: of parameters, and of the input."""
    params = dict(model.named_parameters())
    some = [params["layers.0.map.weight"], params["heads.0.bias"]]
    of_params = {}

    def note(what):
        for name, param in params.items():
            grad = param.grad
            of_params[f"{what} {name}"] = getattr(grad, "full_tensor", lambda x=grad: x)()
            param.grad = None

    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    out = model(x + 0)
    out["one"].backward(inputs=some, retain_graph=True)
    note("two parameters")
    out["two"].backward(inputs=[x, *some[:1]], retain_graph=True)
    note("the input and a parameter")
    (of_input,) = torch.autograd.grad(out["one"] + out["x"].sum(), [x], retain_graph=True)
    note("the input")
    for _ in range(2):
        (out["one"] + out["two"]).backward(retain_graph=True)
    note("twice")
    assert not out["count"].requires_grad
    return of_params, [out["count"], of_input, x.grad]


def _compare_passes(model, plain):
    ours, inputs = _passes(model)
    known, expected = _passes(plain)
    torch.testing.assert_close(inputs, expected)
    for name, grad in known.items():
        # All ranks have the same rows, and their gradients are added up.
        total = None if grad is None else grad * bmt.world_size()
        torch.testing.assert_close(ours[name], total, msg=name)


@on_ranks(2, init=COMPILED)
def test_backward_through_a_part_of_the_graph():
    plain, model = pair(TwoHeads)
    for _ in range(3):
        _compare_passes(model, plain)
    assert stage_of(model) is Stage.WHOLE


class Kept(TwoHeads):
    """Keeps an activation as an attribute too, and shows a buffer, in whose memory it counts."""

    calls: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        out = super().forward(x)
        self.seen = out["one"].detach() + 1
        return {**out, "calls": self.calls.detach()}


def kept_results():
    """What a program has kept of each call is what that call computed."""
    torch.manual_seed(0)
    plain, kept = Kept(), []
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    for module in (model, plain):
        kept.append([])
        for step in range(5):
            out = module(torch.linspace(-1 - step, 1, 24).view(3, 8).requires_grad_() + 0)
            out["one"] /= 2  # in place, as programs do when they accumulate
            out["one"].backward()
            kept[-1] += [module.seen, *out.values()]
    assert stage_of(model) is Stage.WHOLE
    torch.testing.assert_close(*kept)


@on_ranks(2, init=COMPILED)
def test_results_may_be_kept():
    lowering()
    kept_results()


@on_ranks(2, init=COMPILED)
def test_what_is_compiled_is_not_differentiated_twice():
    """As one graph, and block by block: refused, and the next pass is right."""
    plain, model = pair(TwoHeads)
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    for number in range(3):
        if number == 2:
            model.layers[0].register_forward_hook(lambda *_: None)
        for _ in range(2):
            with pytest.raises(bmt.errors.ParameterError, match="compile=False"):
                torch.autograd.grad(model(x + 0)["one"], x, create_graph=True)
        _compare_passes(model, plain)


@on_ranks(2, init=COMPILED)
def test_gradients_of_arguments_may_be_differentiated():
    """Those of leaves: such calls run uncompiled, also where others run as one graph."""
    plain, model = pair(TwoHeads)
    for number in range(2):
        _compare_passes(model, plain)
        for module, part in ((model, 1), (plain, bmt.world_size())):
            x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
            out = module(x)
            (slope,) = torch.autograd.grad(out["one"], x, create_graph=True)
            ((slope.square().sum() + out["two"]) * part).backward()
        models.assert_same_gradients(model, plain, f"pass {number}", 1e-6)
        model.zero_grad()
        plain.zero_grad()
    assert stage_of(model) is Stage.WHOLE


class Stepping(TwoHeads):
    """Its results depend on what each call changes."""

    steps: Tensor

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.last = collections.deque[Tensor]([], 2 if how == "deque" else None)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.how == "counter":
            self.steps += 1
        elif self.how == "out":
            torch.add(self.steps, 1, out=self.steps)
        else:
            self.last.append(x.detach().mean())
        out = super().forward(x)
        return out["one"] * (1 + self.steps) * (1 + sum(self.last))


@pytest.mark.parametrize("how", ["counter", "out", "deque"])
@on_ranks(2, init=COMPILED)
def test_what_torch_compiles_wrongly_runs_uncompiled(how):
    """Backward would read a buffer as it is after the call, a full deque lose the wrong entry."""
    plain, model = pair(functools.partial(Stepping, how))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Stepping runs block by block")
        for number in range(4):
            x = torch.linspace(-1, 1 + number, 24).view(3, 8)
            model(x).backward()
            (plain(x) * bmt.world_size()).backward()
            models.assert_same_gradients(model, plain, f"pass {number}", 1e-6)


class Escaping(nn.Module):
    """Gives a parameter away, or keeps what forward has computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.kept = torch.zeros(())

    def forward(self, x, kind):
        y = self.second(self.first(x))
        self.kept = y.square().mean()
        weight = self.first.map.weight
        shown = {"parameter": weight, "view": weight.t()}.get(kind, weight.detach())
        return {"loss": y.detach().mean() if kind == "kept" else y.mean(), "shown": shown}


def _escaping_loss(model, kind):
    x = torch.linspace(-1, 1, 24).view(3, 8)
    out = model(x, kind)
    kept = model.kept if kind in ("kept", "both") else 0.0
    return out["loss"] + out["shown"].square().sum() + kept


@pytest.mark.parametrize("kind", ["parameter", "view", "kept", "both"])
@on_ranks(2, init=COMPILED)
def test_gradients_that_come_by_other_ways_than_the_results(kind):
    plain, model = pair(Escaping)
    for number in range(3):
        _escaping_loss(model, kind).backward()
        (_escaping_loss(plain, kind) * bmt.world_size()).backward()
        models.assert_same_gradients(model, plain, f"pass {number}", 1e-6)
    assert stage_of(model) is Stage.WHOLE
    loss = _escaping_loss(model, kind)
    with torch.no_grad():
        model.first.map.weight.mul_(2)
    with pytest.raises(bmt.errors.StaleParameterError):
        loss.backward()


class OldNet(bmt.DistributedModule):
    """The same as a program for BMTrain writes it: its blocks recompute."""

    seen: Tensor

    def __init__(self, plain):
        super().__init__()
        self.tokens = bmt.BMTrainModelWrapper(copy.deepcopy(plain.tokens))
        layers = [bmt.CheckpointBlock(copy.deepcopy(layer)) for layer in plain.layers]
        self.layers = bmt.TransformerBlockList(layers)
        self.head = bmt.BMTrainModelWrapper(copy.deepcopy(plain.head))
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids, labels):
        if self.training:
            self.seen += 1
        x = self.layers(self.tokens(ids))
        return F.cross_entropy(self.head(x).view(-1, 11), labels.reshape(-1))


class Trainer:
    """Of whose method the model is an attribute, and a block of it."""

    def __init__(self, model):
        self.model, self.block = model, model.layers[0]

    def loss(self, *args):
        return self.model(*args)


def test_compiled_code_is_found_above_any_result():
    x = torch.ones(2, requires_grad=True)
    node = (compiled := x.exp()).grad_fn
    with mock.patch.object(whole_model, "COMPILED_NODE", "ExpBackward0"):
        assert whole_model.compiled_node([compiled * 2, x.sin().cos()], 0) is node
        assert whole_model.compiled_node([x.sin().cos()], 0) is None


@pytest.mark.parametrize("how", ["attribute", "partial"])
@on_ranks(2, init=COMPILED)
def test_cuda_graph_records_the_models_of_a_function(how):
    """Those that are not wrapped; a pass later too."""
    torch.manual_seed(0)
    lowering()
    plain = Net()
    model: Any = OldNet(plain)

    def of_closure(*args):
        return model(*args)

    run: Any = {
        "attribute": lambda: bmt.cuda_graph(Trainer(model).loss),
        "partial": lambda: bmt.cuda_graph(max_graphs=1)(functools.partial(of_closure)),
    }[how]()
    for number in range(3):
        run(*own_batch(number)).backward()
        (plain(*batch(number)) * bmt.world_size()).backward()
    assert stage_of(model) is Stage.WHOLE
    assert isinstance(model, OldNet) and model.__class__ is OldNet
    assert type(model.layers[0]) is type(model.layers[1])
    models.assert_same_gradients(model, plain, how, 1e-6)


def recorded_models(dtype=torch.float32):
    """Losses and gradients of language models are the same with and without `cuda_graph`; an output
    that computes something when it is read does so as before.
    """
    ids = torch.arange(12, device=bmt.device()).view(2, 6)
    lengths = torch.tensor([6, 4], device=bmt.device())
    kinds: Any = ((GPT2, GPT2Config), (Bert, BertConfig))
    for make, config in kinds:
        results = []
        for is_recorded in (False, True):
            torch.manual_seed(1)
            widths = {"dim_model": 16, "num_heads": 2, "dim_head": 8, "dim_ff": 32}
            sizes = config(vocab_size=30, num_layers=2, dtype=dtype, **widths)
            model: Any = make(sizes)
            bmt.init_parameters(model)
            if is_recorded:
                bmt.cuda_graph(model)
            for _ in range(4):
                output: Any = model.train()(ids, lengths, output_logits=True)
                output.logits.float().square().mean().backward()
            found = {"logits": output.logits, "pooled": getattr(output, "pooler_output", None)}
            # in one vector: those of biases of keys are zero but for rounding
            grads = [grad_of(x).flatten() for x in model.parameters() if x.grad is not None]
            results.append({**found, "gradients": torch.cat(grads)})
        assert stage_of(model) is Stage.WHOLE
        for name, value in results[0].items():
            if value is not None:
                # Kernels of a GPU round functions as GELU's otherwise than torch's.
                tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
                models.assert_same(results[1][name], value, name, tolerance)


@on_ranks(2, init=COMPILED)
def test_cuda_graph_of_language_models():
    lowering()
    recorded_models()


def test_what_cuda_graph_refuses():
    for given in (3, None):
        with pytest.raises(ConfigurationError, match="cuda_graph got"):
            bmt.cuda_graph(given, max_graphs=0 if given is None else 1)


@on_ranks(1)
def test_cuda_graph_without_a_model_says_so():
    double = bmt.cuda_graph(lambda x: 2 * x)
    with pytest.warns(UserWarning, match="no sharded model"):
        assert double(3) == 6
    assert double(4) == 8
