"""Cross entropy on real GPUs: kernels against their twins, modules against torch in fp64, without
waiting, within memory.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.test_engine import forbid_waiting, on_gpus
from tests.ranks import models
from tests.tensors import by_torch, grad_of

import bmtrain as bmt
from bmtrain.kernels import cross_entropy as kernels
from bmtrain.kernels.cross_entropy import RowFactors
from bmtrain.kernels.scale import scale_to
from bmtrain.loss import FusedCrossEntropy, FusedLinearCrossEntropy, linear_cross_entropy

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 1e-12}

KERNEL_CASES = [
    *((dtype, 5003, 0) for dtype in DTYPES),
    *(
        (torch.bfloat16, columns, padding)
        for columns, padding in ((1, 0), (5003, 37), (50257, 0), (128256, 0))
    ),
]


def random(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_each_same(got, want, times=1.0):
    """Gradients of logits to the precision of the dtype of `got`, element by element.

    Those of the targets are ten thousand times as large as all others: a bound that is relative to
    them holds for anything.
    """
    rtol = 1e-5 if got.dtype == torch.float32 else 2 * ROUNDING[got.dtype]
    atol = {torch.float16: 2.0**-24, torch.float64: 1e-18}.get(got.dtype, 1e-10)
    torch.testing.assert_close(got.double(), want.double(), rtol=times * rtol, atol=atol)


@pytest.mark.parametrize(("dtype", "num_columns", "padding"), KERNEL_CASES)
def test_kernels_equal_twins(dtype, num_columns, padding):
    """Sums, gradient, gradient in place; weights and smoothing; masked columns, a row without
    gradient, padded rows.
    """
    torch.manual_seed(0)
    arithmetic = kernels.arithmetic(dtype)
    for weighted, smoothed in ((False, False), (False, True), (True, True)):
        logits = random(33, num_columns + padding, dtype=dtype, scale=3)[:, :num_columns]
        if num_columns > 1:
            logits[0, : num_columns - 1] = -torch.inf
        weight = random(num_columns, dtype=arithmetic).abs() if weighted else None
        mass, smooth, hit = random(3, 33, dtype=arithmetic).abs().unbind(0)
        factors = RowFactors(
            mass, smooth, hit, torch.randint(-1, num_columns, (33,), device="cuda")
        )
        factors.smooth.mul_(0.1 * smoothed)
        for each in factors[:3]:
            each[3] = 0
        want = by_torch(kernels.row_sums, logits, weight, smoothed=smoothed)
        got = kernels.row_sums(logits, weight, smoothed=smoothed)
        for got_part, want_part in zip(got, want, strict=True):
            torch.testing.assert_close(
                got_part, want_part, rtol=ROUNDING[arithmetic] * 3, atol=ROUNDING[arithmetic]
            )
        gradient = by_torch(kernels.row_gradient, logits, want, factors, weight, smoothed=smoothed)
        # Two roundings to `dtype` may differ by a place; before, terms of opposite sign were added
        # up in `arithmetic`.
        close: dict[str, Any] = {"rtol": ROUNDING[dtype] * 2, "atol": ROUNDING[arithmetic]}
        own = kernels.row_gradient(logits, got, factors, weight, smoothed=smoothed)
        logits[3, 0] = torch.inf
        kernels.row_gradient(logits, got, factors, weight, smoothed=smoothed, in_place=True)
        for found in (own, logits):
            torch.testing.assert_close(found, gradient, **close)
            if not smoothed:  # nothing was added up
                assert_each_same(found, gradient, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_gradients_are_rounded_once(dtype):
    """As by the formula, bit by bit, also of a last block that is not full."""
    tensor, factor = random(1000, 1003, dtype=torch.float32), torch.tensor(0.3, device="cuda")
    assert torch.equal(scale_to(tensor, factor, dtype), (tensor * factor).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_is_torchs_and_does_not_wait(dtype):
    """Values and gradients in fp32 arithmetic, with ignored targets, without a host
    synchronisation.
    """
    torch.manual_seed(0)
    logits = random(300, 5003, dtype=dtype).requires_grad_()
    targets = torch.randint(0, 5003, (300,), device="cuda")
    targets[::7] = -100
    loss_function = FusedCrossEntropy(label_smoothing=0.1)
    loss_function(logits, targets).backward()
    logits.grad = None
    forbid_waiting(True)
    loss = loss_function(logits, targets)
    loss.backward()
    forbid_waiting(False)
    twin = logits.detach().double().requires_grad_()
    want = F.cross_entropy(twin, targets, label_smoothing=0.1)
    want.backward()
    models.assert_same(loss.detach().double(), want.detach(), "loss", 2e-6)
    models.assert_same(grad_of(logits).double(), twin.grad, "gradient", ROUNDING[dtype])
    assert_each_same(grad_of(logits), grad_of(twin))


def head(rows, dim, classes, dtype):
    """Hidden states, weight, bias, which want gradients; targets."""
    torch.manual_seed(0)
    tensors = [
        random(rows, dim, dtype=dtype),
        random(classes, dim, dtype=dtype, scale=0.1),
        random(classes, dtype=dtype),
    ]
    targets = torch.randint(0, classes, (rows,), device="cuda")
    targets[::7] = -100
    return [tensor.requires_grad_() for tensor in tensors], targets


@pytest.mark.parametrize("classes", [5003, 4096])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy_is_torchs_and_does_not_wait(dtype, reduction, classes, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 130)  # three chunks
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 0)
    tensors, targets = head(300, 64, classes, dtype)
    weight = torch.linspace(0.0, 2.0, classes, device="cuda", dtype=kernels.arithmetic(dtype))
    loss_function = FusedLinearCrossEntropy(weight, reduction=reduction, label_smoothing=0.1)
    upstream = torch.linspace(
        -1, 2, 300 if reduction == "none" else 1, device="cuda", dtype=torch.float64
    )
    loss_function(*tensors[:2], targets, tensors[2]).sum().backward()
    for tensor in tensors:
        tensor.grad = None
    forbid_waiting(True)
    loss = loss_function(*tensors[:2], targets, tensors[2])
    (loss * upstream.to(loss.dtype)).sum().backward()
    forbid_waiting(False)
    twins = [tensor.detach().double().requires_grad_() for tensor in tensors]
    logits = F.linear(*twins)
    rounded = F.linear(*tensors).detach().double()
    want = F.cross_entropy(
        logits + (rounded - logits).detach(),
        targets,
        weight.double(),
        reduction=reduction,
        label_smoothing=0.1,
    )
    (want * upstream).sum().backward()
    models.assert_same(
        loss.detach().double(),
        want.detach(),
        "loss",
        3e-6 if dtype in (torch.float32, torch.float64) else 2**-8,
    )
    for name, tensor, twin in zip(("hidden", "weight", "bias"), tensors, twins, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == dtype
        models.assert_same(
            tensor.grad.double(), twin.grad, f"gradient of {name}", ROUNDING[dtype] * 2
        )


def test_more_elements_than_32_bits_count():
    """4.3 GB of logits: the last rows have the values of the same rows alone."""
    rows, classes = 43000, 50304
    logits = (
        torch.empty(rows, classes, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    )
    targets = torch.randint(0, classes, (rows,), device="cuda")
    losses = FusedCrossEntropy(reduction="none")(logits, targets)
    losses.sum().backward()
    last = logits.detach()[-50:].clone().requires_grad_()
    alone = FusedCrossEntropy(reduction="none")(last, targets[-50:])
    alone.sum().backward()
    assert logits.grad is not None and last.grad is not None
    assert torch.equal(losses[-50:], alone) and torch.equal(logits.grad[-50:], last.grad)


def test_memory_is_that_of_a_chunk():
    """Beside what it returns: a chunk's logits, and the gradients in fp32.

    All logits would take 3.3 GB.
    """
    tensors, targets = head(32768, 768, 50304, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    FusedLinearCrossEntropy()(*tensors[:2], targets).backward()
    gradients = sum(tensor.numel() for tensor in tensors[:2])
    allowed = linear_cross_entropy.CHUNK_BYTES + gradients * (4 + 2)
    assert torch.cuda.max_memory_allocated() - before < allowed * 1.05


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_losses(dtype):
    """Compiled code has the values and gradients of ours without the compiler."""
    for loss_function in (
        FusedCrossEntropy(label_smoothing=0.1),
        FusedLinearCrossEntropy(label_smoothing=0.1),
    ):
        answers = []
        for call in (loss_function, torch.compile(loss_function, fullgraph=True)):
            tensors, targets = head(300, 64, 5003, dtype)
            given = (
                tensors[:2]
                if isinstance(loss_function, FusedLinearCrossEntropy)
                else [F.linear(*tensors).detach()]
            )
            given = [tensor.detach().requires_grad_() for tensor in given]
            loss = call(*given, targets)
            loss.backward()
            answers.append((loss.detach(), [grad_of(tensor) for tensor in given]))
        models.assert_same(answers[1][0], answers[0][0], "loss", 2e-6)
        for got, want in zip(answers[1][1], answers[0][1], strict=True):
            models.assert_same(got, want, "gradient", 2 * ROUNDING[dtype])
            if isinstance(loss_function, FusedCrossEntropy):
                assert_each_same(got, want, 2)


def test_a_cuda_graph_replays_it():
    """Captured forward and backward passes, replayed on other hidden states and targets: the bits
    of an eager pass.
    """
    loss_function = FusedLinearCrossEntropy(label_smoothing=0.1)
    tensors, targets = head(300, 64, 5003, torch.bfloat16)

    def step():
        for tensor in tensors:
            tensor.grad = None
        loss = loss_function(*tensors[:2], targets, tensors[2])
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    captured = [tensor.grad for tensor in tensors]
    with torch.no_grad():
        tensors[0].mul_(-1)
        targets.copy_(targets.flip(0))
    graph.replay()
    assert torch.equal(loss, step())
    for tensor, grad in zip(tensors, captured, strict=True):
        assert grad is not None and tensor.grad is not None and torch.equal(grad, tensor.grad)


class Head(torch.nn.Module):
    """A linear map and the loss of its output."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 1003)
        self.loss = FusedLinearCrossEntropy(reduction="sum")

    def forward(self, hidden, targets):
        return self.loss(hidden, self.linear.weight, targets, self.linear.bias)


