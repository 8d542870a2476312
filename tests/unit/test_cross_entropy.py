"""FusedCrossEntropy against torch.nn.functional.cross_entropy in fp64: values, gradients, memory, and
what it refuses.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tensors import grad_of
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.kernels import cross_entropy
from bmtrain.loss import FusedCrossEntropy

ROWS, CLASSES = 37, 23
# fp32 rounding of a sum over the classes; for half precision the gradient's own rounding, once.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float64: 1e-12,
}
WEIGHTS = torch.linspace(0.0, 2.0, CLASSES).roll(7)
OPTIONS = list(itertools.product(("mean", "sum", "none"), (None, WEIGHTS), (0.0, 0.1, 1.0)))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of rows, the last one shorter."""
    monkeypatch.setattr(cross_entropy, "CHUNK_NUMEL", 5 * CLASSES + 1)


def batch(dtype):
    """Logits that need a gradient, and targets of which some are ignored (-100)."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(ROWS, CLASSES, generator=generator) * 3).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    return logits, target


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_torch(dtype):
    for reduction, weight, smoothing in OPTIONS:
        logits, target = batch(dtype)
        options: Any = {"reduction": reduction, "label_smoothing": smoothing}
        loss = FusedCrossEntropy(weight, **options)(logits, target)
        plain, wide = logits.detach().double().requires_grad_(), weight
        wide = None if weight is None else weight.double()
        expected = F.cross_entropy(plain, target, wide, **options)
        upstream = torch.linspace(-1.0, 2.0, loss.numel()).view(loss.shape)
        loss.backward(upstream)
        expected.backward(upstream.double())
        grad = grad_of(logits)
        assert loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert grad.dtype == dtype
        assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6)
        assert_close(grad.double(), grad_of(plain), rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("ignore_index", [-100, 3, -1])
@pytest.mark.parametrize("bad", [1.0, torch.inf, torch.nan])
def test_ignored_rows_may_hold_anything(ignore_index, bad):
    """They have no loss and no gradient; the others have."""
    logits, target = batch(torch.float32)
    target[::5] = ignore_index
    with torch.no_grad():
        logits[0] = bad
    ignored = target == ignore_index
    for smoothing in (0.0, 0.1):
        options = {"ignore_index": ignore_index, "label_smoothing": smoothing}
        rows = FusedCrossEntropy(reduction="none", **options)(logits, target)
        assert not rows[ignored].any() and rows[~ignored].all()
        logits.grad = None
        loss = FusedCrossEntropy(**options)(logits, target)
        loss.backward()
        assert_close(loss, F.cross_entropy(logits[1:], target[1:], **options))
        grad = grad_of(logits)
        assert grad.isfinite().all() and not grad[ignored].any() and grad[~ignored].any(1).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_without_weight(reduction):
    """As in torch: without a valid target the mean is NaN, which says so, and the gradient zero, which
    changes nothing. Classes of weight 0 are a mistake of the program: NaN both.
    """
    options = {"reduction": reduction}
    for rows, smoothing in itertools.product((ROWS, 0), (0.0, 0.1)):
        logits = torch.randn(rows, CLASSES, requires_grad=True)
        options["label_smoothing"] = smoothing
        loss = FusedCrossEntropy(WEIGHTS, **options)(logits, torch.full((rows,), -100))
        loss.backward()
        assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
        assert not grad_of(logits).any()
        if reduction == "mean" and rows:
            logits.grad = None
            weight = torch.ones(CLASSES).index_fill(0, torch.tensor(0), 0.0)
            loss = FusedCrossEntropy(weight, **options)(logits, torch.zeros(rows).long())
            loss.backward()
            assert loss.isnan() and grad_of(logits).isnan().all()


def test_extreme_logits():
    """Large ones do not overflow; masked classes have probability zero."""
    rows = [[6e4, -6e4, 0.0], [-6e4, -6e4, -6e4]]
    logits = torch.tensor(rows, dtype=torch.float16, requires_grad=True)
    loss = FusedCrossEntropy(reduction="none")(logits, torch.tensor([0, 1]))
    loss.sum().backward()
    assert_close(loss, torch.tensor([0.0, 3.0]).log().clamp(min=0.0))
    assert grad_of(logits).isfinite().all()
    logits = torch.tensor([[1.0, -torch.inf, 2.0]], requires_grad=True)
    FusedCrossEntropy()(logits, torch.tensor([0])).backward()
    share = torch.tensor([1.0, 2.0]).softmax(0)
    expected = torch.tensor([[share[0] - 1, 0.0, share[1]]])
    assert_close(grad_of(logits), expected)


def test_views_autocast_and_the_compiler_change_nothing():
    """The compiler makes one graph; its pieces are torch's, so the tracing backend is enough."""
    logits, target = torch.randn(2 * ROWS, 2 * CLASSES)[::2, ::2], batch(torch.float32)[1]
    expected = F.cross_entropy(logits, target)
    assert_close(FusedCrossEntropy()(logits, target.int()), expected)
    logits, target = batch(torch.bfloat16)
    loss = FusedCrossEntropy(WEIGHTS, label_smoothing=0.1)
    eager = loss(logits, target)
    eager.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(logits, target), eager)
    grad, logits.grad = logits.grad, None
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(logits, target)
    compiled.backward()
    assert_close((compiled, logits.grad), (eager, grad))


