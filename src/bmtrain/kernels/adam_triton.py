"""The fused AdamW kernel. Imported only where there is a GPU: see kernels/adam.py."""

from __future__ import annotations

import triton
import triton.language as tl

from bmtrain.kernels.chunks_triton import tensor_at


@triton.jit  # type: ignore[untyped-decorator]
def adamw(  # noqa: PLR0913 (as below)
    w: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    keep: tl.tensor,
    rate: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    correction2: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The next master weight, mean and square, all fp32."""
    # Each sum names the product that is not rounded: the compiler would choose one in each kernel,
    # and kernels of other forms of the state would give other values.
    m = tl.fma(m, beta1, rest1 * g)
    v = tl.fma(v, beta2, rest2 * g * g)
    change = rate * tl.div_rn(m, tl.sqrt_rn(v / correction2) + eps)
    return tl.fma(w, keep, -change), m, v


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    rows: tl.tensor,
    row_of: tl.tensor,
    verdict: tl.tensor,
    keep: tl.tensor,
    rate: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    correction2: tl.tensor,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One pass over rows of (weight, gradient, master, mean, square), with fp32 arithmetic.

    Reads the gradient and updates the others; leaves them unchanged if `verdict` is NaN or
    infinite.
    """
    chunk = tl.program_id(0)
    row = rows + tl.load(row_of + chunk).to(tl.int64) * 7
    n = tl.load(row + 5)
    if verdict is not None:
        number = tl.load(verdict)
        n = tl.where(tl.abs(number) < float("inf"), n, 0)
    n = tl.multiple_of(n, 16) if IS_ALIGNED else n
    i = (chunk - tl.load(row + 6)) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    master = tensor_at(row, 2, tl.float32, IS_ALIGNED)
    mean = tensor_at(row, 3, tl.float32, IS_ALIGNED)
    square = tensor_at(row, 4, tl.float32, IS_ALIGNED)
    g = tl.load(tensor_at(row, 1, GRAD, IS_ALIGNED) + i, mask=inside).to(tl.float32) * factor
    w = tl.load(master + i, mask=inside)
    m = tl.load(mean + i, mask=inside)
    v = tl.load(square + i, mask=inside)
    w, m, v = adamw(w, m, v, g, keep, rate, beta1, rest1, beta2, rest2, eps, correction2)
    tl.store(mean + i, m, mask=inside)
    tl.store(square + i, v, mask=inside)
    tl.store(master + i, w, mask=inside)
    if tl.float32 != WEIGHT:  # fp32 weights are the master itself, written above
        tl.store(tensor_at(row, 0, WEIGHT, IS_ALIGNED) + i, w.to(WEIGHT), mask=inside)
