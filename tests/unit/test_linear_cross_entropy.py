"""FusedLinearCrossEntropy against F.linear and F.cross_entropy: values, gradients, memory, and what
it refuses.
"""

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tensors import grad_of
from torch.testing import assert_close

from bmtrain.errors import ConfigurationError
from bmtrain.loss import FusedLinearCrossEntropy, linear_cross_entropy

ROWS, DIM, CLASSES, CHUNK_ROWS = 37, 12, 23, 10
# Half precision: of the logits, of their gradient and of the result, against products that are not
# rounded between.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
    torch.float64: 1e-12,
}
WEIGHTS = torch.linspace(0.0, 2.0, CLASSES).roll(7)


def in_chunks(monkeypatch, rows):
    """Of so many rows, however small they are."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", rows)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one shorter."""
    in_chunks(monkeypatch, CHUNK_ROWS)


def inputs(dtype=torch.float32, rows=ROWS, bias=True) -> tuple[Any, Any]:
    """Hidden states, weight and bias, which want gradients, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, DIM), (CLASSES, DIM), *([(CLASSES,)] if bias else [])]
    head = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]
    target = torch.randint(0, CLASSES, (rows,), generator=generator)
    target[::5] = -100
    return head, target


def called(loss, head, target):
    return loss(*head[:2], target, *head[2:])


def check_against_torch(loss, head, target, tolerance=None, scale=1.0):
    """Value and gradients are torch's in fp64, for the logits as the dtype of the head has them."""
    dtype = head[0].dtype
    leaves = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in head]
    logits = F.linear(leaves[0], leaves[1], *leaves[2:])
    rounded = F.linear(head[0], head[1], *head[2:]).detach().double()
    want = F.cross_entropy(
        logits + (rounded - logits).detach(),
        target,
        None if loss.weight is None else loss.weight.double(),
        reduction=loss.reduction,
        label_smoothing=loss.label_smoothing,
    )
    got = called(loss, head, target)
    assert got.dtype == (dtype if dtype == torch.float64 else torch.float32)
    upstream = torch.linspace(-1.0, 2.0, got.numel(), dtype=torch.float64).view(got.shape) * scale
    got.backward(upstream.to(got.dtype))
    want.backward(upstream)
    assert_close(got.double(), want, rtol=2e-6, atol=1e-5)
    for tensor, leaf in zip(head, leaves, strict=True):
        assert (tensor.grad is None) == (leaf.grad is None)
        if tensor.grad is not None and leaf.grad is not None:
            assert tensor.grad.dtype == dtype and tensor.grad.shape == tensor.shape
            atol = (tolerance or TOLERANCE[dtype]) * leaf.grad.abs().amax().item()
            assert_close(tensor.grad.double(), leaf.grad, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_torch(dtype):
    for reduction, weight, smoothing, bias in itertools.product(
        ("mean", "sum", "none"), (None, WEIGHTS), (0.0, 0.1, 1.0), (False, True)
    ):
        loss = FusedLinearCrossEntropy(weight, reduction=reduction, label_smoothing=smoothing)
        if dtype == torch.float64:
            loss.double()
        check_against_torch(loss, *inputs(dtype, bias=bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_parts_get_no_gradient(reduction):
    for wanted in list(itertools.product((False, True), repeat=3))[1:]:
        head, target = inputs()
        for tensor, want_grad in zip(head, wanted, strict=True):
            tensor.requires_grad_(want_grad)
        check_against_torch(FusedLinearCrossEntropy(reduction=reduction), head, target)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_valid_target_has_no_gradient(reduction):
    """Nor no row at all."""
    loss = FusedLinearCrossEntropy(WEIGHTS, reduction=reduction, label_smoothing=0.1)
    for rows in (ROWS, 0):
        head, target = inputs(rows=rows)
        got = called(loss, head, target.fill_(-100))
        got.sum().backward()
        assert got.shape == ((rows,) if reduction == "none" else ())
        assert got.isnan() if reduction == "mean" else not got.any()
        assert not any(grad_of(tensor).any() for tensor in head)


@contextlib.contextmanager
def profiled():
    """Every operator that ran inside, those within opaque operations too; filled in at the end."""
    events = []
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=only_cpu, profile_memory=True, acc_events=True
    ) as profile:
        yield events
    events.extend(profile.events())


def num_products(events):
    """Of matrices, by their operators."""
    return sum(event.name in ("aten::mm", "aten::addmm") for event in events)


def test_never_all_logits(monkeypatch):
    """No memory is asked for that is larger than a chunk's logits in rows of whole vectors. Chunks grow
    as long as their logits stay small.
    """
    row = linear_cross_entropy.ALIGNMENT * 4

    def largest(reduction):
        head, target = inputs(rows=400)
        with profiled() as events:
            called(FusedLinearCrossEntropy(reduction=reduction), head, target).sum().backward()
        return max(event.self_cpu_memory_usage for event in events)

    for reduction in ("sum", "none"):
        assert largest(reduction) == max(CHUNK_ROWS * row, 400 * DIM * 4) < 400 * CLASSES * 4
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 200 * row)
    assert largest("sum") == 200 * row


def test_computes_what_is_wanted():
    """Products per chunk: the logits, and one for each of hidden and weight that want a gradient."""
    cases = [((), 1), ((0,), 2), ((1,), 2), ((2,), 1), ((0, 1, 2), 3)]
    for (wanted, products), has_grad in itertools.product(cases, (True, False)):
        head, target = inputs()
        for index, tensor in enumerate(head):
            tensor.requires_grad_(index in wanted)
        with profiled() as events, torch.set_grad_enabled(has_grad):
            called(FusedLinearCrossEntropy(), head, target)
        assert num_products(events) == 4 * (products if has_grad else 1)


def test_gradients_are_added_up_in_fp32():
    """Of many chunks in bf16: what is small beside the sum so far would be lost."""
    head, target = inputs(torch.bfloat16, rows=3000, bias=False)
    head[0].requires_grad_(False)
    check_against_torch(FusedLinearCrossEntropy(reduction="sum"), head, target, 2**-8, -1.0)


def test_fp16_keeps_small_gradients_for_the_loss_scale(monkeypatch):
    """Those of the logits of a mean over many rows are less than fp16 can tell apart, and so are those
    of classes that are never a target; the loss scale is known in backward only.
    """
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 4096)
    head, target = inputs(torch.float16, rows=20000, bias=False)
    head[1].requires_grad_(False)
    check_against_torch(FusedLinearCrossEntropy(), head, target, scale=2.0**12)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 32, generator=generator) for size in (64, 4000))
    target, found = torch.randint(0, 1000, (64,), generator=generator), []
    for dtype, scale in ((torch.float64, 1.0), (torch.float16, 65536.0)):
        leaf = (1.5 * weight).half().to(dtype).requires_grad_()
        (FusedLinearCrossEntropy()(hidden.half().to(dtype), leaf, target) * scale).backward()
        found.append(grad_of(leaf)[1000:].double() / scale)
    want, got = found
    assert (got.abs().sum(1) > 0).all()
    assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 0.05


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_is_that_of_linear(reduction):
    """Products in bf16, the loss in fp32, gradients in the dtypes of the parameters; fp64 stays fp64."""
    head, target = inputs()
    loss = FusedLinearCrossEntropy(reduction=reduction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = called(loss, head, target)
        assert called(loss, *inputs(torch.float64)).dtype == torch.float64
    got.sum().backward()
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in head]
    want = called(loss, half, target)
    want.sum().backward()
    assert torch.equal(got, want) and got.dtype == torch.float32
    for tensor, other in zip(head, half, strict=True):
        assert torch.equal(grad_of(tensor), grad_of(other).float())


