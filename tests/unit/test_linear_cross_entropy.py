"""FusedLinearCrossEntropy against F.linear and F.cross_entropy: values, gradients, memory, and what
it refuses.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tensors import grad_of

from bmtrain.errors import ConfigurationError
from bmtrain.loss import FusedLinearCrossEntropy, linear_cross_entropy

ROWS, DIM, CLASSES = 37, 12, 23
CHUNK_ROWS = 10
# Half precision: of the logits, of their gradient and of the result, against products that are not
# rounded between.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
    torch.float64: 1e-12,
}
Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one shorter."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", CHUNK_ROWS)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 0)


def inputs(dtype: torch.dtype, rows: int = ROWS, bias: bool = True) -> tuple[Tensors, torch.Tensor]:
    """Hidden states, weight and bias, which want gradients, and targets of which some are ignored
    (-100).
    """
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, DIM), (CLASSES, DIM), *([(CLASSES,)] if bias else [])]
    head = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]
    target = torch.randint(0, CLASSES, (rows,), generator=generator)
    target[::5] = -100
    return head, target


def class_weights() -> torch.Tensor:
    return torch.linspace(0.0, 2.0, CLASSES).roll(7)


def called(loss: FusedLinearCrossEntropy, head: Tensors, target: torch.Tensor) -> torch.Tensor:
    return loss(*head[:2], target, *head[2:])


def in_fp64(
    loss: FusedLinearCrossEntropy, head: Tensors, target: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """Torch's answer for the logits as `head`'s dtype has them, and the leaves that get its
    gradients.
    """
    leaves = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in head]
    logits = F.linear(leaves[0], leaves[1], *leaves[2:])
    rounded = F.linear(head[0], head[1], *head[2:]).detach().double()
    weight = None if loss.weight is None else loss.weight.double()
    want = F.cross_entropy(
        logits + (rounded - logits).detach(),
        target,
        weight,
        reduction=loss.reduction,
        label_smoothing=loss.label_smoothing,
    )
    return want, leaves


def upstream(loss: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, loss.numel(), dtype=torch.float64).view(loss.shape)


def assert_near(got: torch.Tensor | None, want: torch.Tensor | None, tolerance: float) -> None:
    """No element off by more than `tolerance` of the largest."""
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=tolerance * want.abs().max().item()
        )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("reduction", "weighted", "smoothing", "bias"),
    list(itertools.product(["mean", "sum", "none"], [False, True], [0.0, 0.1, 1.0], [False, True])),
)
def test_equals_torch(
    dtype: torch.dtype, reduction: str, weighted: bool, smoothing: float, bias: bool
) -> None:
    head, target = inputs(dtype, bias=bias)
    loss = FusedLinearCrossEntropy(
        class_weights() if weighted else None, reduction=reduction, label_smoothing=smoothing
    )
    if dtype == torch.float64:
        loss.double()
    want, leaves = in_fp64(loss, head, target)
    got = called(loss, head, target)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    got.backward(upstream(got).to(got.dtype))
    want.backward(upstream(want))
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-5)
    for tensor, leaf in zip(head, leaves, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == dtype
        assert_near(tensor.grad, leaf.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "wanted", [w for w in itertools.product([False, True], repeat=3) if any(w)]
)
def test_frozen_parts_get_no_gradient(reduction: str, wanted: tuple[bool, bool, bool]) -> None:
    head, target = inputs(torch.float32)
    for tensor, want_grad in zip(head, wanted, strict=True):
        tensor.requires_grad_(want_grad)
    loss = FusedLinearCrossEntropy(reduction=reduction)
    want, leaves = in_fp64(loss, head, target)
    called(loss, head, target).sum().backward()
    want.sum().backward()
    for tensor, leaf in zip(head, leaves, strict=True):
        assert_near(tensor.grad, leaf.grad, TOLERANCE[torch.float32])


@contextlib.contextmanager
def profiled() -> Iterator[list[Any]]:
    """Every operator that ran inside, those within opaque operations too; filled in at the end."""
    events: list[Any] = []
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=only_cpu, profile_memory=True, acc_events=True
    ) as profile:
        yield events
    events.extend(profile.events())


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_never_all_logits(reduction: str) -> None:
    """No memory is asked for that is larger than a chunk's logits in rows of whole vectors."""
    head, target = inputs(torch.float32, rows=400)
    with profiled() as events:
        called(FusedLinearCrossEntropy(reduction=reduction), head, target).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in events) // 4
    assert largest == max(CHUNK_ROWS * linear_cross_entropy.ALIGNMENT, 400 * DIM)
    assert largest < 400 * CLASSES


