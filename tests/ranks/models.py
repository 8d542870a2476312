"""Models with everything odd that the engine must get right, in plain PyTorch, and the ways to
shard them.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

import bmtrain as bmt
from bmtrain.compile.programs import Structure
from bmtrain.shard.slices import local_of

# rows divide evenly over 1 to 4 ranks and 3 micro-batches
VOCAB, DIM, WIDTH, LENGTH, ROWS = 11, 7, 13, 3, 36
MARK = 0  # rows that hold this token use the `sometimes` parameters


def is_refused(block):
    """Whether a block runs uncompiled because its module is more than one graph."""
    assert isinstance(block, bmt.Block) and isinstance(block._runner, Structure)
    return block._runner._is_refused


class Counting:
    """A backend of the compiler that runs the graph as it is and counts what it is given."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return graph.forward


def assert_same(got, want, what, tolerance=1e-5):
    """Both are there, of equal shape and dtype, and no element is off by more than `tolerance` of
    the largest.
    """
    assert got is not None and want is not None, f"{what}: {got}, expected {want}"
    assert got.shape == want.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    if want.numel() == 0:
        return
    error = (got.double().cpu() - want.double().cpu()).abs().max().item()
    scale = max(want.double().abs().max().item(), 1e-6)
    assert error <= tolerance * scale, (
        f"{what}: off by {error:g}, relative {error / scale:g}, allowed {tolerance:g}"
    )


def assert_same_dicts(got, want, what, tolerance=1e-5):
    """The same names with the same tensors, None included."""
    assert sorted(got) == sorted(want), f"{what}: names {sorted(got)}, expected {sorted(want)}"
    for name, value in want.items():
        assert (got[name] is None) == (value is None), (
            f"{what}: {name} is {got[name]}, expected {value}"
        )
        if value is not None:
            assert_same(got[name], value, f"{what}: {name}", tolerance)


def assert_equal(got, want, what="", **options):
    """The same numbers to the bit, in containers of any kind."""
    torch.testing.assert_close(
        got, want, rtol=0, atol=0, check_device=False, msg=f"{what}: {{}}".format, **options
    )


def full_gradients(module):
    """Every parameter's whole gradient by name, None where it has none. Collective."""
    out: dict[str, Any] = {}
    params = dict(module.named_parameters())
    own = torch.tensor([[param.grad is not None for param in params.values()]])
    for (name, param), flags in zip(params.items(), bmt.gather_result(own).T.tolist(), strict=True):
        assert len(set(flags)) == 1, f"{name} has a gradient on some ranks only: {flags}"
        if param.grad is None:
            out[name] = None
        elif isinstance(param, bmt.DistributedParameter):
            shape = param._original_shape
            out[name] = bmt.gather_result(param.grad.clone()).view(shape)
        else:
            out[name] = param.grad.clone()
    return out


def plain_gradients(module):
    """The same of a plain module; of a sharded one this rank's slices."""
    return {
        name: None if param.grad is None else local_of(param.grad).clone()
        for name, param in module.named_parameters()
    }


def assert_same_gradients(model, plain, what, tolerance=1e-5):
    """Whole gradients of a sharded model are those of a plain one. Collective."""
    assert_same_dicts(full_gradients(model), plain_gradients(plain), what, tolerance)


def assert_same_state(model, plain, what, tolerance=1e-5):
    """Both have the same state dict. Collective."""
    assert_same_dicts(model.state_dict(), plain.state_dict(), what, tolerance)


def check_pass(model, plain, x, what="a pass", *, fresh=True):
    """Value and gradients of rows that all ranks have; gradients add to those before unless
    `fresh`. Collective.
    """
    want, got = plain(x).square().sum(), model(x).square().sum()
    for net in (plain, model) if fresh else ():
        net.zero_grad()
    want.backward()
    (got / bmt.world_size()).backward()
    assert_same(got.detach(), want.detach(), f"{what}: value")
    assert_same_gradients(model, plain, what)


@dataclasses.dataclass
class Answer:
    """What an OddBlock of kind "dataclass" returns."""

    hidden: torch.Tensor
    extra: dict[str, Any]


class OddBlock(torch.nn.Module):
    """Prime sizes, tiny, 0-dim, frozen, unused and sometimes-used parameters, and outputs of every
    kind.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm = torch.nn.LayerNorm(DIM)
        self.up = torch.nn.Linear(DIM, WIDTH)
        self.down = torch.nn.Linear(WIDTH, DIM, bias=False)
        self.gain = torch.nn.Parameter(torch.randn(()) * 0.1 + 1)
        self.tiny = torch.nn.Parameter(torch.randn(2))
        self.sometimes = torch.nn.Parameter(torch.randn(DIM))
        self.frozen = torch.nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.switch = torch.nn.Parameter(torch.randn(DIM))
        self.never = torch.nn.Parameter(torch.randn(5))
        self.odd_steps_only = torch.nn.Parameter(torch.randn(DIM, 1))
        self.register_buffer("offset", torch.randn(DIM))

    def forward(self, x, marked, *, options):
        h = torch.tanh(self.up(self.norm(x)) + self.frozen)
        h = self.down(h) * self.gain + self.offset
        h = h + self.tiny[0] * torch.sin(x) + self.tiny[1] ** 2
        if marked.any():
            h = h + self.sometimes * marked[:, None, None]
        if options["step"] % 2:
            h = h + torch.tanh(x @ self.odd_steps_only)
        h = x + h * torch.sigmoid(self.switch)
        if self.kind == "tuple":
            return h, marked, None
        if self.kind == "dict":
            return {"hidden": h, "count": 3, "nested": [h.mean(), (h.detach(),)]}
        if self.kind == "dataclass":
            return Answer(h, {"mean": h.mean()})
        return h


class TiedBlock(torch.nn.Module):
    """Uses the embedding's weight, which the root uses too, and weights of another block."""

    def __init__(self, embedding, other):
        super().__init__()
        self.table = embedding
        self.up = other.up
        self.back = torch.nn.Linear(WIDTH, DIM)

    def forward(self, x):
        scores = torch.softmax(x @ self.table.T, dim=-1)
        return x + 0.5 * (scores @ self.table) + self.back(torch.relu(self.up(x)))


