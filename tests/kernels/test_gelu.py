"""GELU by the logistic function, and its gradient: kernel against twin, twin against plain PyTorch
in fp64.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bmtrain.kernels.gelu import (
    PART,
    gelu,
    gelu_backward,
    gelu_backward_by_triton,
    gelu_backward_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_gelu_is_more_exact_than_by_the_tangent(dtype: torch.dtype) -> None:
    x = torch.linspace(-5.0, 9.0, 4001, dtype=torch.float64).to(dtype)
    # whose own tail is a difference of equal numbers, good to 1e-15 of 1
    want = F.gelu(x.double(), approximate="tanh")
    finfo, got = torch.finfo(dtype), gelu(x)
    assert got.dtype == dtype
    # What precedes the exponential is rounded too, and there it counts as often as it is large.
    rtol = finfo.eps if dtype in (torch.bfloat16, torch.float16) else 64 * finfo.eps
    torch.testing.assert_close(
        got.double(), want, rtol=rtol, atol=max(finfo.smallest_normal * finfo.eps, 5e-15)
    )
    if dtype == torch.float32:
        by_tangent = F.gelu(x, approximate="tanh").double()
        assert float(((by_tangent - want) / want).nan_to_num().abs().max()) > 0.1


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -0.0, 60000.0, -60000.0])
def test_gelu_of_extremes(value: float) -> None:
    x = torch.tensor([value])
    torch.testing.assert_close(
        gelu(x), F.gelu(x, approximate="tanh"), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_the_gradient(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(PART + 5, 70, generator=generator)).to(dtype)
    grad = torch.randn(PART + 5, 70, generator=generator).to(dtype)
    leaf = x.double().requires_grad_()
    (want,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, grad.double())
    got, sums = gelu_backward_reference(grad, x)
    assert got.dtype == dtype and sums.dtype == torch.float32 and sums.shape == (2, 70)
    torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(sums.double().sum(0), got.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (PART, 512), (2 * PART + 3, 1030), (3, 5)])
def test_kernel_equals_twin(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    want, got = gelu_backward_reference(grad, x), gelu_backward_by_triton(grad, x)
    # Triton's interpreter cuts bf16 off where the device rounds.
    rtol = (2 if dtype == torch.bfloat16 else 1) * torch.finfo(dtype).eps
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=1e-6)
    assert got[1].shape == want[1].shape
    torch.testing.assert_close(
        got[1], want[1], rtol=0, atol=PART * 4 * torch.finfo(dtype).eps + 1e-4
    )


def test_nothing_and_strides() -> None:
    empty = torch.empty(0, 3)
    assert [part.shape for part in gelu_backward_by_triton(empty, empty)] == [(0, 3), (0, 3)]
    assert [part.shape for part in gelu_backward(empty, empty)] == [(0, 3), (0, 3)]
    grad, x = torch.randn(6, 4), torch.randn(6, 4)
    assert torch.equal(
        gelu_backward(grad.t(), x.t())[0],
        gelu_backward_reference(grad.t().contiguous(), x.t().contiguous())[0],
    )
    torch.library.opcheck(torch.ops.bmtrain.gelu_backward.default, (grad, x))
