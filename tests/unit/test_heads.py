"""Heads of compiled blocks, compiled for the CPU: beside plain PyTorch, how much memory they ask
for, and which are left to the compiler.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.test_fusions import passed
from tests.unit.test_linear_cross_entropy import profiled
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmtrain.compile import backend, heads
from bmtrain.loss import linear_cross_entropy

BATCH, LENGTH, DIM, CLASSES, CHUNK_ROWS = 6, 16, 8, 64, 20
# torch's compiler of itself
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
FUNCTIONS = (heads.cross_entropy_of_linear, heads.recomputed_cross_entropy_of_linear)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Five chunks, the last one shorter; programs of other tests do not count as compiled."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", CHUNK_ROWS)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 0)
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


class Head(nn.Module):
    """A norm, a map to logits and their loss: (batch, length, dim), targets (batch, length)."""

    def __init__(self, loss: Loss, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES, bias=bias)
        self.loss = loss

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(self.norm(x)), targets)


def in_fp32(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As programs write it."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def flat(**options: Any) -> Loss:
    """Of logits in their dtype, as the module of torch."""
    loss = nn.CrossEntropyLoss(**options)
    return lambda logits, targets: loss(logits.view(-1, CLASSES), targets.reshape(-1))


def converted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Other words for the same, and a sum."""
    rows = torch.flatten(logits, 0, 1).contiguous().to(torch.float32)
    return F.cross_entropy(rows, targets.view(-1), reduction="sum", label_smoothing=0.1)


class Recomputed(Head):
    """Keeps its arguments only."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, targets, use_reentrant=False)
        return out


class Rewritten:
    """The backend of compiled blocks, which replaces heads on a CPU too, and how many it has."""

    def __init__(self, lower: backend.Lower = backend.inductor) -> None:
        self.lower = backend.AtOnce(backend.Seeded(lower))
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for part in parts:
            heads.rewrite(part, lambda _: True, is_recomputed=part is not graph)
        targets = [node.target for part in parts for node in part.graph.nodes]
        self.count += sum(targets.count(function) for function in FUNCTIONS)
        return self.lower(graph, inputs, **options)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and targets of which some are ignored."""
    torch.manual_seed(1)
    targets = torch.randint(0, CLASSES, (BATCH, LENGTH))
    targets[:, ::5] = -100
    return 2 * torch.randn(BATCH, LENGTH, DIM).to(dtype), targets


def count(
    module: nn.Module, x: torch.Tensor | None = None, targets: torch.Tensor | None = None
) -> int:
    """How many heads are replaced."""
    lower, usual = Rewritten(lambda graph, inputs: graph.forward), inputs()
    run = torch.compile(module, backend=lower, fullgraph=True, dynamic=False)
    run(usual[0] if x is None else x, usual[1] if targets is None else targets).backward()
    return lower.count


def count_equal_to_plain(
    module: nn.Module, dtype: torch.dtype = torch.float32, loss_dtype: torch.dtype | None = None
) -> int:
    """How many heads were replaced.

    Loss and gradients are those of plain PyTorch in fp64, up to four times what plain PyTorch is
    off in the dtype.
    """
    torch.manual_seed(0)
    for param in module.parameters():
        nn.init.normal_(param)
    module.to(dtype)
    (x, targets), lower = inputs(dtype), Rewritten()
    compiled = torch.compile(module, backend=lower, fullgraph=True, dynamic=False)
    exact = copy.deepcopy(module).double()
    want = passed(lambda x: exact(x, targets), exact, x.double())
    got, theirs = (
        passed(lambda x, run=run: run(x, targets), module, x) for run in (compiled, module)
    )
    assert got[0].dtype == theirs[0].dtype == (loss_dtype or dtype)
    for ours, plain, true in zip(got, theirs, want, strict=True):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape
        error, allowed = (float((each.double() - true).norm()) for each in (ours, plain))
        assert error <= 4 * allowed + 2e-6 * float(true.norm())  # sums in another order
    return lower.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Head, Recomputed])