class OddModel(torch.nn.Module):
    """A language model of a kind: embedding and head tied, blocks used twice, a plain and a 0-dim
    parameter at the root.
    """

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, DIM)
        first = OddBlock("tuple")
        self.layers = torch.nn.ModuleList(
            [first, OddBlock("dict"), OddBlock("dataclass"), OddBlock("tensor")]
        )
        self.tied = torch.nn.ModuleList([TiedBlock(self.embedding.weight, first)])
        self.norm = torch.nn.LayerNorm(DIM)
        self.root_scale = torch.nn.Parameter(torch.ones(3))
        self.root_number = torch.nn.Parameter(torch.tensor(0.3))

    def hidden(self, tokens, step):
        """The last hidden states (rows, length, dim)."""
        options = {"step": step, "label": "passes through"}
        marked = (tokens == MARK).any(1)
        x, seen, nothing = self.layers[0](self.embedding(tokens), marked, options=options)
        assert nothing is None
        out = self.layers[1](x, seen, options=options)
        assert out["count"] == 3
        x = out["hidden"] + 0.1 * out["nested"][0] * 0
        if step % 3 != 2:  # a whole block unused on this step
            answer = self.layers[2](x, marked, options=options)
            x = answer.hidden
        x = self.tied[0](x)
        for _ in range(2):  # called several times
            x = self.layers[3](x, marked, options=options)
        return self.tied[0](x)

    def forward(self, tokens, step):
        # a scale before the norm would have no gradient
        x = self.norm(self.hidden(tokens, step)) * self.root_number
        return F.linear(x, self.embedding.weight)


class Whole(torch.nn.Module):
    """OddModel inside a module that is never sharded and has a parameter of its own, frozen ones
    too.
    """

    def __init__(self):
        super().__init__()
        self.body = OddModel()
        self.plain = torch.nn.Parameter(torch.randn(VOCAB) * 0.1)
        self.plain_odd = torch.nn.Parameter(torch.tensor(0.2))
        self.plain_frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, tokens, step):
        out = self.body(tokens, step) + self.plain
        return out * self.plain_odd if step % 2 else out


def make_whole():
    """Always the same values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Whole()


def shard_whole(zero_level, use_checkpoint):
    """The same model, sharded."""
    model = make_whole()
    for part in (model.body.layers, model.body.tied):
        for index, layer in enumerate(part):
            part[index] = bmt.Block(layer, use_checkpoint=use_checkpoint, zero_level=zero_level)
    model.body = bmt.BMTrainModelWrapper(model.body)
    return model


def batch(step) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (ROWS, LENGTH) of a step, for all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=generator)
    if step % 4:
        tokens[::5, 0] = MARK  # some rows, on some ranks
    return tokens, torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)


def loss_of(model, tokens, targets, step):
    """Mean over tokens."""
    return F.cross_entropy(model(tokens, step).reshape(-1, VOCAB), targets.reshape(-1))


def switch_frozen(model, step):
    """Freeze and unfreeze between steps."""
    for layer in model.body.layers:
        params = layer._parameters
        params["switch"].requires_grad_(not 1 <= step < 3)
        params["frozen"].requires_grad_(step >= 3)
    model.body.norm._parameters["weight"].requires_grad_(step != 2)
    model.plain.requires_grad_(step not in (1, 2))
    model.plain_frozen.requires_grad_(step == 4)


def groups_of(model):
    """Two groups with weight decay and learning rates of their own; frozen parameters included."""
    decayed = [param for name, param in model.named_parameters() if "norm" not in name]
    others = [param for name, param in model.named_parameters() if "norm" in name]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3},
    ]


def train_plain(num_steps, optimizer):
    """The answer: plain PyTorch on the concatenated batch."""
    model = make_whole()
    stepper = optimizer(groups_of(model))
    for step in range(num_steps):
        switch_frozen(model, step)
        stepper.zero_grad()
        loss_of(model, *batch(step), step).backward()
        stepper.step()
    return model


def own(x):
    """This rank's part of what all ranks have."""
    return x.chunk(bmt.world_size())[bmt.rank()]


def managed(optimizer, schedule=None, **options):
    """A manager of these options, with an optimizer."""
    manager = bmt.optim.OptimManager(**options)
    manager.add_optimizer(optimizer, schedule)
    return manager


def cloned_state(model):
    """A copy of the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}
