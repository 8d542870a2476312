"""The place of the largest number of each row, by many programs for each.

torch gives a row to one block of threads, which takes as long for the scores of a large vocabulary
as several layers of a small model do for one token.
"""

from __future__ import annotations

import torch

from bmtrain.kernels.launch import kernel, tl

#: columns of a program
BLOCK = 2048
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def largest(x: torch.Tensor) -> torch.Tensor:
    """`x.argmax(-1)`, int64 (rows,), of (rows, columns) in any dtype: the first of equal ones, and
    the first that is not a number if there is one.
    """
    is_here = x.device.type == "cpu" or x.dtype not in DTYPES
    return x.argmax(-1) if is_here else largest_by_triton(x)


def largest_by_triton(x: torch.Tensor) -> torch.Tensor:
    """`largest` in two kernels: of parts of rows, then of rows."""
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = -(-columns // BLOCK)
    found = x.new_empty((rows, parts), dtype=torch.int64)
    out = x.new_empty(rows, dtype=torch.int64)
    if rows == 0 or columns == 0:
        return x.argmax(-1)  # which tells what is wrong, if anything is
    sizes = columns, x.stride(0), parts
    largest_of_parts_kernel((rows, parts), x, found, *sizes, BLOCK=BLOCK, num_warps=4)
    block = 1 << (parts - 1).bit_length()
    largest_of_rows_kernel((rows,), found, out, parts, BLOCK=block, num_warps=1)
    return out


@kernel
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


@kernel
def largest_of_rows_kernel(
    found: tl.tensor, out: tl.tensor, parts: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Each program finds the largest of the parts of a row, and stores its place."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    both = tl.load(found + row * parts + i, i < parts, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(both, 0) & 0x7FFFFFFF))
