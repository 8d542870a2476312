"""The kernel that multiplies in place. Imported only where there is a GPU: see kernels/scale.py."""

from __future__ import annotations

import triton
import triton.language as tl

from bmtrain.kernels.chunks_triton import tensor_at


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(
    rows: tl.tensor,
    row_of: tl.tensor,
    factor: tl.tensor,
    num_chunks: tl.tensor,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program scales its share of the chunks; none if `factor` is 1."""
    number = tl.load(factor)
    end = tl.where(number == 1.0, 0, num_chunks)
    for chunk in range(tl.program_id(0), end, tl.num_programs(0)):
        row = rows + tl.load(row_of + chunk).to(tl.int64) * 3
        n = tl.load(row + 1)
        n = tl.multiple_of(n, 16) if IS_ALIGNED else n
        i = (chunk - tl.load(row + 2)) * BLOCK + tl.arange(0, BLOCK)
        at = tensor_at(row, 0, DTYPE, IS_ALIGNED) + i
        tl.store(at, (tl.load(at, mask=i < n).to(tl.float32) * number).to(DTYPE), mask=i < n)
