"""Delta tuning as OpenDelta and OpenPrompt do it, with modules put in before and after the model is
sharded.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ParameterError
from bmtrain.optim import AdamOptimizer, OptimManager

VOCAB, DIM, LENGTH, ROWS = 17, 8, 5, 6


class Mixer(nn.Module):
    """Stands for an attention: every position sees the mean of those before."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(DIM, DIM)

    def forward(self, x):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.project(x).cumsum(1) / counts


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mixer = Mixer()
        self.up, self.down = nn.Linear(DIM, 13), nn.Linear(13, DIM)

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Adapter(nn.Module):
    """Houlsby's bottleneck."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 3), nn.Linear(3, DIM)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


class Parallel(nn.Module):
    """A low-rank update beside a layer, which becomes its child."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.3)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class SoftPrompt(nn.Module):
    """An embedding that puts trained rows in place of the first ones."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.prompt = nn.Parameter(torch.randn(2, DIM))

    def forward(self, tokens):
        return torch.cat(
            [self.prompt.expand(len(tokens), -1, -1), self.embedding(tokens[:, 2:])], 1
        )


class Generator(nn.Module):
    """Makes the prefixes of all layers from few parameters, and a frozen tensor of integers."""

    def __init__(self, num_layers):
        super().__init__()
        self.places = nn.Parameter(torch.arange(2), requires_grad=False)
        self.embedding = nn.Embedding(2, 3)
        self.project = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_layers * DIM))

    def forward(self):
        return self.project(self.embedding(self.places)).mean(0).view(-1, DIM)


def after(module):
    """OpenDelta's way: a new child, and a function in the place of `forward` that calls the old one
    and the child.
    """
    module.adapter = Adapter()
    forward = module.forward
    module.forward = lambda *args, **kwargs: module.adapter(forward(*args, **kwargs))


def adapters(model):
    """Behind a child of each layer, behind each layer, and behind a module outside of the list."""
    for layer in model.layers:
        after(layer.mixer)
    after(model.layers[1])
    after(model.norm)


def children(model):
    """Replaced in some layers, at every depth, and outside."""
    model.layers[0].up = Parallel(model.layers[0].up)
    model.layers[2].mixer.project = Parallel(model.layers[2].mixer.project)
    model.head = Parallel(model.head)
    model.embedding = SoftPrompt(model.embedding)


def prefixes(model):
    """Bare parameters, used by a pre-hook."""
    for layer in model.layers:
        layer.mixer.prefix = nn.Parameter(torch.randn(1, 1, DIM))
        layer.mixer.register_forward_pre_hook(lambda module, args: (args[0] + module.prefix,))
    model.layers[0].gain = nn.Parameter(torch.ones(DIM))
    model.layers[0].register_forward_hook(lambda module, args, out: out * module.gain)


def generated(model):
    """The first layer's mixer makes the prefixes of all, which read them as attributes: tensors go
    from block to block beside their arguments and results.
    """
    mixers = [layer.mixer for layer in model.layers]
    mixers[0].generator = Generator(len(mixers))

    def make_all(module, args):
        for mixer, prefix in zip(mixers, module.generator(), strict=True):
            mixer.made = prefix

    mixers[0].register_forward_pre_hook(make_all)
    for mixer in mixers:
        forward = mixer.forward
        mixer.forward = lambda x, mixer=mixer, forward=forward: forward(x + mixer.made)


# Put in one after the other.
DELTAS = [[adapters, children, prefixes], [generated, children]]


def make(*deltas, wrap=False):
    """The same values with deltas put in before or after sharding; only the deltas train."""
    torch.manual_seed(5)
    model = Model().requires_grad_(False)
    if wrap:
        model = bmt.BMTrainModelWrapper(model)
    for delta in deltas:
        delta(model)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, VOCAB, (2, ROWS, LENGTH), generator=generator)
    return tokens, targets


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


SETTINGS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


class Pair:
    """A plain model and its sharded twin, each with an optimizer of what is trainable."""

    def __init__(self, plain, model, what):
        self.plain, self.model, self.what = plain, model, f"{what}, {bmt.world_size()} ranks"
        self.stepper = torch.optim.AdamW(trainable(plain), **SETTINGS)
        self.optimizer = AdamOptimizer(trainable(model), **SETTINGS)
        self.manager = OptimManager()
        self.manager.add_optimizer(self.optimizer)

    def train(self):
        """Three steps: losses, gradients, parameters and names stay equal."""
        names = [[name for name, _ in each.named_parameters()] for each in (self.model, self.plain)]
        assert names[0] == names[1], self.what
        for step in range(3):
            tokens, targets = batch(step)
            self.stepper.zero_grad()
            self.manager.zero_grad()
            want, got = (
                loss_of(self.plain, tokens, targets),
                loss_of(self.model, models.own(tokens), models.own(targets)),
            )
            here = f"{self.what}, step {step}"
            models.assert_same(bmt.sum_loss(got.detach()), want.detach(), f"{here}: loss")
            want.backward()
            self.manager.backward(got)
            models.assert_same_gradients(self.model, self.plain, here)
            self.stepper.step()
            self.manager.step()
        states = self.model.state_dict(), self.plain.state_dict()
        models.assert_same_dicts(*states, f"{self.what}: parameters")
        assert list(states[0]) == list(states[1]), self.what


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def all_sharded(model):
    """Whether every parameter is, but for frozen integers, of which each rank has a copy."""
    return all(
        isinstance(param, bmt.DistributedParameter) == param.is_floating_point()
        for param in model.parameters()
    )


def before_and_after_sharding():
    for deltas in DELTAS:
        names = [delta.__name__ for delta in deltas]
        model = bmt.BMTrainModelWrapper(make(*deltas))
        assert all_sharded(model)
        Pair(make(*deltas), model, f"before: {names}").train()
        model = make(*deltas, wrap=True)
        known = {id(x) for x in model.parameters() if isinstance(x, bmt.DistributedParameter)}
        assert not all_sharded(model)
        assert bmt.BMTrainModelWrapper(model) is model and all_sharded(model)
        left = known - {id(param) for param in model.parameters()}
        assert not left, "parameters that were sharded before were replaced"
        Pair(make(*deltas), model, f"after: {names}").train()


def again_and_again():
    """Deltas put in while training goes on: what an optimizer has of the others goes on too."""
    pair = Pair(make(adapters), bmt.BMTrainModelWrapper(make(adapters, wrap=True)), "again")
    pair.train()
    known = [{id(param) for param in trainable(module)} for module in (pair.plain, pair.model)]
    for module in (pair.plain, pair.model):
        torch.manual_seed(6)
        children(module)
    assert bmt.BMTrainModelWrapper(pair.model) is pair.model and all_sharded(pair.model)
    for module, optimizer, ids in zip(
        (pair.plain, pair.model), (pair.stepper, pair.optimizer), known, strict=True
    ):
        optimizer.add_param_group(
            {"params": [param for param in trainable(module) if id(param) not in ids]}
        )
    pair.train()
    params = list(pair.model.parameters())
    storages = [param.storage_of for param in params]
    assert bmt.BMTrainModelWrapper(pair.model) is pair.model, "nothing new, nothing changes"
    assert all(a is b for a, b in zip(pair.model.parameters(), params, strict=True))
    assert [param.storage_of for param in params] == storages
    pair.train()


def forgotten():
    """Put into a block and not sharded: an error.

    Elsewhere: kept equal by whatever optimizer of ours takes them.
    """
    model = make(adapters, wrap=True)
    with pytest.raises(
        ParameterError,
        match=r"'(mixer\.)?adapter\.down\.weight'.*not sharded.*BMTrainModelWrapper\(model\) "
        r"again",
    ):
        loss_of(model, *batch(0))
    with torch.no_grad(), pytest.raises(ParameterError, match=r"adapter.*not sharded"):
        model(batch(0)[0])
    for layer in range(3):
        bmt.BMTrainModelWrapper(model.layers[layer])
    assert not all_sharded(model)
    with torch.no_grad():
        for param in model.norm.adapter.parameters():
            param.add_(bmt.rank())  # every rank its own values: rank 0's count
    Pair(make(adapters), model, "outside of blocks, not sharded").train()
    for param in model.norm.adapter.parameters():
        values = bmt.gather_result(param.detach()[None])
        assert (values == values[0]).all(), "replicas have parted"


class Lazy(nn.Module):
    """Makes its parameters in its first forward pass, as OpenDelta does, which knows no sizes.

    With `shards_itself` it shards them there, inside of a running block.
    """

    def __init__(self, shards_itself):
        super().__init__()
        self.shards_itself, self.is_made = shards_itself, False

    def forward(self, x):
        if not self.is_made:
            dim = x.shape[-1]
            self.net = nn.Sequential(nn.Linear(dim, 3), nn.Tanh(), nn.Linear(3, dim))
            self.is_made = True
            if self.shards_itself:
                self.net = bmt.BMTrainModelWrapper(self.net)
        return x + self.net(x)


def made_in_forward():
    """Deltas that one run of the sharded model has made, sharded there or by wrapping again."""

    def make_lazy(wrap, shards_itself):
        model = make(wrap=wrap)
        for layer in [model.norm, *(layer.mixer for layer in model.layers)]:
            layer.lazy = Lazy(wrap and shards_itself)
            forward = layer.forward
            layer.forward = lambda x, layer=layer, forward=forward: layer.lazy(forward(x))
        loss_of(model, *batch(9))
        return model

    for shards_itself in (False, True):
        model = make_lazy(True, shards_itself)
        assert all_sharded(model) == shards_itself
        if not shards_itself:
            model = bmt.BMTrainModelWrapper(model)
        Pair(make_lazy(False, False), model, f"made in forward, {shards_itself}").train()


class Speaking:
    """What transformers' GenerationMixin is to a model: `generate`, which can keep ranks in step.

    A row ends where its length is a multiple of 7.
    """

    def generate(self, tokens, synced_gpus=None):
        while True:
            is_done = tokens.shape[1] % 7 == 0
            if synced_gpus:
                if bmt.gather_result(torch.tensor([is_done])).all():
                    return tokens
            elif is_done:
                return tokens
            logits = self(tokens)  # type: ignore[operator]
            if not is_done:
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)


class Prompted(nn.Module, Speaking):
    """OpenPrompt's way: `generate` takes a batch, and hands keywords on, for one row at a time."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, tokens):
        return self.model(tokens)

    def generate(self, batch, **settings):  # type: ignore[override]
        return [super(Prompted, self).generate(row, **settings) for row in batch]


class Silent(Prompted):
    """Takes no keywords: there is nothing to hand on."""

    def generate(self, batch):  # type: ignore[override]
        return [self(row) for row in batch]


def handed_on():
    """Rows of different lengths on the ranks, which make different numbers of words."""
    rows = [batch(0)[0][:1, :length] for length in (2, 3, 5, 5, 4, 2)]
    with torch.no_grad():
        for kind in (Prompted, Silent):
            torch.manual_seed(5)
            plain = kind()
            model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
            own = slice(bmt.rank(), None, bmt.world_size())
            torch.testing.assert_close(model.generate(rows[own]), plain.generate(rows)[own])


PROGRAMS = [
    (before_and_after_sharding, 3),
    (again_and_again, 2),
    (forgotten, 3),
    (made_in_forward, 2),
    (handed_on, 3),
]


@pytest.mark.parametrize(("program", "world_size"), PROGRAMS)
def test_program(program, world_size):
    """What the function of this name states, against the same in one process of plain PyTorch."""
    run_ranks(program, world_size)
