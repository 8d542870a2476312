"""FusedCrossEntropy(parallel=True) on a split vocabulary against torch's cross_entropy of the whole
logits in fp64.
"""

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import on_ranks
from tests.tensors import grad_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.kernels import cross_entropy
from bmtrain.loss import FusedCrossEntropy
from bmtrain.nn import VPEmbedding

ROWS, CLASSES = 12, 24
REDUCTIONS = ("mean", "sum", "none")
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float64: 1e-12,
}


def tp_size():
    return int(bmt.config["tp_size"])


def batch(dtype):
    """Whole logits and targets of this tensor-parallel group; some are ignored."""
    generator = torch.Generator().manual_seed(bmt.rank() // tp_size())
    logits = (torch.randn(ROWS, CLASSES, generator=generator) * 3).to(dtype)
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    return logits, target


def own_columns(whole):
    return whole.chunk(tp_size(), 1)[bmt.config["tp_rank"]]


def own_part(logits):
    """This rank's columns, a leaf."""
    return own_columns(logits).clone().requires_grad_()


def seen_by(rank, loss):
    """The gradient that comes in on a rank: another on each."""
    line = torch.linspace(-1.0, 2.0, max(loss.numel(), 2))[: loss.numel()]
    return (line.view(loss.shape) + 0.25 * (rank % tp_size())).to(loss.dtype)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            # what ranks tell each other of their doings is in whole numbers and in doubles
            is_logits = isinstance(result, Tensor) and result.is_floating_point()
            if is_logits and result.dtype != torch.float64:
                self.numel = max(self.numel, result.numel())
        return results


def check(loss, dtype):
    """Value on every rank, and this rank's part of the gradient of all ranks' losses."""
    logits, target = batch(dtype)
    own, plain = own_part(logits), logits.double().requires_grad_()
    with Largest() as made:
        got = loss(own, target)
        got.backward(seen_by(bmt.rank(), got))
    assert dtype == torch.float64 or made.numel == own.numel(), "whole logits"
    weight = None if loss.weight is None else loss.weight.double()
    want = F.cross_entropy(
        plain, target, weight, reduction=loss.reduction, label_smoothing=loss.label_smoothing
    )
    want.backward(torch.stack([seen_by(rank, want) for rank in range(tp_size())]).sum(0))
    assert grad_of(own).dtype == dtype
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        grad_of(own).double(), own_columns(grad_of(plain)), rtol=TOLERANCE[dtype], atol=1e-7
    )