def sharded_heads():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    plain = Head().to(bmt.device())
    hidden, targets = (
        torch.randn(8 * 120, 64).to(bmt.device()),
        torch.randint(0, 1003, (8 * 120,)).to(bmt.device()),
    )
    want = F.cross_entropy(plain.linear(hidden), targets, reduction="sum")
    want.backward()
    own_hidden, own_targets = (x.chunk(bmt.world_size())[bmt.rank()] for x in (hidden, targets))
    for level, recompute, compiled in itertools.product((2, 3), (False, True), (False, True)):
        block = bmt.Block(copy.deepcopy(plain), use_checkpoint=recompute, zero_level=level)
        if compiled:
            block.compile()
        block.zero_grad()
        loss = block(own_hidden, own_targets)
        loss.backward()
        what = f"ZeRO-{level}, recompute={recompute}, compiled={compiled}"
        models.assert_same(bmt.sum_loss(loss.detach()) * bmt.world_size(), want.detach(), what)
        models.assert_same_dicts(models.full_gradients(block), models.plain_gradients(plain), what)


def test_head_in_a_block():
    """Sharded over all GPUs, recomputed and not, compiled and not."""
    on_gpus(sharded_heads)


class PlainHead(torch.nn.Module):
    """A linear map and the loss of its output, as programs write it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 8192, bias=False)

    def forward(self, hidden, targets):
        logits = self.linear(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_heads():
    torch.backends.cuda.matmul.allow_tf32 = False
    linear_cross_entropy.CHUNK_ROWS, linear_cross_entropy.CHUNK_BYTES = 500, 0
    torch.manual_seed(0)
    plain = PlainHead().to(bmt.device())
    hidden = torch.randn(4, 1000, 64, device=bmt.device(), requires_grad=True)
    targets = torch.randint(0, 8192, (4, 1000), device=bmt.device())
    targets[:, ::7] = -100
    want = plain(hidden, targets)
    want.backward()
    grad = grad_of(hidden).clone()
    for recompute in (False, True, "auto"):
        block = bmt.Block(copy.deepcopy(plain), use_checkpoint=recompute, zero_level=2)
        for step in range(5):  # with "auto" the third has a plan
            what = f"recompute={recompute}, step {step}"
            block.zero_grad()
            hidden.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = block(hidden * 1, targets)
            loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
            if step and recompute != "auto":  # "auto" measures; the first compiles
                assert peak < 4000 * 8192 * 4 // 2, f"{what}: {peak}"
            models.assert_same(loss.detach(), want.detach(), what)
            models.assert_same(grad_of(hidden), grad, what)
            weight = models.full_gradients(block)["linear.weight"]
            models.assert_same(weight, grad_of(plain.linear.weight) * bmt.world_size(), what)


@pytest.mark.fresh  # sets a constant
def test_a_compiled_head_runs_in_chunks():
    """The same on all ranks; the loss of the run is the sum of all ranks' losses."""
    on_gpus(plain_heads)
