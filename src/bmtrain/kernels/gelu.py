"""GELU in its tanh form by a sigmoid, and its gradient with the column sums for a bias.

`(1 + tanh(u)) / 2` is `sigmoid(2 u)`: one exponential instead of a tanh, which would make a GPU
kernel compute-bound. It is also more accurate where the result is small. The compiler inlines the
forward formula. The gradient has a kernel of its own, since the compiler would read all of it again
to compute the column sums.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).
"""

from __future__ import annotations

import math

import torch

from bmtrain.kernels import launch
from bmtrain.kernels.launch import kernel, tl

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
    (rows, columns), (grad_x, sums) = x.shape, _empty(x)
    if not launch.takes(x):
        wide = x.float()
        square = wide * wide
        share = torch.sigmoid(wide * (LINEAR + CUBIC * square))
        slope = share + wide * share * (1 - share) * (LINEAR + 3 * CUBIC * square)
        grad_x = (grad.float() * slope).to(x.dtype)
        for part, into in enumerate(sums):
            into.copy_(grad_x[part * PART : (part + 1) * PART].float().sum(0))
        return grad_x, sums
    gelu_backward_kernel(
        (sums.shape[0] * -(-columns // BLOCK_COLUMNS),),
        grad,
        x,
        grad_x,
        sums,
        rows,
        columns,
        EVEN=rows % PART == columns % BLOCK_COLUMNS == 0,
        num_warps=8,
    )
    return grad_x, sums


def _empty(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = (x.shape[0] + PART - 1) // PART
    return x.new_empty(x.shape), x.new_empty((parts, x.shape[1]), dtype=torch.float32)


gelu_backward.register_fake(lambda grad, x: _empty(x))


@kernel
def gelu_backward_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    EVEN: tl.constexpr,
) -> None:
    """Each program handles some rows of its columns and writes their sums to a row of `sums`.

    EVEN: whether blocks divide the shape, so that nothing is masked. Every instruction counts:
    beside matrix products the GPU's clock is low.
    """
    blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    columns = tl.program_id(0) % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    first = part * (STEPS * BLOCK_ROWS)
    i = tl.arange(0, BLOCK_ROWS)[:, None] * num_columns + columns[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for step in range(STEPS):
        row = first + step * BLOCK_ROWS
        start = row * num_columns
        if EVEN:
            value = tl.load(x + start + i).to(tl.float32)
            incoming = tl.load(grad + start + i).to(tl.float32)
        else:
            inside = (row + tl.arange(0, BLOCK_ROWS) < num_rows)[:, None] & (columns < num_columns)[
                None, :
            ]
            value = tl.load(x + start + i, inside, other=0.0).to(tl.float32)
            incoming = tl.load(grad + start + i, inside, other=0.0).to(tl.float32)
        square = value * value
        share = 1 / (1 + tl.exp(-value * (LINEAR + CUBIC * square)))
        slope = share + value * share * (1 - share) * (LINEAR + 3 * CUBIC * square)
        result = (incoming * slope).to(grad_x.dtype.element_ty)
        if EVEN:
            tl.store(grad_x + start + i, result)
        else:
            tl.store(grad_x + start + i, result, inside)
        total += result.to(tl.float32)
    tl.store(sums + part * num_columns + columns, tl.sum(total, 0), columns < num_columns)
