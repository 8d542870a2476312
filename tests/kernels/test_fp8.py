"""The transposing kernel of eight-bit products against its twin in plain torch."""

import pytest
import torch
from tests.tensors import by_kernel, by_torch

from bmtrain.kernels import fp8


def numbers(*shape, dtype=torch.float32):
    """Without those that round to a power of two: Triton's interpreter loses the carry of rounding up
    to one (a GPU does not).
    """
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    codes, _ = fp8.quantise(x, fp8.E4M3)
    return torch.where(codes.float().abs().log2() % 1 == 0, 0, x)


def transposed(x, unit=None):
    """By the kernel; bit by bit the twin's."""
    mine, twin = by_kernel(fp8.transposed, x, unit), by_torch(fp8.transposed, x, unit)
    assert torch.equal(mine.view(torch.uint8), twin.view(torch.uint8))
    assert mine.dtype == twin.dtype
    return mine.float()


@pytest.mark.parametrize("shape", [(64, 48), (53, 80), (130, 144), (1, 16)])
def test_codes_are_transposed(shape):
    """And so are the codes of numbers, in one step."""
    for kind in (fp8.E4M3, fp8.E5M2):
        codes, _ = fp8.quantise(numbers(*shape), kind)
        mine = transposed(codes)
        assert mine.shape == (shape[1], -(-shape[0] // 16) * 16)
        assert torch.equal(mine[:, : shape[0]], codes.float().t())
        assert not mine[:, shape[0] :].any()
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers(*shape, dtype=dtype)
        codes, unit = fp8.quantise(x, fp8.E4M3)
        mine = transposed(x, unit)
        assert torch.equal(mine[:, : shape[0]], codes.float().t())
        assert mine.abs().max() == 448 and len(mine.unique()) > shape[0]


def test_a_strided_tensor_is_taken_too():
    x = numbers(64, 32).t()
    transposed(x, fp8.quantise(x, fp8.E4M3)[1])
