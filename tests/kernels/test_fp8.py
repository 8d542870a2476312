"""The kernel that quantises for eight-bit products against its twin in plain torch, through Triton's
interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from bmtrain.kernels import fp8

SHAPES = [(16, 16), (64, 48), (53, 80), (130, 144), (1, 16)]
KINDS = [fp8.E4M3, fp8.E5M2]


def numbers(
    *shape: int, seed: int, kind: torch.dtype = fp8.E4M3, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Without those that round to a power of two: Triton's interpreter loses the carry of rounding
    up to one (a GPU does not).
    """
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes, _ = fp8.quantise(x, kind)
    return torch.where(codes.float().abs().log2() % 1 == 0, 0, x)


def same(mine: fp8.Encoded, twin: fp8.Encoded) -> None:
    for one, other in zip(mine[:2], twin[:2], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    torch.testing.assert_close(mine[2], twin[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_its_twin(
    shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype
) -> None:
    x = numbers(*shape, seed=2, kind=kind, dtype=dtype)
    wanted = fp8.Encoding(x, fp8.unit_of(x, kind), kind, True, True, True)
    mine, twin = fp8.encode_by_triton(wanted), fp8.encode_reference(wanted)
    same(mine, twin)
    codes, turned, sums = mine
    assert turned.shape == (shape[1], -(-shape[0] // 16) * 16)
    assert torch.equal(codes.float(), fp8.quantise(x, kind)[0].float())
    assert torch.equal(turned.float()[:, : shape[0]], codes.float().t())
    assert turned.float()[:, shape[0] :].abs().sum() == 0
    torch.testing.assert_close(sums.sum(0), x.float().sum(0), rtol=1e-5, atol=1e-4)
    assert len(codes.float().unique()) > shape[0] ** 0.5


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
def test_what_is_not_wanted_is_not_made(wanted: tuple[bool, bool, bool]) -> None:
    x = numbers(150, 32, seed=4)
    unit = fp8.unit_of(x, fp8.E4M3)
    every = fp8.encode(x, unit, fp8.E4M3, True, True, True)
    case = fp8.Encoding(x, unit, fp8.E4M3, *wanted)
    for found in (fp8.encode_by_triton(case), fp8.encode_reference(case)):
        for asked, one, whole in zip(wanted, found, every, strict=True):
            assert one.shape == (whole.shape if asked else (0, whole.shape[1]))
            if asked:
                torch.testing.assert_close(one.float(), whole.float(), rtol=1e-5, atol=1e-5)


def test_a_strided_tensor_is_taken_too() -> None:
    x = numbers(64, 32, seed=3).t()
    case = fp8.Encoding(x, fp8.unit_of(x, fp8.E4M3), fp8.E4M3, True, True, True)
    same(fp8.encode_by_triton(case), fp8.encode_reference(case))
