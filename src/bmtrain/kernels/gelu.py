"""GELU in its tanh form by a sigmoid, and its gradient with the column sums for a bias.

`(1 + tanh(u)) / 2` is `sigmoid(2 u)`: one exponential instead of a tanh, which would make a GPU
kernel compute-bound. It is also more accurate where the result is small. The compiler inlines the
forward formula. The gradient has a kernel of its own, since the compiler would read all of it again
to compute the column sums.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from bmtrain.kernels.chunks import launching_on

# The argument of the sigmoid is x (LINEAR + CUBIC x^2).
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR
# A program handles BLOCK_COLUMNS columns of STEPS times BLOCK_ROWS rows. Tuned on an H200: 4.0
# TB/s.
BLOCK_ROWS, BLOCK_COLUMNS, STEPS = 2, 512, 32
PART = BLOCK_ROWS * STEPS


def gelu(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x, approximate="tanh")` of any shape, in fp32 (fp64 for fp64), rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.sigmoid(wide * (LINEAR + CUBIC * (wide * wide)))).to(x.dtype)


@torch.library.custom_op(
    "bmtrain::gelu_backward", mutates_args=(), schema="(Tensor grad, Tensor x) -> (Tensor, Tensor)"
)
def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `x` from that of `gelu(x)`, and its column sums.

    Args:
        grad: (rows, n) in fp32, fp16 or bf16.
        x: the same.

    Returns:
        The gradient (rows, n) in the dtype of x; and partial sums (parts, n) in fp32, each over
        PART rows of the rounded gradient, in a fixed order.
    """
    grad, x = grad.contiguous(), x.contiguous()
    return (
        gelu_backward_reference(grad, x)
        if x.device.type == "cpu"
        else gelu_backward_by_triton(grad, x)
    )


@gelu_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty((_parts(x.shape[0]), x.shape[1]), dtype=torch.float32)


def _parts(rows: int) -> int:
    return (rows + PART - 1) // PART


def gelu_backward_reference(
    grad: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gelu_backward` by the formula."""
    wide = x.float()
    square = wide * wide
    share = torch.sigmoid(wide * (LINEAR + CUBIC * square))
    slope = share + wide * share * (1 - share) * (LINEAR + 3 * CUBIC * square)
    grad_x = (grad.float() * slope).to(x.dtype)
    sums = [grad_x[start : start + PART].float().sum(0) for start in range(0, x.shape[0], PART)]
    return grad_x, torch.stack(sums) if sums else x.new_empty((0, x.shape[1]), dtype=torch.float32)


def gelu_backward_by_triton(
    grad: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gelu_backward` in one kernel that reads each element once."""
    rows, columns = x.shape
    grad_x, sums = torch.empty_like(x), x.new_empty((_parts(rows), columns), dtype=torch.float32)
    if x.numel():
        grid = (_parts(rows) * -(-columns // BLOCK_COLUMNS),)
        with launching_on(x.device):
            _triton_kernel()[grid](
                grad,
                x,
                grad_x,
                sums,
                rows,
                columns,
                LINEAR=LINEAR,
                CUBIC=CUBIC,
                EVEN=rows % PART == columns % BLOCK_COLUMNS == 0,
                STEPS=STEPS,
                BLOCK_ROWS=BLOCK_ROWS,
                BLOCK_COLUMNS=BLOCK_COLUMNS,
                num_warps=8,
            )
    return grad_x, sums


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.gelu_triton import gelu_backward_kernel

    return gelu_backward_kernel
