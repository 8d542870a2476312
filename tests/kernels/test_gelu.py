"""GELU by the logistic function, and its gradient: kernel against twin, twin against plain PyTorch in
fp64.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from tests.tensors import by_kernel, by_torch
from torch.testing import assert_close

from bmtrain.kernels.gelu import PART, gelu, gelu_backward

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_gelu_is_more_exact_than_by_the_tangent(dtype):
    x = torch.linspace(-5.0, 9.0, 4001, dtype=torch.float64).to(dtype)
    # whose own tail is a difference of equal numbers, good to 1e-15 of 1
    want = F.gelu(x.double(), approximate="tanh")
    finfo, got = torch.finfo(dtype), gelu(x)
    assert got.dtype == dtype
    # What precedes the exponential is rounded too, and there it counts as often as it is large.
    rtol = finfo.eps if dtype in (torch.bfloat16, torch.float16) else 64 * finfo.eps
    atol = max(finfo.smallest_normal * finfo.eps, 5e-15)
    assert_close(got.double(), want, rtol=rtol, atol=atol)
    if dtype == torch.float32:
        by_tangent = F.gelu(x, approximate="tanh").double()
        assert float(((by_tangent - want) / want).nan_to_num().abs().max()) > 0.1
        x = torch.tensor([torch.inf, torch.nan, 0.0, -0.0, 60000.0, -60000.0])
        plain = F.gelu(x, approximate="tanh")
        assert_close(gelu(x), plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (PART, 512), (PART + 3, 530), (3, 5)])
def test_kernel_equals_twin(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    eps, parts = torch.finfo(dtype).eps, (-(-shape[0] // PART), shape[1])
    for scale in (1, 3):
        grad, x = (f * torch.randn(shape, generator=generator).to(dtype) for f in (1, scale))
        want = by_torch(gelu_backward, grad, x)
        leaf = x.double().requires_grad_()
        F.gelu(leaf, approximate="tanh").backward(grad.double())
        assert want[0].dtype == dtype and want[1].dtype == torch.float32 and want[1].shape == parts
        assert leaf.grad is not None
        assert_close(want[0].double(), leaf.grad, rtol=2 * eps, atol=1e-5)
        totals = [part.double().sum(0) for part in (want[1], want[0])]
        assert_close(*totals, rtol=1e-5, atol=1e-4)
        if scale == 1:  # the interpreter's numpy tells of the overflow of larger ones
            got = by_kernel(gelu_backward, grad, x)
            # Triton's interpreter cuts bf16 off where the device rounds.
            rtol = (2 if dtype == torch.bfloat16 else 1) * eps
            assert_close(got[0], want[0], rtol=rtol, atol=1e-6)
            assert_close(got[1], want[1], rtol=0, atol=PART * 4 * eps + 1e-4)


def test_nothing_and_strides():
    empty = torch.empty(0, 3)
    for function in (functools.partial(by_kernel, gelu_backward), gelu_backward):
        assert [part.shape for part in function(empty, empty)] == [(0, 3), (0, 3)]
    grad, x = torch.randn(2, 6, 4)
    flat = [each.t().contiguous() for each in (grad, x)]
    assert torch.equal(gelu_backward(grad.t(), x.t())[0], by_torch(gelu_backward, *flat)[0])
    torch.library.opcheck(torch.ops.bmtrain.gelu_backward.default, (grad, x))
