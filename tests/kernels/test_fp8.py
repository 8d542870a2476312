"""The transposing kernel of eight-bit products against its twin in plain torch, through Triton's
interpreter.
"""

from __future__ import annotations

import pytest
import torch

from bmtrain.kernels import fp8

SHAPES = [(16, 16), (64, 48), (53, 80), (130, 144), (1, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [fp8.E4M3, fp8.E5M2])
def test_codes_are_transposed(shape: tuple[int, int], kind: torch.dtype) -> None:
    codes, _ = fp8.quantise(torch.randn(*shape, generator=torch.Generator().manual_seed(1)), kind)
    mine, twin = fp8.transposed_triton(codes), fp8.transposed_reference(codes)
    assert mine.dtype == kind
    assert mine.shape == (shape[1], -(-shape[0] // 16) * 16)
    assert torch.equal(mine.view(torch.uint8), twin.view(torch.uint8))
    assert torch.equal(mine.float()[:, : shape[0]], codes.float().t())


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Without those that round to a power of two: Triton's interpreter loses the carry of rounding
    up to one (a GPU does not).
    """
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes, _ = fp8.quantise(x, fp8.E4M3)
    return torch.where(codes.float().abs().log2() % 1 == 0, 0, x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_become_transposed_codes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = numbers(*shape, seed=2, dtype=dtype)
    _, unit = fp8.quantise(x, fp8.E4M3)
    mine, twin = fp8.transposed_triton(x, unit), fp8.transposed_reference(x, unit)
    assert torch.equal(mine.view(torch.uint8), twin.view(torch.uint8))
    assert mine.float().abs().max() == 448
    assert len(mine.float().unique()) > shape[0]


def test_a_strided_tensor_is_taken_too() -> None:
    x = numbers(64, 32, seed=3).t()
    _, unit = fp8.quantise(x, fp8.E4M3)
    assert torch.equal(
        fp8.transposed_triton(x, unit).view(torch.uint8),
        fp8.transposed_reference(x, unit).view(torch.uint8),
    )
