"""FusedLinearCrossEntropy on gathered weights, in blocks and tied to an embedding, against plain
torch on one process.
"""

import contextlib
import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.models import own
from tests.ranks.passes import gradients
from tests.ranks.runner import on_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.loss import FusedLinearCrossEntropy, linear_cross_entropy

ROWS, DIM, CLASSES, LENGTH = 24, 6, 13, 4
MODES = list(itertools.product((2, 3), (False, True)))  # ZeRO level, recomputation


def batch(micro=0):
    """Tokens and targets (ROWS, LENGTH) of all ranks; some are ignored."""
    generator = torch.Generator().manual_seed(micro)
    tokens, targets = torch.randint(0, CLASSES, (2, ROWS, LENGTH), generator=generator).unbind(0)
    targets[::5] = -100
    return tokens, targets


@contextlib.contextmanager
def chunks(rows):
    with mock.patch.multiple(linear_cross_entropy, CHUNK_ROWS=rows, CHUNK_BYTES=0):
        yield


class Head(nn.Module):
    """The end of a language model, loss included."""

    def __init__(self, reduction):
        super().__init__()
        self.fused = False
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)
        self.loss = FusedLinearCrossEntropy(reduction=reduction, label_smoothing=0.1)

    def forward(self, hidden, targets):
        hidden, targets = self.norm(hidden).flatten(0, 1), targets.flatten()
        if self.fused:
            return self.loss(hidden, self.linear.weight, targets, self.linear.bias)
        return F.cross_entropy(
            self.linear(hidden), targets, reduction=self.loss.reduction, label_smoothing=0.1
        )


def compare_heads(level, recompute, reduction, *, compiled=False):
    what = f"ZeRO-{level}, recompute={recompute}, {reduction}, compiled={compiled}"
    torch.manual_seed(1)
    plain = Head(reduction)
    plain.linear.weight.requires_grad_((level, reduction) not in ((2, "sum"), (3, "none")))
    fused = copy.deepcopy(plain)
    fused.fused = True
    block = bmt.Block(fused, use_checkpoint=recompute, zero_level=level)
    if compiled:
        block.compile(backend="aot_eager", fullgraph=True)
    upstream = torch.linspace(0.5, 2.0, ROWS * LENGTH)
    whole = torch.randn(ROWS, LENGTH, DIM, requires_grad=True)
    part = own(whole.detach()).clone().requires_grad_()
    for _ in range(2):  # accumulated
        want, got = plain(whole, batch()[1]), block(part, own(batch()[1]))
        if reduction == "none":
            want, got = want * upstream, got * own(upstream)
        want.sum().backward()
        got.sum().backward()
    total = bmt.sum_loss(got.detach().sum()) * bmt.world_size()
    models.assert_same(total, want.detach().sum(), what)
    models.assert_same(part.grad, own(grad_of(whole)), f"{what}: gradient of the hidden states")
    models.assert_same_dicts(gradients(block), models.plain_gradients(plain), what)


@on_ranks(2)
def test_head_in_a_block():
    """Values, gradients, accumulation; the weight trained and frozen."""
    with chunks(10):
        for mode, reduction in itertools.product(MODES, ("sum", "none")):
            compare_heads(*mode, reduction)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "mode", [(3, True, "sum"), pytest.param((2, False, "none"), marks=pytest.mark.long)]
)
@on_ranks(2)
def test_head_in_a_compiled_block(mode):
    """The same as one graph, with the recomputation inside of it too."""
    with chunks(10):
        compare_heads(*mode, compiled=True)


class Tied(nn.Module):
    """A language model of a kind: table, a layer, and a head that is the table again."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, DIM), nn.Linear(DIM, DIM)
        self.fused = None

    def forward(self, tokens, targets):
        x, targets = torch.tanh(self.layer(self.table(tokens))).flatten(0, 1), targets.flatten()
        if self.fused is not None:
            return self.fused(x, self.table.weight, targets)
        return F.cross_entropy(F.linear(x, self.table.weight), targets)


@on_ranks(3)
def test_tied_to_the_embedding():
    """The table's two gradients come together; every rank's mean counts as much; two
    micro-batches.
    """
    torch.manual_seed(1)
    plain = Tied()
    with chunks(7):
        for level, recompute in MODES:
            sharded = copy.deepcopy(plain)
            sharded.fused = FusedLinearCrossEntropy()
            sharded.layer = bmt.Block(sharded.layer, use_checkpoint=recompute, zero_level=level)  # type: ignore[assignment]
            sharded = bmt.BMTrainModelWrapper(sharded)
            plain.zero_grad()
            for micro in range(2):
                (sharded(*map(own, batch(micro))) / 3).backward()
                for rows in zip(*(x.chunk(3) for x in batch(micro)), strict=True):
                    (plain(*rows) / 3).backward()
            models.assert_same_dicts(
                gradients(sharded), models.plain_gradients(plain), f"ZeRO-{level}, {recompute}"
            )
