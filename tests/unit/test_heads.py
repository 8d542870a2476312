"""Heads of compiled blocks, on a CPU: beside plain PyTorch, how much memory they ask for, and which are
left to the compiler.
"""

import operator

import pytest
import torch
import torch.nn.functional as F
from tests.unit.test_fusions import check_against_plain, compiled_anew, passed, without_code
from tests.unit.test_linear_cross_entropy import in_chunks, num_products, profiled
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmtrain.compile import backend, heads
from bmtrain.loss import linear_cross_entropy

BATCH, LENGTH, DIM, CLASSES, CHUNK_ROWS = 6, 16, 8, 64, 20
# torch's compiler of itself
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Five chunks, the last one shorter; programs of other tests do not count as compiled."""
    in_chunks(monkeypatch, CHUNK_ROWS)
    with compiled_anew():
        yield


def in_fp32(logits, targets):
    """As programs write it."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Head(nn.Module):
    """A norm, a map to logits and their loss: (batch, length, dim), targets (batch, length)."""

    def __init__(self, loss=in_fp32, bias=False):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES, bias=bias)
        self.loss = loss

    def forward(self, x, targets):
        return self.loss(self.linear(self.norm(x)), targets)


class Recomputed(Head):
    """Keeps its arguments only."""

    def forward(self, x, targets):
        return checkpoint(super().forward, x, targets, use_reentrant=False)


both_kinds = pytest.mark.parametrize("kind", [Head, Recomputed])


class Rewritten:
    """The backend of compiled blocks, which replaces heads on a CPU too, and how many it has."""

    def __init__(self, lower=without_code):
        self.lower = backend.AtOnce(lower)
        self.count = 0

    def __call__(self, graph, inputs, **options):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for part in parts:
            heads.rewrite(part, lambda _: True, is_recomputed=part is not graph)
        targets = [node.target for part in parts for node in part.graph.nodes]
        self.count += targets.count(heads.cross_entropy_of_linear)
        return self.lower(graph, inputs, **options)


def compiled(module, lower, dynamic=False):
    return torch.compile(module, backend=lower, fullgraph=True, dynamic=dynamic)


def inputs(dtype=torch.float32):
    """Hidden states, and targets of which some are ignored."""
    torch.manual_seed(1)
    targets = torch.randint(0, CLASSES, (BATCH, LENGTH))
    targets[:, ::5] = -100
    return 2 * torch.randn(BATCH, LENGTH, DIM).to(dtype), targets


def count(module, rows=None):
    """How many heads are replaced; of some rows only, as one sequence, or of all."""
    lower, (x, targets) = Rewritten(lambda graph, inputs: graph.forward), inputs()
    if rows is not None:
        x, targets = (each.flatten(0, 1)[None, rows] for each in (x, targets))
    compiled(module, lower)(x, targets).backward()
    return lower.count


def count_equal_to_plain(module, dtype=torch.float32, loss_dtype=None, lower=without_code):
    """How many heads were replaced, where loss and gradients are those of plain PyTorch."""
    torch.manual_seed(0)
    for param in module.parameters():
        nn.init.normal_(param)
    module.to(dtype)
    (x, targets), to = inputs(dtype), Rewritten(lower)
    check_against_plain(compiled(module, to), module, x, targets, dtype=loss_dtype)
    return to.count


def converted(logits, targets):
    """Other words for the same, and a sum."""
    rows = torch.flatten(logits, 0, 1).contiguous().to(torch.float32)
    return F.cross_entropy(rows, targets.view(-1), reduction="sum", label_smoothing=0.1)


@both_kinds
def test_loss_in_fp32(kind):
    for dtype, bias, loss in (
        (torch.bfloat16, True, in_fp32),
        (torch.float16, False, converted),
        (torch.float32, True, converted),
    ):
        torch._dynamo.reset()
        assert count_equal_to_plain(kind(loss, bias), dtype, torch.float32) == 1


@pytest.mark.long
@pytest.mark.compiler
@both_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code(kind, dtype):
    lower = backend.inductor
    for bias, loss in ((False, in_fp32), (True, converted)):
        assert count_equal_to_plain(kind(loss, bias), dtype, torch.float32, lower) == 1


OPTIONS = [
    (torch.bfloat16, {}),
    (torch.float32, {"ignore_index": 3}),
    (torch.bfloat16, {"reduction": "sum"}),
    (torch.float32, {"label_smoothing": 0.2, "weight": torch.linspace(0.0, 2.0, CLASSES)}),
]


@both_kinds
@pytest.mark.parametrize(("dtype", "options"), OPTIONS)
def test_options(kind, dtype, options):
    """The loss has the dtype of the logits where the program does not convert them."""

    def shown(logits, targets):
        known = targets.where(targets >= 0, 3)  # ignored or not, as the options say
        given = {name: x.to(logits.dtype) if name == "weight" else x for name, x in options.items()}
        return F.cross_entropy(logits.view(-1, CLASSES), known.reshape(-1), **given)

    assert count_equal_to_plain(kind(shown), dtype) == 1


@both_kinds
def test_frozen_weights_and_no_target(kind):
    """The gradient of the hidden states alone; without a target the loss is NaN, with gradients of
    zero, as torch's.
    """
    module = kind()
    module.linear.requires_grad_(False)
    assert count_equal_to_plain(module) == 1
    module, (x, targets) = kind(), inputs()
    targets.fill_(-100)
    for call in (compiled(module, Rewritten()), module):
        loss, *grads = passed(call, module, x, targets)
        assert loss.isnan() and not any(grad.any() for grad in grads)


