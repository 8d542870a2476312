"""The kernel of GELU's gradient. Imported only where there is a GPU: see kernels/gelu.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def gelu_backward_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    grad: tl.tensor,
    x: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    LINEAR: tl.constexpr,
    CUBIC: tl.constexpr,
    EVEN: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
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
