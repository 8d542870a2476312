"""FusedCrossEntropy(parallel=True) on a split vocabulary against torch's cross_entropy of the whole
logits in fp64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.kernels import cross_entropy
from bmtrain.loss import FusedCrossEntropy
from bmtrain.nn import VPEmbedding

ROWS, CLASSES = 12, 24
MESHES = [(1, 1), (2, 2), (4, 4), (4, 2)]  # world size, tp_size
REDUCTIONS = ("mean", "sum", "none")
GRADIENT_TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float64: 1e-12,
}


def tp_size() -> int:
    return int(bmt.config["tp_size"])


def group() -> int:
    return bmt.rank() // tp_size()


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole logits and targets of this tensor-parallel group; some are ignored."""
    generator = torch.Generator().manual_seed(group())
    logits = (torch.randn(ROWS, CLASSES, generator=generator) * 3).to(dtype)
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    return logits, target


def own_part(logits: torch.Tensor) -> torch.Tensor:
    """This rank's columns, a leaf."""
    return logits.chunk(tp_size(), 1)[bmt.config["tp_rank"]].clone().requires_grad_()


def seen_by(rank: int, loss: torch.Tensor) -> torch.Tensor:
    """The gradient that comes in on a rank: another on each."""
    return torch.linspace(-1.0, 2.0, max(loss.numel(), 2))[: loss.numel()].view(
        loss.shape
    ) + 0.25 * (rank % tp_size())


def check(loss: FusedCrossEntropy, logits: torch.Tensor, target: torch.Tensor, what: str) -> None:
    """Value on every rank, and this rank's part of the gradient of all ranks' losses."""
    own = own_part(logits)
    got = loss(own, target)
    got.backward(seen_by(bmt.rank(), got).to(got.dtype))
    plain = logits.double().requires_grad_()
    weight = None if loss.weight is None else loss.weight.double()
    want = F.cross_entropy(
        plain, target, weight, reduction=loss.reduction, label_smoothing=loss.label_smoothing
    )
    want.backward(torch.stack([seen_by(rank, want) for rank in range(tp_size())]).sum(0).double())
    assert plain.grad is not None and own.grad is not None and own.grad.dtype == logits.dtype
    assert got.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        got.double(), want, rtol=2e-6, atol=2e-6, msg=lambda text: f"{what}: {text}"
    )
    grad = plain.grad.chunk(tp_size(), 1)[bmt.config["tp_rank"]]
    tolerance = GRADIENT_TOLERANCE[logits.dtype]
    torch.testing.assert_close(
        own.grad.double(), grad, rtol=tolerance, atol=1e-7, msg=lambda text: f"{what}: {text}"
    )


def against_torch() -> None:
    # several chunks of rows, the last one shorter
    cross_entropy.CHUNK_NUMEL = 5 * CLASSES // tp_size() + 1
    for dtype, reduction, weighted, smoothing in itertools.product(
        GRADIENT_TOLERANCE, REDUCTIONS, (False, True), (0.0, 0.1, 1.0)
    ):
        weight = torch.linspace(0.0, 2.0, CLASSES).roll(7) if weighted else None
        loss = FusedCrossEntropy(
            weight, reduction=reduction, label_smoothing=smoothing, parallel=True
        )
        check(loss, *batch(dtype), f"{dtype} {loss} weighted {weighted}")


def nothing_valid() -> None:
    for reduction, rows in itertools.product(("mean", "sum"), (ROWS, 0)):
        own = own_part(torch.randn(rows, CLASSES, generator=torch.Generator().manual_seed(1)))
        loss = FusedCrossEntropy(reduction=reduction, label_smoothing=0.1, parallel=True)(
            own, torch.full((rows,), -100)
        )
        loss.backward()
        assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
        assert own.grad is not None and not own.grad.any()


def extremes() -> None:
    """No overflow; classes that are masked on all of one rank's columns; an ignored row with an
    infinite logit.
    """
    logits = torch.full((3, CLASSES), -6e4, dtype=torch.float16)
    logits[0, 1], logits[2, 5] = 6e4, torch.inf
    own = own_part(logits)
    loss = FusedCrossEntropy(reduction="none", parallel=True)(own, torch.tensor([1, 1, -100]))
    torch.testing.assert_close(
        loss, torch.tensor([0.0, torch.tensor(float(CLASSES)).log().item(), 0.0])
    )
    loss[:2].sum().backward()
    assert own.grad is not None and own.grad[:2].isfinite().all()
    logits = torch.full((1, CLASSES), -torch.inf)
    logits[0, 0], logits[0, 2] = 1.0, 2.0
    own = own_part(logits)
    FusedCrossEntropy(parallel=True)(own, torch.tensor([0])).backward()
    share = torch.tensor([1.0, 2.0]).softmax(0) * tp_size()
    expected = torch.zeros(1, CLASSES)
    expected[0, 0], expected[0, 2] = share[0] - tp_size(), share[1]
    torch.testing.assert_close(own.grad, expected.chunk(tp_size(), 1)[bmt.config["tp_rank"]])


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            # what ranks tell each other of their doings
            if isinstance(result, torch.Tensor) and result.dtype != torch.float64:
                self.numel = max(self.numel, result.numel())
        return results


