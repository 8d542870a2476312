"""FusedLinearCrossEntropy on gathered weights, in blocks and tied to an embedding, against plain
torch on one process.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.loss import FusedLinearCrossEntropy, linear_cross_entropy

ROWS, DIM, CLASSES, LENGTH = 24, 6, 13, 4
MODES = list(itertools.product((2, 3), (False, True)))  # ZeRO level, recomputation


def batch(micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (ROWS, LENGTH) of all ranks; some are ignored."""
    generator = torch.Generator().manual_seed(micro)
    tokens, targets = torch.randint(0, CLASSES, (2, ROWS, LENGTH), generator=generator).unbind(0)
    targets[::5] = -100
    return tokens, targets


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(bmt.world_size())[bmt.rank()]


class Head(nn.Module):
    """The end of a language model, loss included."""

    def __init__(self, fused: bool, reduction: str) -> None:
        super().__init__()
        self.fused = fused
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)
        self.loss = FusedLinearCrossEntropy(reduction=reduction, label_smoothing=0.1)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, targets = self.norm(hidden).flatten(0, 1), targets.flatten()
        if self.fused:
            return self.loss(hidden, self.linear.weight, targets, self.linear.bias)
        return F.cross_entropy(
            self.linear(hidden), targets, reduction=self.loss.reduction, label_smoothing=0.1
        )


def compare_heads(
    level: int, recompute: bool, *, compiled: bool, frozen: bool, reduction: str
) -> None:
    what = (
        f"ZeRO-{level}, recompute={recompute}, compiled={compiled}, frozen={frozen}, "
        f"{reduction}, {bmt.world_size()} ranks"
    )
    linear_cross_entropy.CHUNK_ROWS, linear_cross_entropy.CHUNK_BYTES = 10, 0
    torch.manual_seed(1)
    plain = Head(False, reduction)
    plain.linear.weight.requires_grad_(not frozen)
    fused = copy.deepcopy(plain)
    fused.fused = True
    block = bmt.Block(fused, use_checkpoint=recompute, zero_level=level)
    if compiled:
        torch._dynamo.reset()
        block.compile(backend="aot_eager", fullgraph=True)
    upstream = torch.linspace(0.5, 2.0, ROWS * LENGTH)
    whole = torch.randn(
        ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()
    part = own(whole.detach()).clone().requires_grad_()
    for _ in range(2):  # accumulated
        want, got = plain(whole, batch()[1]), block(part, own(batch()[1]))
        if reduction == "none":
            want, got = want * upstream, got * own(upstream)
        want.sum().backward()
        got.sum().backward()
    models.assert_same(
        bmt.sum_loss(got.detach().sum()) * bmt.world_size(), want.detach().sum(), what
    )
    assert part.grad is not None and whole.grad is not None
    models.assert_same(part.grad, own(whole.grad), f"{what}: gradient of the hidden states")
    models.assert_same_dicts(models.full_gradients(block), models.plain_gradients(plain), what)


def heads(reduction: str) -> None:
    for (level, recompute), frozen in itertools.product(MODES, (False, True)):
        compare_heads(level, recompute, compiled=False, frozen=frozen, reduction=reduction)


def compiled_heads() -> None:
    for level, recompute, reduction in ((2, False, "sum"), (3, True, "sum"), (3, False, "none")):
        compare_heads(level, recompute, compiled=True, frozen=False, reduction=reduction)


class Tied(nn.Module):
    """A language model of a kind: table, a layer, and a head that is the table again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, DIM)
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])
        self.loss = FusedLinearCrossEntropy()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.loss(x.flatten(0, 1), self.table.weight, targets.flatten())


def tied() -> None:
    """Every rank's mean counts as much; two micro-batches, two steps of an optimizer."""
    linear_cross_entropy.CHUNK_ROWS, linear_cross_entropy.CHUNK_BYTES = 7, 0
    torch.manual_seed(1)
    plain = Tied()
    for level, recompute in itertools.product((2, 3), (False, True)):
        reference, sharded = copy.deepcopy(plain), copy.deepcopy(plain)
        for index, layer in enumerate(sharded.layers):
            sharded.layers[index] = bmt.Block(layer, use_checkpoint=recompute, zero_level=level)
        sharded = bmt.BMTrainModelWrapper(sharded)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(bmt.optim.AdamOptimizer(sharded.parameters(), lr=0.01))
        stepper = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.0)
        for _ in range(2):
            manager.zero_grad()
            stepper.zero_grad()
            for micro in range(2):
                tokens, targets = batch(micro)
                manager.backward(sharded(own(tokens), own(targets)))
                for some_tokens, some_targets in zip(
                    tokens.chunk(bmt.world_size()), targets.chunk(bmt.world_size()), strict=True
                ):
                    logits = reference.table(some_tokens)
                    for layer in reference.layers:
                        logits = logits + torch.tanh(layer(logits))
                    scores = F.linear(logits.flatten(0, 1), reference.table.weight)
                    (F.cross_entropy(scores, some_targets.flatten()) / bmt.world_size()).backward()
            manager.step()
            stepper.step()
        models.assert_same_dicts(
            sharded.state_dict(),
            reference.state_dict(),
            f"ZeRO-{level}, recompute={recompute}",
            1e-5,
        )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_head_in_a_block(reduction: str, world_size: int) -> None:
    """Values, gradients, accumulation; the weight trained and frozen."""
    run_ranks(heads, world_size, reduction)


def test_head_in_a_compiled_block() -> None:
    """The same as one graph, with the recomputation inside of it too."""
    run_ranks(compiled_heads, 2, timeout=60)


@pytest.mark.parametrize("world_size", [1, 3])
def test_tied_to_the_embedding(world_size: int) -> None:
    """The table's two gradients come together."""
    run_ranks(tied, world_size)
