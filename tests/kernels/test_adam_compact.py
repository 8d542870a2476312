"""The fused kernel for small states against its twin of torch's operators, which tests/unit holds against
AdamW.
"""

import math

import pytest
import torch
from tests.tensors import zeros_on

from bmtrain.kernels import adam
from bmtrain.kernels.adam import AdamSettings, AdamTensors, adamw_reference, adamw_triton
from bmtrain.kernels.blockwise import Blocks

# Lengths 1, of no whole block, of whole blocks and of several chunks, and where they start.
SIZES = {1: 0, 63: 64, 64: 128, 192: 2**32 - 128, 400: 0}
BF16, FP32 = torch.bfloat16, torch.float32
PATHS = adamw_reference, adamw_triton
both_paths = pytest.mark.parametrize("path", PATHS)
both_kinds = pytest.mark.parametrize("kind", ["split", "none"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of a short tensor."""
    monkeypatch.setattr(adam, "CHUNK", 128)


def tensors(master, weight=BF16, quantised=True, grad=FP32, sizes=SIZES, device="cpu"):
    generator = torch.Generator(device).manual_seed(0)
    found = []
    for number, (size, start) in enumerate(sizes.items()):
        values = torch.randn(size, generator=generator, device=device).to(weight)
        masters = {
            "fp32": values if weight == FP32 else values.float(),
            "split": torch.zeros(size, dtype=torch.int16, device=device),
            "none": None,
        }
        mean, square = (
            Blocks.zeros(size, dtype, zeros_on(device))
            if quantised
            else torch.zeros(size, device=device)
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


def settings(step=1):
    values = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.2}
    return AdamSettings(**values, step=step, scale=8.0, maximize=step == 2)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("weight", "master", "grad"),
    [
        (FP32, "fp32", FP32),
        (torch.float16, "fp32", BF16),
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
        verdict = torch.zeros((), dtype=torch.float64)
        adamw_reference(want, settings(step), verdict)
        adamw_triton(got, settings(step), verdict)
    for one, other in zip(want, got, strict=True):
        if (weight, master) == (BF16, "fp32"):  # the interpreter cuts bits off
            torch.testing.assert_close(one.weight, other.weight, rtol=2.0**-7, atol=0.0)
            other.weight.copy_(one.weight)
    for x, y in zip(written(want), written(got), strict=True):
        assert torch.equal(x, y)


@both_paths
@both_kinds
def test_rows_are_what_they_are_alone(path, kind):
    """A part of a parameter, from a multiple of 64 on, is updated as within the whole; also of none."""
    (whole,), (cut,) = (tensors(kind)[-1:] for _ in range(2))
    for step in (1, 2):
        for each in (whole, cut):
            each.grad.copy_(torch.randn(400, generator=torch.Generator().manual_seed(step)))
        path([whole], settings(step))
        bounds = ((0, 128), (128, 192), (192, 192), (192, 400))
        path([cut.part(*each) for each in bounds], settings(step))
        path([], settings(step))
    for one, other in zip(written([whole]), written([cut]), strict=True):
        assert torch.equal(one, other)


@both_paths
@both_kinds
def test_nothing_is_updated_on_a_verdict_that_is_not_finite(path, kind):
    members = tensors(kind)
    before = [(x.clone(), x._version) for x in written(members)]
    for verdict in (math.nan, math.inf, -math.inf):
        for t in members:
            t.grad.fill_(verdict)
        path(members, settings(), torch.tensor(verdict, dtype=torch.float64))
        assert all(
            torch.equal(x, old) for x, (old, _) in zip(written(members), before, strict=True)
        )
    for t in members:
        t.grad.fill_(1)
    path(members, settings(), torch.tensor(1.0, dtype=torch.float64))
    for x, (old, version) in zip(written(members), before, strict=True):
        assert not torch.equal(x, old) and x._version > version


@both_paths
@both_kinds
def test_what_is_not_a_number_stays_one(path, kind):
    """Weights that a NaN or an infinity has reached do not become numbers again."""
    t = tensors(kind, quantised=False)[2]
    t.weight[0], t.weight[1], t.weight[2] = math.nan, math.inf, -math.inf
    t.weight.view(torch.int16)[3] = -1  # a NaN of all bits
    path([t], settings())
    assert t.weight[[0, 3]].isnan().all() and not t.weight[4:].isnan().any()
    assert t.weight[1] == math.inf and t.weight[2] == -math.inf