def test_compiles_whole():
    """One graph around operations that the compiler does not look into, and that tell it the truth:
    schemas, fake results, no aliases. Also where a part is frozen.
    """
    for reduction, smoothing, frozen in (("mean", 0.1, 3), ("none", 0.0, 1)):
        loss = FusedLinearCrossEntropy(WEIGHTS, reduction=reduction, label_smoothing=smoothing)
        answers = []
        for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            head, target = inputs()
            for place, tensor in enumerate(head):
                tensor.requires_grad_(place != frozen)
            value = called(call, head, target)
            value.sum().backward()
            answers.append((value.detach(), [tensor.grad for tensor in head]))
        assert_close(answers[1], answers[0])
    head, target = inputs()
    head = [tensor.detach() for tensor in head]
    plain = (head, target.clamp(min=0), target >= 0, WEIGHTS, 0.1)
    tests = ("test_schema", "test_faketensor")
    gradients = linear_cross_entropy.linear_cross_entropy_gradients
    for wanted in ([True, True, True], [False, True, False], [False, False, False]):
        args = (*plain, (target >= 0).float(), wanted)
        torch.library.opcheck(gradients, args, test_utils=tests)


HIDDEN, WEIGHT, TARGET = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.long)
BAD = """
HIDDEN[None], WEIGHT, TARGET => hidden|(1, 4, 3)|(rows, dim)|view
HIDDEN.long(), WEIGHT, TARGET => hidden|int64|float32
HIDDEN, WEIGHT.t(), TARGET => weight of the linear map|(3, 5)|(classes, 3)
HIDDEN, WEIGHT[:0], TARGET => weight of the linear map|(0, 3)
HIDDEN, WEIGHT.bfloat16(), TARGET => weight of the linear map|bfloat16|float32|autocast
HIDDEN, WEIGHT.to("meta"), TARGET => weight of the linear map|meta|cpu
HIDDEN, torch.nn.Linear(3, 5), TARGET => weight of the linear map|Linear|`.weight`
HIDDEN, WEIGHT, TARGET, torch.zeros(4) => bias|(4,)|(5,)
HIDDEN, WEIGHT, TARGET, torch.zeros(5).half() => bias|float16|float32
HIDDEN, WEIGHT, TARGET.float() => target|float32|integer|probabilities
HIDDEN, WEIGHT, TARGET[:3] => target|(3,)|(4,)
HIDDEN, WEIGHT, None => target|NoneType|tensor
HIDDEN, WEIGHT, TARGET + 5 => row 0|got 5|0 to 4|4 of 4|vocabulary
"""


def test_bad_inputs_and_arguments_are_named():
    for line in BAD.strip().splitlines():
        given, named = line.split(" => ")
        with pytest.raises(ConfigurationError) as caught:
            FusedLinearCrossEntropy()(*eval(given, globals()))
        assert all(words in str(caught.value) for words in named.split("|")), caught.value
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"reduction": "avg"}, r"reduction is 'avg': expected mean, sum or none"),
        ({"label_smoothing": "a"}, "label_smoothing is 'a'"),
        ({"weight": [1.0, 2.0]}, "weight: got list, expected a tensor"),
    ]
    for wrong, words in arguments:
        with pytest.raises(ConfigurationError, match=words):
            FusedLinearCrossEntropy(**wrong)
    with pytest.raises(ConfigurationError, match=r"weight: got 24 weights, expected 23"):
        called(FusedLinearCrossEntropy(torch.ones(24)), *inputs())
    assert "reduction='mean'" in repr(FusedLinearCrossEntropy())