def test_chunks_grow_as_long_as_their_logits_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        linear_cross_entropy, "CHUNK_BYTES", 200 * linear_cross_entropy.ALIGNMENT * 4
    )
    head, target = inputs(torch.float32, rows=400)
    with profiled() as events:
        called(FusedLinearCrossEntropy(reduction="sum"), head, target).backward()
    largest = max(event.self_cpu_memory_usage for event in events)
    assert (
        largest
        == linear_cross_entropy.CHUNK_BYTES
        > CHUNK_ROWS * linear_cross_entropy.ALIGNMENT * 4
    )


def num_products(head: Tensors, target: torch.Tensor) -> int:
    """Products of matrices in the forward pass."""
    with profiled() as events:
        called(FusedLinearCrossEntropy(), head, target)
    return sum(event.name in ("aten::mm", "aten::addmm") for event in events)


@pytest.mark.parametrize(
    ("wanted", "products"), [((), 1), ((0,), 2), ((1,), 2), ((2,), 1), ((0, 1, 2), 3)]
)
def test_computes_what_is_wanted(wanted: tuple[int, ...], products: int) -> None:
    """Products per chunk: the logits, and one for each of hidden and weight that want a
    gradient.
    """
    head, target = inputs(torch.float32)
    for index, tensor in enumerate(head):
        tensor.requires_grad_(index in wanted)
    assert num_products(head, target) == products * 4
    with torch.no_grad():
        assert num_products(head, target) == 4


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [1, CHUNK_ROWS, CHUNK_ROWS + 1, 0])
def test_any_number_of_rows(reduction: str, rows: int) -> None:
    head, target = inputs(torch.float32, rows=rows)
    target = target.clamp(min=0)
    loss = FusedLinearCrossEntropy(reduction=reduction)
    got = called(loss, head, target)
    got.sum().backward()
    if rows == 0:
        assert got.shape == ((0,) if reduction == "none" else ())
        assert got.isnan() if reduction == "mean" else not got.any()
        assert all(tensor.grad is not None and not tensor.grad.any() for tensor in head)
        return
    want, leaves = in_fp64(loss, head, target)
    want.sum().backward()
    assert_near(got, want, 2e-6)
    for tensor, leaf in zip(head, leaves, strict=True):
        assert_near(tensor.grad, leaf.grad, 2e-6)


@pytest.mark.parametrize("classes", [1, 8, 23, 64, 65])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_any_number_of_classes(reduction: str, classes: int) -> None:
    """Also those that products are not made for, to which others are added on the way."""
    head, target = inputs(torch.float32)
    head = [
        head[0],
        *(
            torch.cat(3 * [tensor.detach()])[:classes].clone().requires_grad_()
            for tensor in head[1:]
        ),
    ]
    target = torch.where(target < 0, target, target % classes)
    loss = FusedLinearCrossEntropy(reduction=reduction, label_smoothing=0.1)
    want, leaves = in_fp64(loss, head, target)
    got = called(loss, head, target)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
    for tensor, leaf in zip(head, leaves, strict=True):
        assert (
            tensor.grad is not None and leaf.grad is not None and tensor.grad.shape == tensor.shape
        )
        torch.testing.assert_close(tensor.grad.double(), leaf.grad, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_valid_target_has_no_gradient(reduction: str) -> None:
    head, target = inputs(torch.float32)
    loss = called(
        FusedLinearCrossEntropy(class_weights(), reduction=reduction, label_smoothing=0.1),
        head,
        target.fill_(-100),
    )
    loss.backward()
    assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in head)


def test_ignored_rows_may_be_infinite() -> None:
    head, target = inputs(torch.float32, bias=False)
    FusedLinearCrossEntropy()(*head, target).backward()
    clean, head[1].grad = head[1].grad, None
    with torch.no_grad():
        head[0][0] = 3e38  # target -100: its logits overflow
    FusedLinearCrossEntropy()(*head, target).backward()
    assert clean is not None and head[1].grad is not None and head[0].grad is not None
    assert torch.equal(head[1].grad, clean)
    assert not head[0].grad[0].any()