@pytest.mark.parametrize("rows", [True, False])
@on_ranks(4, init={"tp_size": 2})
def test_split_vocabulary(rows):
    """Values, gradients, memory; rows in several chunks, the last one shorter, or in one."""
    with mock.patch.object(cross_entropy, "CHUNK_NUMEL", 5 * CLASSES // 2 + 1 if rows else 2**20):
        for dtype, reduction, weighted, smoothing in itertools.product(
            TOLERANCE, REDUCTIONS, (False, True), (0.0, 0.1, 1.0)
        ):
            weight = torch.linspace(0.0, 2.0, CLASSES).roll(7) if weighted else None
            check(
                FusedCrossEntropy(
                    weight, reduction=reduction, label_smoothing=smoothing, parallel=True
                ),
                dtype,
            )


@on_ranks(2, init={"tp_size": 2})
def test_edges_of_a_split_vocabulary():
    """No valid row, no row; no overflow; classes that are masked on all of one rank's columns; an
    ignored row with an infinite logit.
    """
    for reduction, rows in itertools.product(("mean", "sum"), (ROWS, 0)):
        own = own_part(torch.randn(rows, CLASSES, generator=torch.Generator().manual_seed(1)))
        loss = FusedCrossEntropy(reduction=reduction, label_smoothing=0.1, parallel=True)(
            own, torch.full((rows,), -100)
        )
        loss.backward()
        assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
        assert not grad_of(own).any()
    logits = torch.full((3, CLASSES), -6e4, dtype=torch.float16)
    logits[0, 1], logits[2, 5] = 6e4, torch.inf
    own = own_part(logits)
    loss = FusedCrossEntropy(reduction="none", parallel=True)(own, torch.tensor([1, 1, -100]))
    torch.testing.assert_close(loss, torch.tensor([0.0, torch.tensor(24.0).log().item(), 0.0]))
    loss[:2].sum().backward()
    assert grad_of(own)[:2].isfinite().all()
    logits = torch.full((1, CLASSES), -torch.inf)
    logits[0, 0], logits[0, 2] = 1.0, 2.0
    own = own_part(logits)
    FusedCrossEntropy(parallel=True)(own, torch.tensor([0])).backward()
    share = torch.tensor([1.0, 2.0]).softmax(0) * 2
    expected = torch.zeros(1, CLASSES)
    expected[0, 0], expected[0, 2] = share[0] - 2, share[1]
    torch.testing.assert_close(grad_of(own), own_columns(expected))


@pytest.mark.compiler
@pytest.mark.long
@on_ranks(2, init={"tp_size": 2})
def test_compiles_whole():
    """torch.compile sees the collectives as operations."""
    logits, target = batch(torch.float32)
    loss = FusedCrossEntropy(torch.linspace(0.5, 2.0, CLASSES), label_smoothing=0.1, parallel=True)
    answers = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        own = own_part(logits)
        value = call(own, target)
        value.backward()
        answers.append((value.detach(), own.grad))
    torch.testing.assert_close(answers[1], answers[0])


@on_ranks(4, init={"tp_size": 2})
def test_head_of_a_split_vocabulary():
    """With VPEmbedding as the head: hidden rows of every rank in, the loss of all rows out."""
    first = bmt.rank() // 2 * 2
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4, 6, 5, generator=generator)
    targets = torch.randint(0, CLASSES, (4, 6), generator=generator)
    table = VPEmbedding(CLASSES, 5)
    bmt.init_parameters(table)
    own, plain = (hidden[bmt.rank()].clone().requires_grad_() for _ in range(2))
    logits = table(own, projection=True)
    wanted = targets[first : first + 2].flatten()
    loss = FusedCrossEntropy(parallel=True)(logits, wanted)
    loss.backward()
    rows = torch.cat([plain if r == bmt.rank() else hidden[r] for r in (first, first + 1)])
    want = F.cross_entropy(F.linear(rows, table.state_dict()["weight"]), wanted)
    (want * 2).backward()
    models.assert_same(loss.detach(), want.detach(), "loss")
    models.assert_same(own.grad, plain.grad, "gradient of the hidden states")


@on_ranks(2, init={"tp_size": 2}, timeout=20)
def test_bad_inputs_are_refused_on_every_rank():
    """Also where one rank alone is wrong, or all are right by themselves; the next is right."""
    rank, loss = bmt.rank(), FusedCrossEntropy(parallel=True)
    whole, target = batch(torch.float32)
    logits, short = own_part(whole), torch.ones(CLASSES // 2)
    wrong = [
        ((logits[: ROWS - rank], target[: ROWS - rank]), r"rank 0.*\(12, 12\).*rank 1.*\(11, 12\)"),
        ((logits.bfloat16() if rank else logits, target), r"rank 0.*float32.*rank 1.*bfloat16"),
        ((logits, target.roll(rank)), r"digest of the targets"),
        ((logits, target[:6] if rank else target), r"shape \(6,\).*expected \(12,\)"),
        ((logits, torch.full((ROWS,), CLASSES)), r"got 24, expected 0 to 23"),
        ((logits, torch.full((ROWS,), 99) if rank else target), r"got 99, expected 0 to 23"),
        ((logits, target, short), r"weight: got 12 weights, expected 24"),
    ]
    for inputs, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            FusedCrossEntropy(inputs[2] if inputs[2:] else None, parallel=True)(*inputs[:2])
        check(loss, torch.float32)
