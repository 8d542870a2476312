"""The place of the largest number of each row, by many programs for each.

torch gives a row to one block of threads, which takes as long for the scores of a large vocabulary
as several layers of a small model do for one token.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import launching_on

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
    with launching_on(x.device):
        of_parts, of_rows = _triton_kernels()
        of_parts[(rows, parts)](x, found, columns, x.stride(0), parts, BLOCK=BLOCK, num_warps=4)
        block = 1 << (parts - 1).bit_length()
        of_rows[(rows,)](found, out, parts, BLOCK=block, num_warps=1)
    return out


@functools.cache
def _triton_kernels() -> tuple[Any, Any]:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.largest_triton import largest_of_parts_kernel, largest_of_rows_kernel

    return largest_of_parts_kernel, largest_of_rows_kernel