def no_whole_logits() -> None:
    logits, target = batch(torch.bfloat16)
    own = own_part(logits)
    with Largest() as made:
        FusedCrossEntropy(label_smoothing=0.1, parallel=True)(own, target).backward()
    assert made.numel == own.numel()


def compiled() -> None:
    """One graph, the same numbers."""
    logits, target = batch(torch.float32)
    loss = FusedCrossEntropy(torch.linspace(0.5, 2.0, CLASSES), label_smoothing=0.1, parallel=True)
    answers = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        own = own_part(logits)
        value = call(own, target)
        value.backward()
        answers.append((value.detach(), own.grad))
    torch.testing.assert_close(answers[1], answers[0])


def head() -> None:
    """With VPEmbedding as the head: hidden rows of every rank in, the loss of all rows out."""
    hidden = [
        torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(rank))
        for rank in range(bmt.world_size())
    ]
    targets = [
        torch.randint(0, CLASSES, (3, 2), generator=torch.Generator().manual_seed(9 + r))
        for r in range(bmt.world_size())
    ]
    table = VPEmbedding(CLASSES, 5)
    bmt.init_parameters(table)
    ranks = range(group() * tp_size(), (group() + 1) * tp_size())
    own = hidden[bmt.rank()].clone().requires_grad_()
    logits = table(own, projection=True)
    loss = FusedCrossEntropy(parallel=True)(
        logits.flatten(0, 1), torch.cat([targets[r] for r in ranks]).flatten()
    )
    loss.backward()
    plain = hidden[bmt.rank()].clone().requires_grad_()
    rows = torch.cat([plain if r == bmt.rank() else hidden[r] for r in ranks])
    scores = F.linear(rows, table.state_dict()["weight"])
    want = F.cross_entropy(scores.flatten(0, 1), torch.cat([targets[r] for r in ranks]).flatten())
    (want * tp_size()).backward()
    assert own.grad is not None and plain.grad is not None
    models.assert_same(loss.detach(), want.detach(), "loss")
    models.assert_same(own.grad, plain.grad, "gradient of the hidden states")


@pytest.mark.parametrize(("world_size", "tp_size"), MESHES)
@pytest.mark.parametrize("program", [against_torch, nothing_valid, extremes, no_whole_logits, head])
def test_split_vocabulary(program, world_size: int, tp_size: int) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Values, gradients, edges, memory."""
    run_ranks(program, world_size, init={"tp_size": tp_size})


def test_compiles_whole() -> None:
    """torch.compile sees the collectives as operations."""
    run_ranks(compiled, 2, init={"tp_size": 2})


def bad_inputs() -> None:
    rank = bmt.rank()
    loss = FusedCrossEntropy(parallel=True)
    logits, target = own_part(batch(torch.float32)[0]), batch(torch.float32)[1]
    with pytest.raises(ConfigurationError, match=r"rank 0.*\(12, 12\).*rank 1.*\(11, 12\)"):
        loss(logits[: ROWS - rank], target[: ROWS - rank])
    with pytest.raises(ConfigurationError, match=r"rank 0.*float32.*rank 1.*bfloat16"):
        loss(logits.bfloat16() if rank else logits, target)
    with pytest.raises(ConfigurationError, match=r"digest of the targets"):
        loss(logits, target.roll(rank))
    with pytest.raises(ConfigurationError, match=r"target: got shape \(6,\).*expected \(12,\)"):
        loss(logits, target[:6] if rank else target)
    with pytest.raises(ConfigurationError, match=r"got 24, expected 0 to 23"):
        loss(logits, torch.full((ROWS,), CLASSES))
    with pytest.raises(ConfigurationError, match=r"got 99, expected 0 to 23"):
        loss(logits, torch.full((ROWS,), 99) if rank else target)
    with pytest.raises(ConfigurationError, match=r"weight: got 12 weights, expected 24"):
        FusedCrossEntropy(torch.ones(CLASSES // 2), parallel=True)(logits, target)
    loss(logits, target)  # the ranks are still together


def test_bad_inputs_are_refused_on_every_rank() -> None:
    """Also where one rank alone is wrong, or all are right by themselves."""
    run_ranks(bad_inputs, 2, init={"tp_size": 2}, timeout=20)
