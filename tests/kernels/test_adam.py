"""AdamW in every form of its state: torch's operators against torch.optim.AdamW, the kernel against both."""

import itertools
import math
from typing import Any

import pytest
import torch
from tests.tensors import zero_blocks
from torch.testing import assert_close

from bmtrain.kernels import adam
from bmtrain.kernels.adam import AdamSettings, AdamTensors, adamw_reference, adamw_triton

# Lengths 0, 1, odd, of whole and of several chunks; starts that are aligned and that are not.
BOUNDS = [(0, 64), (64, 64), (64, 65), (66, 139), (150, 350), (400, 400 + 192)]
# Lengths 1, of no whole block, of whole blocks and of several chunks, and where they start.
SIZES = {1: 0, 63: 64, 64: 128, 192: 2**32 - 128, 400: 0}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [FP32, BF16, FP16]
both_paths = pytest.mark.parametrize("path", [adamw_reference, adamw_triton])
all_kinds = pytest.mark.parametrize("kind", ["fp32", "split", "none"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of a short tensor."""
    monkeypatch.setattr(adam, "CHUNK", 128)


def tensors(master, weight=BF16, quantised=True, grad=FP32, sizes=SIZES, device="cpu"):
    generator = torch.Generator(device).manual_seed(0)
    found: list[Any] = []
    for number, (size, start) in enumerate(sizes.items()):
        values = torch.randn(size, generator=generator, device=device).to(weight)
        masters = {
            "fp32": values if weight == FP32 else values.float(),
            "split": torch.zeros(size, dtype=torch.int16, device=device),
            "none": None,
        }
        mean, square = (
            zero_blocks(size, dtype, device) if quantised else torch.zeros(size, device=device)
            for dtype in (torch.int8, torch.uint8)
        )
        grads = torch.ones(size, dtype=grad, device=device)
        found.append(AdamTensors(values, grads, masters[master], mean, square, number, start))
    return found


def with_the_kernel(master, grad, mean, square, settings):
    """What Adam does with masters, by the kernel."""
    adamw_triton([AdamTensors(master, grad, master, mean, square)], settings)


def written(members):
    return [x for t in members for x in (t.weight, *t.state)]


def settings(step=1, **others):
    values = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.2}
    return AdamSettings(**values | others, step=step)


@both_paths
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_torch(path, dtype):
    """Masters are torch's fp32 weights, weights are their rounding; what lies between the tensors is not
    touched, and the gradient not written.
    """
    inside = torch.zeros(600, dtype=torch.bool)
    for begin, end in BOUNDS:
        inside[begin:end] = True
    for grad_dtype, (maximize, scale) in itertools.product(DTYPES, ((False, 1.0), (True, 1024.0))):
        (whole,), (start,) = (
            tensors("fp32", dtype, False, grad_dtype, sizes={600: 0}) for _ in range(2)
        )
        param = torch.nn.Parameter(start.master.clone())
        options: Any = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
        of_torch = torch.optim.AdamW([param], lr=0.01, maximize=maximize, **options)
        generator, verdict = torch.Generator().manual_seed(1), torch.zeros((), dtype=torch.float64)
        for step in range(1, 4):
            grad = (torch.randn(600, generator=generator) * scale).to(grad_dtype)
            whole.grad.copy_(grad)
            param.grad = grad.float() / scale
            of_torch.step()
            parts = [whole.part(begin, end) for begin, end in BOUNDS]
            path(parts, settings(step, scale=scale, maximize=maximize), verdict)
            assert torch.equal(whole.grad, grad), "the gradient was written"
        moments = of_torch.state[param]
        want = [param.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        got, old = ([x.master, x.mean, x.square] for x in (whole, start))
        for found, exact, before in zip(got, want, old, strict=True):
            assert_close(found[inside], exact[inside], rtol=1e-5, atol=1e-6)
            assert torch.equal(found[~inside], before[~inside])
        # Triton's interpreter cuts bf16 off where the device rounds.
        rtol = 2.0**-7 if path is adamw_triton and dtype == BF16 else 0
        assert_close(whole.weight, whole.master.to(dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("weight", "master", "grad"),
    [
        (FP32, "fp32", FP32),
        (FP16, "fp32", BF16),
        (BF16, "fp32", FP32),
        (BF16, "split", BF16),
        (BF16, "none", FP32),
    ],
)
def test_kernel_equals_twin(weight, master, grad, quantised, monkeypatch):
    """Three updates of all tensors in one launch, bit by bit: the same values of codes, the same random
    bits for the same places. What Adam does in between is the kernel's in both.
    """
    monkeypatch.setattr(adam, "step_of_masters", with_the_kernel)
    want, got = (tensors(master, weight, quantised, grad) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        for one, other in zip(want, got, strict=True):
            values = torch.randn(one.grad.shape, generator=generator) * 8
            one.grad.copy_(values)
            other.grad.copy_(values)
        for path, members in ((adamw_reference, want), (adamw_triton, got)):
            verdict = torch.zeros((), dtype=torch.float64)
            path(members, settings(step, scale=8.0, maximize=step == 2), verdict)
    for one, other in zip(want, got, strict=True):
        if (weight, master) == (BF16, "fp32"):  # the interpreter cuts bits off
            assert_close(one.weight, other.weight, rtol=2.0**-7, atol=0.0)
            other.weight.copy_(one.weight)
    for x, y in zip(written(want), written(got), strict=True):
        assert torch.equal(x, y)


@both_paths
@all_kinds
def test_rows_are_what_they_are_alone(path, kind):
    """A part of a parameter, from a multiple of 64 on, is updated as within the whole; also of none,
    and beside parameters of other dtypes.
    """
    (whole,), (cut,) = (tensors(kind)[-1:] for _ in range(2))
    others = tensors("fp32", FP16, False)
    for step in (1, 2):
        for each in (whole, cut):
            each.grad.copy_(torch.randn(400, generator=torch.Generator().manual_seed(step)))
        path([whole], settings(step))
        bounds = ((0, 128), (128, 192), (192, 192), (192, 400))
        path([*others, *(cut.part(*each) for each in bounds)], settings(step))
        path([], settings(step))
    for one, other in zip(written([whole]), written([cut]), strict=True):
        assert torch.equal(one, other)


@both_paths
@all_kinds
def test_nothing_is_updated_on_a_verdict_that_is_not_finite(path, kind):
    """Bit by bit, though the gradients too are not finite. Optimizers see by versions who has written
    the weights. At rate 0, as in hold_steps, moments alone change: weight decay too is off.
    """
    members = tensors(kind, quantised=kind != "fp32")
    before = [(x.clone(), x._version) for x in written(members)]
    for verdict in (math.nan, math.inf, -math.inf):
        for t in members:
            t.grad.fill_(verdict)
        path(members, settings(), torch.tensor(verdict, dtype=torch.float64))
        for x, (old, _) in zip(written(members), before, strict=True):
            assert torch.equal(x, old)
    for t in members:
        t.grad.fill_(1)
    path(members, settings(), torch.tensor(1e300, dtype=torch.float64))
    for x, (old, version) in zip(written(members), before, strict=True):
        assert not torch.equal(x, old)
        # torch's own operator does not count
        assert x._version > version or (path is adamw_reference and kind == "fp32")
    if kind == "fp32":
        held = [x.clone() for x in written(members)]
        path(members, settings(2, lr=0.0))
        is_held = [*map(torch.equal, written(members), held)]
        assert is_held == [True, True, False, False] * len(members)


@both_paths
@pytest.mark.parametrize("kind", ["split", "none"])
def test_what_is_not_a_number_stays_one(path, kind):
    """Weights that a NaN or an infinity has reached do not become numbers again."""
    t = tensors(kind, quantised=False)[2]
    t.weight[0], t.weight[1], t.weight[2] = math.nan, math.inf, -math.inf
    t.weight.view(torch.int16)[3] = -1  # a NaN of all bits
    path([t], settings())
    assert t.weight[[0, 3]].isnan().all() and not t.weight[4:].isnan().any()
    assert t.weight[1] == math.inf and t.weight[2] == -math.inf
