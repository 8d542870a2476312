"""The kernels of the largest number of each row. Imported only where there is a GPU: see
kernels/largest.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def largest_of_parts_kernel(
    x: tl.tensor,
    found: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Each program finds the largest of a part of a row: its bits, turned so that they are ordered
    as integers, above its distance from the end, so that the first of equal ones is the largest.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = part * BLOCK + tl.arange(0, BLOCK)
    there = places < columns
    value = tl.load(x + row * stride + places, there, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -size, size)  # of -0 that of 0
    order = tl.where(size > 0x7F800000, 0x7FFFFFFF, order)  # no number
    both = (order.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)
    best = tl.max(tl.where(there, both, -0x7FFFFFFFFFFFFFFF), 0)
    tl.store(found + row * parts + part, best)


@triton.jit  # type: ignore[untyped-decorator]
def largest_of_rows_kernel(
    found: tl.tensor, out: tl.tensor, parts: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Each program finds the largest of the parts of a row, and stores its place."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    both = tl.load(found + row * parts + i, i < parts, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(both, 0) & 0x7FFFFFFF))
