"""The kernel of products of one row. Imported only where there is a GPU: see
kernels/row_products.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bmtrain.kernels.gated_triton import activated


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(base: tl.tensor, i: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Elements `i`, in fp32."""
    return tl.load(base + i, inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tensor:
    """The row times rows `first` and following of `weight`, plus bias.

    The norm's factor is found beside the product, and multiplied in at the end: nothing waits for
    it.
    """
    rows = first + tl.arange(0, BLOCK_OUT)
    there = rows < size
    begin = rows.to(tl.int64)[:, None] * COLUMNS
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        inside = columns < COLUMNS
        w = _loaded(weight, begin + columns[None, :], there[:, None] & inside[None, :])
        row = _loaded(x, columns, inside)
        if norm is not None:
            squares += row * row
            row *= _loaded(norm, columns, inside)
        total += w * row[None, :]
    result = tl.sum(total, 1)
    if norm is not None:
        result *= 1 / tl.sqrt_rn(tl.sum(squares, 0) / COLUMNS + eps)
    if bias is not None:
        result += _loaded(bias, rows, there)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    result: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    BLOCK_OUT: tl.constexpr,
) -> None:
    """Add the residual, and store."""
    rows = first + tl.arange(0, BLOCK_OUT)
    there = rows < size
    if residual is not None:
        result += _loaded(residual, rows, there)
    tl.store(out + rows, result.to(out.dtype.element_ty), there)


@triton.jit  # type: ignore[untyped-decorator]
def row_products_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight_0: tl.tensor,
    weight_1: tl.tensor,
    weight_2: tl.tensor,
    bias_0: tl.tensor,
    bias_1: tl.tensor,
    bias_2: tl.tensor,
    size_0: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    IS_GATED: tl.constexpr,
    ACT: tl.constexpr,
    LINEAR: tl.constexpr,
    CUBIC: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    """Each program multiplies the row with BLOCK_OUT rows of a weight, or of both of a gate.

    Branches, not a pointer that is chosen: so the compiler knows how each argument is aligned.
    """
    first = tl.program_id(0) * BLOCK_OUT
    end_0 = tl.cdiv(size_0, BLOCK_OUT) * BLOCK_OUT
    end_1 = end_0 + tl.cdiv(size_1, BLOCK_OUT) * BLOCK_OUT
    if IS_GATED or weight_1 is None:
        y = _product(x, norm, eps, weight_0, bias_0, first, size_0, COLUMNS, BLOCK_OUT, BLOCK_IN)
        if ACT is not None:
            y = activated(y, ACT, LINEAR, CUBIC)
        if IS_GATED:
            y *= _product(
                x, norm, eps, weight_1, bias_1, first, size_0, COLUMNS, BLOCK_OUT, BLOCK_IN
            )
        _store(y, residual, out, first, size_0, BLOCK_OUT)
    elif first < end_0:
        y = _product(x, norm, eps, weight_0, bias_0, first, size_0, COLUMNS, BLOCK_OUT, BLOCK_IN)
        _store(y, None, out, first, size_0, BLOCK_OUT)
    elif first < end_1:
        first -= end_0
        y = _product(x, norm, eps, weight_1, bias_1, first, size_1, COLUMNS, BLOCK_OUT, BLOCK_IN)
        _store(y, None, out + size_0, first, size_1, BLOCK_OUT)
    elif weight_2 is not None:
        first -= end_1
        y = _product(x, norm, eps, weight_2, bias_2, first, size_2, COLUMNS, BLOCK_OUT, BLOCK_IN)
        _store(y, None, out + size_0 + size_1, first, size_2, BLOCK_OUT)