def test_gradients_are_added_up_in_fp32() -> None:
    """Of many chunks in bf16: what is small beside the sum so far would be lost."""
    head, target = inputs(torch.bfloat16, rows=3000, bias=False)
    loss = FusedLinearCrossEntropy(reduction="sum")
    want, leaves = in_fp64(loss, head, target)
    called(loss, head, target).backward()
    want.backward()
    assert_near(head[1].grad, leaves[1].grad, 2**-8)


def test_fp16_keeps_small_gradients_for_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the logits of a mean over many rows are less than fp16 can tell apart; the loss
    scale is known in backward only.
    """
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 4096)
    head, target = inputs(torch.float16, rows=20000, bias=False)
    loss, scale = FusedLinearCrossEntropy(), 2.0**12
    want, leaves = in_fp64(loss, head, target)
    (called(loss, head, target) * scale).backward()
    (want * scale).backward()
    assert_near(head[0].grad, leaves[0].grad, TOLERANCE[torch.float16])


def test_gradient_by_finite_differences() -> None:
    head, target = inputs(torch.float64, rows=12)
    for reduction in ("mean", "none"):
        loss = FusedLinearCrossEntropy(
            class_weights().double() + 0.1, reduction=reduction, label_smoothing=0.2
        )
        assert torch.autograd.gradcheck(
            lambda h, w, b, loss=loss: loss(h, w, target, b), tuple(head)
        )


def test_second_derivatives_are_refused() -> None:
    head, target = inputs(torch.float32)
    (grad,) = torch.autograd.grad(
        called(FusedLinearCrossEntropy(), head, target).square(), head[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_backward_twice_over_a_kept_graph() -> None:
    head, target = inputs(torch.float32)
    loss = called(FusedLinearCrossEntropy(), head, target)
    loss.backward(retain_graph=True)
    once = [tensor.grad.clone() for tensor in head if tensor.grad is not None]
    loss.backward()
    assert len(once) == 3
    for tensor, grad in zip(head, once, strict=True):
        torch.testing.assert_close(tensor.grad, grad * 2)


def test_the_same_bits_from_run_to_run() -> None:
    runs = []
    for _ in range(2):
        head, target = inputs(torch.bfloat16)
        called(FusedLinearCrossEntropy(), head, target).backward()
        runs.append([tensor.grad for tensor in head])
    assert all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(*runs, strict=True)
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_is_that_of_linear(reduction: str) -> None:
    """Products in bf16, the loss in fp32, gradients in the dtypes of the parameters; fp64 stays
    fp64.
    """
    head, target = inputs(torch.float32)
    loss = FusedLinearCrossEntropy(reduction=reduction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = called(loss, head, target)
    got.sum().backward()
    grads = [tensor.grad for tensor in head]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in head]
    want = called(loss, half, target)
    want.sum().backward()
    assert torch.equal(got, want) and got.dtype == torch.float32
    for grad, tensor in zip(grads, half, strict=True):
        assert grad is not None and grad.dtype == torch.float32 and tensor.grad is not None
        assert torch.equal(grad, tensor.grad.float())
    head, target = inputs(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert called(loss, head, target).dtype == torch.float64


@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.1), ("none", 0.0)])
def test_compiles_whole(reduction: str, smoothing: float) -> None:
    """One graph around an operation that the compiler does not look into; also where a part is
    frozen.
    """
    loss = FusedLinearCrossEntropy(class_weights(), reduction=reduction, label_smoothing=smoothing)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for frozen in (None, 1):
        answers: list[tuple[torch.Tensor, list[torch.Tensor | None]]] = []
        for call in (loss, compiled):
            head, target = inputs(torch.float32)
            if frozen is not None:
                head[frozen].requires_grad_(False)
            value = call(*head[:2], target, head[2])
            value.sum().backward()
            answers.append((value.detach(), [tensor.grad for tensor in head]))
        torch.testing.assert_close(answers[1], answers[0])


def test_operations_tell_the_compiler_the_truth() -> None:
    """Schemas, fake results, no aliases."""
    head, target = inputs(torch.float32)
    head = [tensor.detach() for tensor in head]
    plain = (head, target.clamp(min=0), target >= 0, class_weights(), 0.1)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(linear_cross_entropy.linear_cross_entropy, plain, test_utils=tests)
    for wanted in ([True, True, True], [False, True, False]):
        args = (*plain, (target >= 0).float(), wanted)
        torch.library.opcheck(
            linear_cross_entropy.linear_cross_entropy_gradients, args, test_utils=tests
        )


def bad_inputs() -> Iterator[Any]:
    """Hidden, weight, target, bias, and what the error must name."""
    hidden, weight, target = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.long)
    yield pytest.param(
        hidden[None], weight, target, None, ["hidden", "(1, 4, 3)", "(rows, dim)", "view"]
    )
    yield pytest.param(hidden.long(), weight, target, None, ["hidden", "int64", "float32"])
    yield pytest.param(
        hidden, weight.t(), target, None, ["weight of the linear map", "(3, 5)", "(classes, 3)"]
    )
    yield pytest.param(hidden, weight[:0], target, None, ["weight of the linear map", "(0, 3)"])
    yield pytest.param(
        hidden,
        weight.bfloat16(),
        target,
        None,
        ["weight of the linear map", "bfloat16", "float32", "autocast"],
    )
    yield pytest.param(
        hidden, weight.to("meta"), target, None, ["weight of the linear map", "meta", "cpu"]
    )
    yield pytest.param(hidden, weight, target, torch.zeros(4), ["bias", "(4,)", "(5,)"])
    yield pytest.param(
        hidden, weight, target, torch.zeros(5).half(), ["bias", "float16", "float32"]
    )
    yield pytest.param(
        hidden, weight, target.float(), None, ["target", "float32", "integer", "probabilities"]
    )
    yield pytest.param(hidden, weight, target[:3], None, ["target", "(3,)", "(4,)"])
    yield pytest.param(
        hidden,
        torch.nn.Linear(3, 5),
        target,
        None,
        ["weight of the linear map", "Linear", "`.weight`"],
    )
    yield pytest.param(hidden, weight, None, None, ["target", "NoneType", "tensor"])
    yield pytest.param(
        hidden, weight, target + 5, None, ["row 0", "got 5", "0 to 4", "4 of 4", "vocabulary"]
    )


@pytest.mark.parametrize(("hidden", "weight", "target", "bias", "named"), list(bad_inputs()))
def test_bad_inputs_are_named(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    named: list[str],
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        FusedLinearCrossEntropy()(hidden, weight, target, bias)
    assert not [words for words in named if words not in str(caught.value)], str(caught.value)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"reduction: got 'avg', expected one of .*mean"):
        FusedLinearCrossEntropy(reduction="avg")
    with pytest.raises(ConfigurationError, match="label_smoothing is 'a'"):
        FusedLinearCrossEntropy(label_smoothing="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="weight: got list, expected a tensor"):
        FusedLinearCrossEntropy(weight=[1.0, 2.0])  # type: ignore[arg-type]
    head, target = inputs(torch.float32)
    with pytest.raises(ConfigurationError, match=r"weight: got 24 weights, expected 23"):
        called(FusedLinearCrossEntropy(torch.ones(24)), head, target)
    assert "reduction='mean'" in repr(FusedLinearCrossEntropy())


def test_small_probabilities_survive_fp16() -> None:
    """Gradients are made before the loss scale is known; classes that are never a target must be
    pushed down all the same.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(64, 32, generator=generator),
        1.5 * torch.randn(4000, 32, generator=generator),
    )
    target = torch.randint(0, 1000, (64,), generator=generator)
    found = []
    for dtype, scale in ((torch.float64, 1.0), (torch.float16, 65536.0)):
        leaf = weight.half().to(dtype).requires_grad_()
        (FusedLinearCrossEntropy()(hidden.half().to(dtype), leaf, target) * scale).backward()
        found.append(grad_of(leaf).double() / scale)
    want, got = (grad[1000:] for grad in found)
    assert bool((got.abs().sum(1) > 0).all())
    assert float(((got - want).norm(dim=1) / want.norm(dim=1)).max()) < 0.05
