"""The modules of random programs, plain, and the ways to shard them."""

import copy
import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bmtrain as bmt

DIM, VOCAB, LENGTH, ROWS = 8, 11, 4, 12


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(DIM, DIM)

    def forward(self, x):
        return torch.tanh(self.a(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 13), nn.Linear(13, DIM, bias=False)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class SplitResidual(bmt.DistributedModule):
    """The same of this library's layers."""

    def __init__(self, dtype):
        super().__init__()
        self.a, self.b = (
            bmt.nn.Linear(DIM, 13, dtype=dtype),
            bmt.nn.Linear(13, DIM, bias=False, dtype=dtype),
        )

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        return self.norm(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x):
        return x + torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x):
        return x + self.rnn(x)[0]


class Tiny(nn.Module):
    """Parameters of no dim and of one and three elements, one frozen, one never used."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.randn(1))
        self.unused, self.frozen = (
            nn.Parameter(torch.randn(3)),
            nn.Parameter(torch.randn(DIM), requires_grad=False),
        )

    def forward(self, x):
        return torch.sin(x * self.gain + self.shift) + self.frozen


class Buffer(nn.Module):
    """A running mean, and a count."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(DIM, DIM)
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.count += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x + torch.tanh(self.a(x - self.mean))


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.dropout = nn.Linear(DIM, DIM), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.a(x)))


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2))


def scaled(x, w):
    """A norm as TorchScript."""
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w


@functools.cache
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have programs compile; many of them script
        return torch.jit.script(scaled)


class Script(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, x):
        return x + scripted()(x, self.w)


class Sometimes(nn.Module):
    """A parameter without a gradient in every other step."""

    step = 0  # of the class: a block hides the modules inside of it

    def __init__(self):
        super().__init__()
        self.a, self.extra = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM))

    def forward(self, x):
        x = torch.tanh(self.a(x))
        return x + self.extra if self.step % 2 else x


class UnusedOnOneRank(nn.Module):
    """Where it is, is told before a run: rank 0 of the ranks leaves its parameters out."""

    is_unused = False

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x if self.is_unused else x + self.a(x) * 0


class Outer(nn.Module):
    """A layer in a layer, with parameters of both."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.out(self.inner(x)))


KINDS = {
    "linear": Linear,
    "residual": Residual,
    "norm": Norm,
    "attention": Attention,
    "conv": Conv,
    "rnn": Recurrent,
    "tiny": Tiny,
    "buffer": Buffer,
    "dropout": Dropout,
    "batchnorm": BatchNorm,
    "script": Script,
    "sometimes": Sometimes,
    "unused_on_one_rank": UnusedOnOneRank,
}


class Net(nn.Module):
    """Embedding, layers in an order that the step chooses, norm, head."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        more: dict[str, Any] = {"padding_idx": 2} if spec["embedding"] == "padding_idx" else {}
        more |= {"sparse": True} if spec["embedding"] == "sparse" else {}
        more |= {"max_norm": 1.0} if spec["embedding"] == "max_norm" else {}
        self.embedding = None if spec["embedding"] == "none" else nn.Embedding(VOCAB, DIM, **more)
        layers = [KINDS[kind]() for kind in spec.layers]
        if spec["wrap"] in ("nested", "manual_outer"):
            layers = [Outer(layer) for layer in layers]
        if spec["tie"] == "module" and len(layers) > 1:
            layers[-1] = layers[0]
        if spec["tie"] == "objects":
            _tie_first_match(layers)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)
        if spec["tie"] == "head" and self.embedding is not None:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.position = (
            None if spec["positions"] == "none" else nn.Parameter(torch.randn(LENGTH, DIM))
        )

    def placed(self, x):
        """Every row, of the shape of the positions, beside them: which rows there are, each rank
        knows by itself.
        """
        if self.position is None:
            return x
        rules = {
            "row_by_row": lambda row, position: row + position,
            "where": lambda row, position: torch.where(row > 0, row, position),
            "gated": lambda row, position: row + position * torch.sigmoid(row.mean()),
        }
        return torch.stack([rules[self.spec["positions"]](row, self.position) for row in x])

    def order(self, step):
        numbers = list(range(len(self.layers)))
        match self.spec["order"]:
            case "reversed":
                return numbers[::-1]
            case "repeated":
                return numbers + numbers[:1]
            case "skipped":
                return numbers[1:] if step == 1 else numbers
            case "changing":
                return numbers if step % 2 else numbers[::-1]
            case _:
                return numbers

    def forward(self, tokens, step):
        dtype = self.scale.dtype
        x = (
            F.one_hot(tokens % DIM, DIM).to(dtype)
            if self.embedding is None
            else self.embedding(tokens)
        )
        x = self.placed(x)
        for number in self.order(step):
            x = self.layers[number](x)
        return self.head(self.norm(x) * self.scale)


def _tie_first_match(layers):
    """The first parameter of a later layer with the shape of one of an earlier layer becomes that
    one.
    """
    for number, late in enumerate(layers):
        for early in layers[:number]:
            for name, param in late.named_parameters():
                for known in early.parameters():
                    if (
                        known is not param
                        and known.shape == param.shape
                        and known.requires_grad == param.requires_grad
                    ):
                        path, _, last = name.rpartition(".")
                        late.get_submodule(path)._parameters[last] = known
                        return


def plain(spec):
    """The model of a program, the same in every process and call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Net(spec).to(getattr(torch, spec["dtype"]))
    if spec["freeze"] == "before":
        model.norm.weight.requires_grad_(False)
        next(iter(model.layers[0].parameters())).requires_grad_(False)
    return model


def sharded(spec):
    """The same, sharded as the program says."""
    model, recompute = plain(spec), spec["recompute"]
    match spec["wrap"]:
        case "wrapper" | "manual_outer":
            return bmt.BMTrainModelWrapper(model, use_checkpoint=recompute)
        case "faulty":  # for the test of the tests
            with torch.no_grad():
                model.scale.mul_(1.2)
            return bmt.BMTrainModelWrapper(model)
        case "distributed":
            for number, layer in enumerate(model.layers):
                if type(layer) is Residual and spec["tie"] not in ("objects", "module"):
                    own = SplitResidual(model.scale.dtype)
                    own.load_state_dict(layer.state_dict())
                    for param, old in zip(own.parameters(), layer.parameters(), strict=True):
                        param.requires_grad_(old.requires_grad)
                    model.layers[number] = bmt.Block(
                        own, use_checkpoint=recompute, zero_level=spec["level"]
                    )
            return bmt.BMTrainModelWrapper(model, use_checkpoint=recompute)
        case "nested":
            done = {}
            for number, layer in enumerate(model.layers):
                assert isinstance(layer, Outer)
                if id(layer) not in done:
                    layer.inner = bmt.Block(layer.inner, use_checkpoint=False)
                    done[id(layer)] = bmt.Block(
                        layer, use_checkpoint=recompute, zero_level=spec["level"]
                    )
                model.layers[number] = done[id(layer)]
            return bmt.BMTrainModelWrapper(model)
        case _:
            known = {}
            for number, layer in enumerate(model.layers):
                if id(layer) not in known:
                    known[id(layer)] = bmt.Block(
                        layer, use_checkpoint=recompute, zero_level=spec["level"]
                    )
                model.layers[number] = known[id(layer)]
            return (
                model
                if spec["wrap"] == "blocks_only"
                else bmt.BMTrainModelWrapper(model, use_checkpoint=recompute)
            )


def copied(model):
    return copy.deepcopy(model)
