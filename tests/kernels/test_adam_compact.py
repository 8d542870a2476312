"""The fused kernel for small states against its twin of torch's operators, which tests/unit holds
against AdamW.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from tests.tensors import zeros_on

from bmtrain.kernels import adam_compact
from bmtrain.kernels.adam import AdamSettings, adamw_triton
from bmtrain.kernels.adam_compact import CompactTensors, compact_reference, compact_triton
from bmtrain.kernels.blockwise import Blocks

# Lengths 1, of no whole block, of whole blocks and of several chunks.
SIZES = (1, 63, 64, 65, 128, 192, 400)
STARTS = (0, 64, 128, 0, 640, 2**32 - 128, 0)
KINDS = [
    (torch.float32, "fp32"),
    (torch.float16, "fp32"),
    (torch.bfloat16, "fp32"),
    (torch.bfloat16, "split"),
    (torch.bfloat16, "none"),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of a short tensor."""
    monkeypatch.setattr(adam_compact, "CHUNK", 128)


def tensors(
    weight: torch.dtype, master: str, quantised: bool, grad: torch.dtype
) -> list[CompactTensors]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, (size, start) in enumerate(zip(SIZES, STARTS, strict=True)):
        values = torch.randn(size, generator=generator).to(weight)
        masters = {
            "fp32": values if weight == torch.float32 else values.float(),
            "split": torch.zeros(size, dtype=torch.int16),
            "none": None,
        }
        mean, square = (
            Blocks.zeros(size, dtype, zeros_on("cpu")) if quantised else torch.zeros(size)
            for dtype in (torch.int8, torch.uint8)
        )
        grads = torch.zeros(size, dtype=grad)
        found.append(CompactTensors(values, grads, masters[master], mean, square, number, start))
    return found


def written(members: list[CompactTensors]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for t in members:
        for x in (t.weight, t.master, t.mean, t.square):
            found.extend(x if isinstance(x, Blocks) else [] if x is None else [x])
    return found


def settings(step: int) -> AdamSettings:
    return AdamSettings(
        lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.2, step=step, scale=8.0,
        maximize=step == 2,
    )  # fmt: skip


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("weight", "master"), KINDS)
def test_kernel_equals_twin(
    weight: torch.dtype,
    master: str,
    quantised: bool,
    grad: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three updates of all tensors in one launch, bit by bit: the same values of codes, the same
    random bits for the same places. What Adam does in between is the kernel's in both.
    """
    monkeypatch.setattr(adam_compact, "adamw_update", adamw_triton)
    want, got = (tensors(weight, master, quantised, grad) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        for one, other in zip(want, got, strict=True):
            values = torch.randn(one.grad.shape, generator=generator) * 8
            one.grad.copy_(values)
            other.grad.copy_(values)
        verdict = torch.zeros((), dtype=torch.float64)
        compact_reference(want, settings(step), verdict)
        compact_triton(got, settings(step), verdict)
    for one, other in zip(want, got, strict=True):
        if (weight, master) == (torch.bfloat16, "fp32"):  # the interpreter cuts bits off
            torch.testing.assert_close(one.weight, other.weight, rtol=2.0**-7, atol=0.0)
            other.weight.copy_(one.weight)
    for x, y in zip(written(want), written(got), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("path", [compact_reference, compact_triton])
def test_rows_are_what_they_are_alone(path: Callable[..., None]) -> None:
    """A part of a parameter, from a multiple of 64 on, is updated as within the whole."""
    for kind in ("split", "none"):
        whole, cut = (tensors(torch.bfloat16, kind, True, torch.float32)[-1:] for _ in range(2))
        for step in (1, 2):
            values = torch.randn(400, generator=torch.Generator().manual_seed(step))
            whole[0].grad.copy_(values)
            cut[0].grad.copy_(values)
            path(whole, settings(step))
            path(
                [cut[0].part(0, 128), cut[0].part(128, 192), cut[0].part(192, 400)], settings(step)
            )
        for one, other in zip(written(whole), written(cut), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("verdict", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", [compact_reference, compact_triton])
def test_nothing_is_updated_on_a_verdict_that_is_not_finite(
    path: Callable[..., None], verdict: float
) -> None:
    for kind in ("split", "none"):
        members = tensors(torch.bfloat16, kind, True, torch.float32)
        for t in members:
            t.grad.fill_(verdict)
        before = [x.clone() for x in written(members)]
        path(members, settings(1), torch.tensor(verdict, dtype=torch.float64))
        assert all(map(torch.equal, written(members), before))
        for t in members:
            t.grad.fill_(1)
        versions = [x._version for x in written(members)]
        path(members, settings(1), torch.tensor(1.0, dtype=torch.float64))
        assert not any(map(torch.equal, written(members), before))
        assert all(x._version > one for x, one in zip(written(members), versions, strict=True))


@pytest.mark.parametrize("path", [compact_reference, compact_triton])
def test_what_is_not_a_number_stays_one(path: Callable[..., None]) -> None:
    """Weights that a NaN or an infinity has reached do not become numbers again."""
    for kind in ("split", "none"):
        t = tensors(torch.bfloat16, kind, False, torch.float32)[2]
        t.grad.fill_(1.0)
        t.weight[0], t.weight[1], t.weight[2] = math.nan, math.inf, -math.inf
        t.weight.view(torch.int16)[3] = -1  # a NaN of all bits
        path([t], settings(1))
        assert t.weight[[0, 3]].isnan().all() and not t.weight[4:].isnan().any()
        assert t.weight[1] == math.inf and t.weight[2] == -math.inf


def test_nothing_to_update() -> None:
    for path in (compact_reference, compact_triton):
        path([], settings(1))
        whole = tensors(torch.bfloat16, "split", True, torch.float32)[0]
        path([dataclasses.replace(whole.part(0, 0))], settings(1))