class Allocations(TorchDispatchMode):
    """Sizes and dtypes of all tensors that operators return on new memory."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        given, made = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
            for tree in ((args, kwargs), results)
        )
        old = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.seen |= {
            (x.numel(), x.dtype) for x in made if x.untyped_storage().data_ptr() not in old
        }
        return results


def test_half_precision_logits_are_never_copied_whole():
    """Of (rows, V) there is the gradient alone, in the dtype of the logits; all else is a chunk or a
    vector.
    """
    logits, target = batch(torch.bfloat16)
    with Allocations() as made:
        FusedCrossEntropy(label_smoothing=0.1)(logits, target).backward()
    assert {dtype for numel, dtype in made.seen if numel >= logits.numel()} == {torch.bfloat16}
    in_fp32 = [numel for numel, dtype in made.seen if dtype == torch.float32]
    assert max(in_fp32) <= 5 * CLASSES + 1


def test_class_weights_move_with_the_module():
    loss = FusedCrossEntropy(WEIGHTS).to("meta")
    assert loss.weight is not None and loss.weight.device.type == "meta"
    assert "reduction='mean'" in repr(loss)


LOGITS, TARGET = torch.zeros(4, 5), torch.zeros(4, dtype=torch.long)
BAD = """
LOGITS[None], TARGET => logits|(1, 4, 5)|(rows, classes)|view
LOGITS[:, :0], TARGET => logits|(4, 0)
LOGITS.long(), TARGET => logits|int64|float32
LOGITS, TARGET.float() => target|float32|integer|probabilities
LOGITS, TARGET.bool() => target|bool|integer
LOGITS, TARGET[:3] => target|(3,)|(4,)
LOGITS, TARGET.to("meta") => target|meta|cpu
LOGITS, TARGET, torch.ones(5, device="meta") => weight|meta|cpu
LOGITS, TARGET, torch.ones(6) => weight|got 6|expected 5
LOGITS, torch.tensor([0, 1, 5, 2]) => row 2|got 5|0 to 4|1 of 4|vocabulary
LOGITS, torch.tensor([0, -7, 5, 2]) => row 1|got -7|2 of 4
"""


def test_bad_inputs_and_arguments_are_named():
    for line in BAD.strip().splitlines():
        given, named = line.split(" => ")
        logits, target, *weight = eval(given, globals())
        with pytest.raises(ConfigurationError) as caught:
            FusedCrossEntropy(*weight)(logits, target)
        assert all(words in str(caught.value) for words in named.split("|")), caught.value
    with pytest.raises(ConfigurationError, match=r"reduction is 'avg': expected mean, sum or none"):
        FusedCrossEntropy(reduction="avg")
    with pytest.raises(
        ConfigurationError, match=r"label_smoothing is 1\.5: expected a number from 0 to 1"
    ):
        FusedCrossEntropy(label_smoothing=1.5)
    with pytest.raises(ConfigurationError, match=r"weight: got shape \(2, 2\) of float32"):
        FusedCrossEntropy(torch.ones(2, 2))
    with pytest.raises(NotInitializedError, match="parallel=True"):
        FusedCrossEntropy(parallel=True)
