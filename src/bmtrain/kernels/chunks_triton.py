"""Reading the table of kernels/chunks.py in a kernel. Imported only where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit  # type: ignore[untyped-decorator]
def tensor_at(
    row: tl.tensor, column: tl.constexpr, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr
) -> tl.tensor:
    """The pointer in one column of a row."""
    pointer = tl.load(row + column).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer
