"""The kernels of norms and of their gradients.

Imported only where there is a GPU: see kernels/norm.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _sum(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """The sum over COUNT tensors of their elements `i`, in fp32."""
    total = tl.load(first + i, inside, other=0.0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(second + i, inside, other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(third + i, inside, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    input_0: tl.tensor,
    input_1: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    result: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    num_rows: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program handles every num_programs-th row, and holds a whole row at a time."""
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    scale = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, inside, other=0.0).to(tl.float32)
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        i = tl.cast(row, tl.int64) * n + columns
        x = _sum(input_0, input_1, input_1, i, inside, NUM_INPUTS)
        if NUM_INPUTS > 1:
            rounded = x.to(total.dtype.element_ty)
            tl.store(total + i, rounded, inside)
            x = rounded.to(tl.float32)
        if CENTERED:
            center = tl.sum(x, 0) / n
            tl.store(mean + row, center)
            x = tl.where(inside, x - center, 0.0)
        factor = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / n + eps)
        tl.store(rstd + row, factor)
        normed = x * factor * scale
        if HAS_BIAS:
            normed += shift
        tl.store(result + i, normed.to(result.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def norm_backward_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    grad_0: tl.tensor,
    grad_1: tl.tensor,
    grad_2: tl.tensor,
    input_0: tl.tensor,
    input_1: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    result: tl.tensor,
    sums: tl.tensor,
    more: tl.tensor,
    num_rows: tl.tensor,
    n: tl.tensor,
    NUM_GRADS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SUMS_RESULT: tl.constexpr,
    SUMS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Each program handles every num_programs-th row, and writes the sums of its rows."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    scale = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    weight_total = tl.zeros([BLOCK], tl.float32)
    bias_total = tl.zeros([BLOCK], tl.float32)
    result_total = tl.zeros([BLOCK], tl.float32)
    residual_total = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(part, num_rows, parts, num_stages=STAGES):
        i = tl.cast(row, tl.int64) * n + columns
        grad = _sum(grad_0, grad_1, grad_2, i, inside, NUM_GRADS)
        normed = _sum(input_0, input_1, input_1, i, inside, NUM_INPUTS)
        factor = tl.load(rstd + row).to(tl.float32)
        if CENTERED:
            normed -= tl.load(mean + row).to(tl.float32)
        normed *= factor
        weighted = grad * scale  # 0 beyond the row
        slope = weighted - normed * (tl.sum(weighted * normed, 0) / n)
        if CENTERED:
            slope -= tl.sum(weighted, 0) / n
        slope *= factor
        if HAS_RESIDUAL:
            added = tl.load(residual + i, inside, other=0.0).to(tl.float32)
            slope += added
            if SUMS_RESIDUAL:
                residual_total += added
        rounded = slope.to(result.dtype.element_ty)
        tl.store(result + i, rounded, inside)
        weight_total += grad * normed
        bias_total += grad
        if SUMS_RESULT:
            result_total += rounded.to(tl.float32)
    i = part * n + columns
    tl.store(sums + i, weight_total, inside)
    tl.store(sums + parts * n + i, bias_total, inside)
    if SUMS_RESULT:
        tl.store(more + i, result_total, inside)
        more += parts * n
    if SUMS_RESIDUAL:
        tl.store(more + i, residual_total, inside)