def test_backward_twice():
    module, (x, targets) = Head(), inputs()
    loss, weight = compiled(module, Rewritten())(x, targets), module.linear.weight
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(2 * first, torch.autograd.grad(2 * loss, weight)[0])


@pytest.mark.parametrize(("kind", "per_chunk"), [(Head, 3), (Recomputed, 4)])
def test_never_all_logits(kind, per_chunk):
    """No memory is asked for that is as large as the logits: a chunk's are the largest.

    A recomputed head computes the logits twice, as the plain one does, and nothing else.
    """
    module, (x, targets) = kind(), inputs()
    largest = []
    for lower in (Rewritten(), "eager"):
        run = compiled(module, lower)
        run(x, targets).backward()
        with profiled() as events:
            run(x, targets).backward()
        largest.append(max(event.self_cpu_memory_usage for event in events) // 4)
        if isinstance(lower, Rewritten):
            assert num_products(events) == 5 * per_chunk
    # in chunks of equal size
    assert largest == [-(-BATCH * LENGTH // 5) * CLASSES, BATCH * LENGTH * CLASSES]


# Logits that have another reader, some rows, other logits than the map's, fewer bits, classes in
# another dimension, a loss for each row, and targets that are probabilities.
OTHER_LOSSES = """
in_fp32(logits, targets) + logits.float().logsumexp(-1).mean()
in_fp32(logits[:, :-1], targets[:, 1:])
in_fp32(logits / 2, targets)
in_fp32(logits.to(torch.bfloat16), targets)
F.cross_entropy(logits.transpose(1, 2), targets)
F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").mean()
F.cross_entropy(logits.flatten(0, 1), F.one_hot(targets.relu(), CLASSES).to(logits.dtype).flatten(0, 1))
"""


@pytest.mark.parametrize("loss", OTHER_LOSSES.strip().splitlines())
def test_what_is_another_loss_is_left_to_the_compiler(loss):
    assert count(Head(eval(f"lambda logits, targets: {loss}", globals()))) == 0


class Measured(Head):
    """The loss of logits that have no gradients, or have lost them."""

    def __init__(self, is_lost):
        super().__init__()
        self.is_lost = is_lost

    def forward(self, x, targets):
        hidden = self.norm(x)
        with torch.set_grad_enabled(self.is_lost):
            logits = self.linear(hidden)
        with torch.set_grad_enabled(not self.is_lost):
            rows = logits.flatten(0, 1)
        loss = F.cross_entropy(rows, targets.flatten())
        return loss + hidden.square().mean() + self.linear.weight.square().sum()


@pytest.mark.parametrize("is_lost", [False, True])
def test_gradients_are_where_the_program_wants_them(is_lost):
    assert count_equal_to_plain(Measured(is_lost)) == 0


def write_item(hidden):
    hidden[0] = 1.0


WRITES = """
hidden.mul_(2)
operator.iadd(hidden, 1)
write_item(hidden)
hidden.flatten().neg_()
torch.relu_(hidden)
F.relu(hidden, True)
torch.ops.aten.clamp_.default(hidden, -0.5, 0.5)
"""


class Written(Head):
    """Hidden states are written before the loss is computed, in one of many ways."""

    def __init__(self, write):
        super().__init__()
        self.linear.requires_grad_(False)  # else plain backward needs what was written
        self.write = write

    def forward(self, x, targets):
        hidden = self.norm(x)
        logits = self.linear(hidden)
        self.write(hidden)
        return in_fp32(logits, targets) + hidden.square().mean()


@pytest.mark.parametrize("write", WRITES.strip().splitlines())
def test_hidden_states_that_are_written_before_the_loss(write):
    assert (
        count_equal_to_plain(
            Written(eval(f"lambda hidden: {write}", {**globals(), "operator": operator}))
        )
        == 0
    )


def test_targets_that_are_written_before_the_loss():
    """They are made between logits and loss; that is no matter."""

    def relabelled(logits, targets):
        known = targets.clone()
        known[known < 3] = -100
        return in_fp32(logits, known)

    assert count_equal_to_plain(Head(relabelled)) == 1


def test_what_gains_nothing_is_left_to_the_compiler(monkeypatch):
    """One chunk; and gradients larger than logits: in fp32 and beside one row of logits, those of the
    weight, the bias and hidden states. Autocast has products of its own.
    """
    for rows in (CHUNK_ROWS, CHUNK_ROWS + 1):
        assert count(Head(), slice(rows)) == (rows > CHUNK_ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        assert count(Head()) == 0
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 1)
    size = {
        rows: 2 * rows * CLASSES - (CLASSES + (DIM + 1) * CLASSES + rows * DIM) for rows in (5, 6)
    }
    assert size[5] < 0 < size[6]
    for rows in size:
        torch._dynamo.reset()
        assert count(Head(bias=True), slice(rows)) == (rows == 6)


@both_kinds
def test_varying_sizes(kind):
    """One program for all of them, from five chunks to one."""
    torch.manual_seed(0)
    module, lower = kind(), Rewritten()
    run, counts = compiled(module, lower, dynamic=True), []
    for batch, length in ((BATCH, LENGTH), (4, 10), (3, 5), (2, 7)):
        x, targets = (each[:batch, :length].clone() for each in inputs())
        got, want = (passed(call, module, x, targets) for call in (run, module))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        counts.append(lower.count)
    assert counts[0] and counts == counts[:1] * 4