def test_loss_in_fp32(dtype: torch.dtype, bias: bool, kind: type[Head]) -> None:
    assert count_equal_to_plain(kind(in_fp32, bias), dtype, torch.float32) == 1
    assert count_equal_to_plain(kind(converted, bias), dtype, torch.float32) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 3}, {"reduction": "sum"}, {"label_smoothing": 0.2}]
)
def test_options(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The loss has the dtype of the logits where the program does not convert them."""

    def shown(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        known = targets.where(targets >= 0, 3)  # ignored or not, as the options say
        return flat(**options)(logits, known)

    assert count_equal_to_plain(Head(shown), dtype) == 1
    assert count_equal_to_plain(Recomputed(shown), dtype) == 1


def test_class_weights() -> None:
    class Weighted(Head):
        def __init__(self) -> None:
            super().__init__(in_fp32)
            self.register_buffer("classes", torch.linspace(0.0, 2.0, CLASSES).roll(7))

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = self.linear(self.norm(x)).flatten(0, 1)
            return F.cross_entropy(logits, targets.flatten(), self.get_buffer("classes"))

    assert count_equal_to_plain(Weighted()) == 1


@pytest.mark.parametrize("kind", [Head, Recomputed])
def test_frozen_weights(kind: type[Head]) -> None:
    """The gradient of the hidden states alone."""
    module = kind(in_fp32)
    module.linear.requires_grad_(False)
    assert count_equal_to_plain(module) == 1


@pytest.mark.parametrize("kind", [Head, Recomputed])
def test_no_target(kind: type[Head]) -> None:
    """NaN, with gradients of zero, as torch's."""
    module, (x, targets) = kind(in_fp32), inputs()
    targets.fill_(-100)
    run = torch.compile(module, backend=Rewritten(), fullgraph=True, dynamic=False)
    for call in (run, module):
        loss, *grads = passed(lambda x, call=call: call(x, targets), module, x)
        assert loss.isnan() and not any(grad.any() for grad in grads)


def test_backward_twice() -> None:
    module, (x, targets) = Head(in_fp32), inputs()
    run = torch.compile(module, backend=Rewritten(), fullgraph=True, dynamic=False)
    loss, weight = run(x, targets), module.linear.weight
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(2 * first, torch.autograd.grad(2 * loss, weight)[0])


def num_products(events: list[Any]) -> int:
    """Of matrices, by their operators."""
    return sum(event.name in ("aten::mm", "aten::addmm") for event in events)


@pytest.mark.parametrize(("kind", "per_chunk"), [(Head, 3), (Recomputed, 4)])
def test_never_all_logits(kind: type[Head], per_chunk: int) -> None:
    """No memory is asked for that is as large as the logits: a chunk's are the largest.

    A recomputed head computes the logits twice, as the plain one does, and nothing else.
    """
    module, (x, targets) = kind(in_fp32), inputs()
    largest = []
    for lower in (Rewritten(), "eager"):
        run = torch.compile(module, backend=lower, fullgraph=True, dynamic=False)
        run(x, targets).backward()
        with profiled() as events:
            run(x, targets).backward()
        largest.append(max(event.self_cpu_memory_usage for event in events) // 4)
        if isinstance(lower, Rewritten):
            assert num_products(events) == 5 * per_chunk
    # in chunks of equal size
    assert largest == [-(-BATCH * LENGTH // 5) * CLASSES, BATCH * LENGTH * CLASSES]


def also_read(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The logits have a second reader."""
    return in_fp32(logits, targets) + logits.float().logsumexp(-1).mean()


def shifted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Some rows only."""
    return in_fp32(logits[:, :-1], targets[:, 1:])


def scaled(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Other logits than those of the map."""
    return in_fp32(logits / 2, targets)


def rounded(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In fewer bits than the map has."""
    return in_fp32(logits.to(torch.bfloat16), targets)


def transposed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Classes in the second dimension of three."""
    return F.cross_entropy(logits.transpose(1, 2), targets)


def of_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss for each row."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").mean()


def by_shares(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Targets that are probabilities."""
    shares = F.one_hot(targets.clamp(min=0), CLASSES).to(logits.dtype).flatten(0, 1)
    return F.cross_entropy(logits.flatten(0, 1), shares)


@pytest.mark.parametrize(
    "loss", [also_read, shifted, scaled, rounded, transposed, of_rows, by_shares]
)
def test_what_is_another_loss_is_left_to_the_compiler(loss: Loss) -> None:
    assert count(Head(loss)) == 0


class Measured(Head):
    """The loss of logits that have no gradients, or have lost them."""

    def __init__(self, is_lost: bool) -> None:
        super().__init__(in_fp32)
        self.is_lost = is_lost

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        with torch.set_grad_enabled(self.is_lost):
            logits = self.linear(hidden)
        with torch.set_grad_enabled(not self.is_lost):
            rows = logits.flatten(0, 1)
        return (
            F.cross_entropy(rows, targets.flatten())
            + hidden.square().mean()
            + self.linear.weight.square().sum()
        )


def write_item(hidden: torch.Tensor) -> None:
    hidden[0] = 1.0


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "method": lambda hidden: hidden.mul_(2),
    "operator": lambda hidden: operator.iadd(hidden, 1),
    "item": write_item,
    "view": lambda hidden: hidden.flatten().neg_(),
    "function": torch.relu_,
    "argument": lambda hidden: F.relu(hidden, True),
    "operator of torch": lambda hidden: torch.ops.aten.clamp_.default(hidden, -0.5, 0.5),
}


class Written(Head):
    """Hidden states are written before the loss is computed, in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__(in_fp32)
        self.linear.requires_grad_(False)  # else plain backward needs what was written
        self.write = WRITES[way]

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        logits = self.linear(hidden)
        self.write(hidden)
        return in_fp32(logits, targets) + hidden.square().mean()


class Relabelled(Head):
    """Targets are made, and written, between logits and loss; that is no matter."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.linear(self.norm(x))
        known = targets.clone()
        known[known < 3] = -100
        return in_fp32(logits, known)


@pytest.mark.parametrize("is_lost", [False, True])
def test_gradients_are_where_the_program_wants_them(is_lost: bool) -> None:
    assert count_equal_to_plain(Measured(is_lost)) == 0


@pytest.mark.parametrize("way", WRITES)
def test_hidden_states_that_are_written_before_the_loss(way: str) -> None:
    assert count_equal_to_plain(Written(way)) == 0


def test_targets_that_are_written_before_the_loss() -> None:
    assert count_equal_to_plain(Relabelled(in_fp32)) == 1


@pytest.mark.parametrize(("rows", "num_replaced"), [(CHUNK_ROWS, 0), (CHUNK_ROWS + 1, 1)])
def test_one_chunk_is_left_to_the_compiler(rows: int, num_replaced: int) -> None:
    x, targets = (each.flatten(0, 1)[None, :rows] for each in inputs())
    assert count(Head(in_fp32), x, targets) == num_replaced


def test_gradients_larger_than_logits_are_left_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fp32 and beside one row of logits, those of the weight, the bias and hidden states."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 1)
    x, targets = (each.flatten(0, 1)[None] for each in inputs())
    size = {
        rows: 2 * rows * CLASSES - (CLASSES + (DIM + 1) * CLASSES + rows * DIM) for rows in (5, 6)
    }
    assert size[5] < 0 < size[6]
    for rows in size:
        torch._dynamo.reset()
        module = Head(in_fp32, bias=True)
        assert count(module, x[:, :rows], targets[:, :rows]) == (rows == 6)


@pytest.mark.parametrize("kind", [Head, Recomputed])
def test_varying_sizes(kind: type[Head]) -> None:
    """One program for all of them, from five chunks to one."""
    torch.manual_seed(0)
    module, lower = kind(in_fp32), Rewritten()
    run = torch.compile(module, backend=lower, fullgraph=True, dynamic=True)
    counts = []
    for batch, length in ((BATCH, LENGTH), (4, 10), (3, 5), (2, 7)):
        x, targets = (each[:batch, :length].clone() for each in inputs())
        got, want = (
            passed(lambda x, call=call, targets=targets: call(x, targets), module, x)
            for call in (run, module)
        )
        for ours, plain in zip(got, want, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
        counts.append(lower.count)
    assert counts[0] and counts == counts[:1] * 4


def test_autocast_is_left_to_the_compiler() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert count(Head(in_fp32)) == 0


def test_nothing_changes_on_a_cpu() -> None:
    module, (x, targets) = Head(in_fp32), inputs()
    seen: list[Any] = []

    def lower(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        heads.rewrite(graph)
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch.compile(module, backend=lower)(x, targets)
    assert F.cross_entropy in seen and heads.cross_entropy_of_linear not in seen
