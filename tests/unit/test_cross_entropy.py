"""FusedCrossEntropy against torch.nn.functional.cross_entropy in fp64: values, gradients, and what
it refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.kernels import cross_entropy
from bmtrain.loss import FusedCrossEntropy

ROWS, CLASSES = 37, 23
# fp32 rounding of a sum over the classes; for half precision the gradient's own rounding, once.
VALUE_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float64: 1e-12,
}


class Allocations(TorchDispatchMode):
    """Sizes and dtypes of all tensors that operators return on new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, torch.dtype]] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if _is(tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.seen.add((tensor.numel(), tensor.dtype))
        return results


def _is(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of rows, the last one shorter."""
    monkeypatch.setattr(cross_entropy, "CHUNK_NUMEL", 5 * CLASSES + 1)


def batch(dtype: torch.dtype, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that need a gradient, and targets of which some are ignored (-100)."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(ROWS, CLASSES, generator=generator) * scale).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    return logits, target


def class_weights() -> torch.Tensor:
    weights = torch.linspace(0.0, 2.0, CLASSES)
    return weights.roll(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("reduction", "weighted", "smoothing"),
    list(itertools.product(["mean", "sum", "none"], [False, True], [0.0, 0.1, 1.0])),
)
def test_equals_torch(dtype: torch.dtype, reduction: str, weighted: bool, smoothing: float) -> None:
    logits, target = batch(dtype)
    weight = class_weights() if weighted else None
    loss = FusedCrossEntropy(weight, reduction=reduction, label_smoothing=smoothing)(logits, target)
    plain = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        plain,
        target,
        None if weight is None else weight.double(),
        reduction=reduction,
        label_smoothing=smoothing,
    )
    upstream = torch.linspace(-1.0, 2.0, loss.numel()).view(loss.shape)
    loss.backward(upstream)
    expected.backward(upstream.double())
    assert logits.grad is not None and plain.grad is not None
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=VALUE_TOLERANCE, atol=VALUE_TOLERANCE)
    tolerance = GRADIENT_TOLERANCE[dtype]
    torch.testing.assert_close(logits.grad.double(), plain.grad, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("ignore_index", [-100, 3, -1])
def test_ignored_rows_have_no_loss_and_no_gradient(ignore_index: int) -> None:
    logits, target = batch(torch.float32)
    target[target == -100] = ignore_index
    loss = FusedCrossEntropy(ignore_index=ignore_index, reduction="none")(logits, target)
    loss.sum().backward()
    ignored = target == ignore_index
    assert logits.grad is not None
    assert ignored.any() and (~ignored).any()
    assert not loss[ignored].any() and not logits.grad[ignored].any()
    assert loss[~ignored].all() and logits.grad[~ignored].any(dim=1).all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_ignored_rows_may_hold_anything(bad: float) -> None:
    logits, target = batch(torch.float32)
    with torch.no_grad():
        logits[0] = bad  # target -100
    loss = FusedCrossEntropy(label_smoothing=0.1)(logits, target)
    loss.backward()
    expected = torch.nn.functional.cross_entropy(
        logits.detach()[1:], target[1:], label_smoothing=0.1
    )
    torch.testing.assert_close(loss, expected)
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[0].any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [ROWS, 0])
def test_no_valid_target_has_no_gradient(reduction: str, rows: int) -> None:
    """As in torch: the mean is NaN, which says so, and the gradient zero, which changes nothing."""
    logits = torch.randn(rows, CLASSES, requires_grad=True)
    loss = FusedCrossEntropy(class_weights(), reduction=reduction, label_smoothing=0.1)(
        logits, torch.full((rows,), -100)
    )
    loss.backward()
    assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_valid_targets_without_weight_are_not_a_number(smoothing: float) -> None:
    """As in torch, loss and gradient: classes of weight 0 are a mistake of the program, an empty
    batch is none.
    """
    logits, weight = (
        torch.randn(3, CLASSES, requires_grad=True),
        torch.ones(CLASSES).index_fill(0, torch.tensor(0), 0.0),
    )
    loss = FusedCrossEntropy(weight, label_smoothing=smoothing)(
        logits, torch.zeros(3, dtype=torch.long)
    )
    loss.backward()
    assert loss.isnan() and logits.grad is not None and logits.grad.isnan().all()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor(
        [[6e4, -6e4, 0.0], [-6e4, -6e4, -6e4]], dtype=torch.float16, requires_grad=True
    )
    loss = FusedCrossEntropy(reduction="none")(logits, torch.tensor([0, 1]))
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([0.0, 3.0]).log().clamp(min=0.0))
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_masked_classes_have_probability_zero() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0]], requires_grad=True)
    FusedCrossEntropy()(logits, torch.tensor([0])).backward()
    assert logits.grad is not None
    share = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(logits.grad, torch.tensor([[share[0] - 1, 0.0, share[1]]]))


def test_gradient_by_finite_differences() -> None:
    logits, target = batch(torch.float64, scale=1.0)
    loss = FusedCrossEntropy(class_weights().double() + 0.1, label_smoothing=0.2)
    assert torch.autograd.gradcheck(lambda x: loss(x, target), (logits,))


def test_views_of_larger_logits() -> None:
    whole = torch.randn(2 * ROWS, 2 * CLASSES)
    logits, target = whole[::2, ::2], batch(torch.float32)[1].to(torch.int32)
    expected = torch.nn.functional.cross_entropy(logits, target.long())
    torch.testing.assert_close(FusedCrossEntropy()(logits, target), expected)


def test_autocast_keeps_fp32_arithmetic() -> None:
    logits, target = batch(torch.bfloat16)
    loss = FusedCrossEntropy(class_weights(), label_smoothing=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(logits, target)
    assert torch.equal(inside, loss(logits, target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_whole(dtype: torch.dtype) -> None:
    """One graph, without a break; its pieces are torch's, so the tracing backend is enough."""
    logits, target = batch(dtype)
    loss = FusedCrossEntropy(class_weights(), label_smoothing=0.1)
    loss(logits, target).backward()
    eager, logits.grad = logits.grad, None
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(logits, target)
    compiled.backward()
    assert eager is not None and logits.grad is not None
    torch.testing.assert_close(compiled, loss(logits, target))
    torch.testing.assert_close(logits.grad, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_never_copied_whole(dtype: torch.dtype) -> None:
    """Of (rows, V) there is the gradient alone, in the dtype of the logits; all else is a chunk or
    a vector.
    """
    logits, target = batch(dtype)
    with Allocations() as made:
        FusedCrossEntropy(label_smoothing=0.1)(logits, target).backward()
    assert {made_dtype for numel, made_dtype in made.seen if numel >= logits.numel()} == {dtype}
    assert (
        max(numel for numel, made_dtype in made.seen if made_dtype == torch.float32)
        <= 5 * CLASSES + 1
    )


def test_class_weights_move_with_the_module() -> None:
    loss = FusedCrossEntropy(class_weights())
    assert loss.to("meta").weight is not None
    assert loss.weight is not None and loss.weight.device.type == "meta"
    assert "reduction='mean'" in repr(loss)


LOGITS, TARGET = torch.zeros(4, 5), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("logits", "target", "weight", "named"),
    [
        (LOGITS[None], TARGET, None, ["logits", "(1, 4, 5)", "(rows, classes)", "view"]),
        (LOGITS.long(), TARGET, None, ["logits", "int64", "float32"]),
        (LOGITS, TARGET.float(), None, ["target", "float32", "integer", "probabilities"]),
        (LOGITS, TARGET[:3], None, ["target", "(3,)", "(4,)"]),
        (LOGITS, TARGET.to("meta"), None, ["target", "meta", "cpu"]),
        (LOGITS, TARGET, torch.ones(6), ["weight", "got 6", "expected 5"]),
        (
            LOGITS,
            torch.tensor([0, 1, 5, 2]),
            None,
            ["row 2", "got 5", "0 to 4", "1 of 4", "vocabulary"],
        ),
        (LOGITS, torch.tensor([0, -7, 5, 2]), None, ["row 1", "got -7", "2 of 4"]),
    ],
)
def test_bad_inputs_are_named(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, named: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        FusedCrossEntropy(weight)(logits, target)
    assert not [words for words in named if words not in str(caught.value)], str(caught.value)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"reduction: got 'avg', expected one of .*mean"):
        FusedCrossEntropy(reduction="avg")
    with pytest.raises(
        ConfigurationError, match=r"label_smoothing is 1\.5: expected a number from 0 to 1"
    ):
        FusedCrossEntropy(label_smoothing=1.5)
    with pytest.raises(ConfigurationError, match=r"weight: got shape \(2, 2\) of float32"):
        FusedCrossEntropy(torch.ones(2, 2))
    with pytest.raises(NotInitializedError, match="parallel=True"):
        FusedCrossEntropy(parallel=True)
