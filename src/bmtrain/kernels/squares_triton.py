"""The kernel that sums squares. Imported only where there is a GPU: see kernels/squares.py."""

from __future__ import annotations

import triton
import triton.language as tl

from bmtrain.kernels.chunks_triton import tensor_at


@triton.jit  # type: ignore[untyped-decorator]
def squares_kernel(
    rows: tl.tensor,
    row_of: tl.tensor,
    found: tl.tensor,
    num_chunks: tl.tensor,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program p sums the squares of chunks p, p + NUM_PROGRAMS, ... into `found[p]`, fp64.

    Squares are accumulated in fp32 twice: as they are, and of elements scaled down. If the first
    sum overflows, the second is used: squares that underflow in it are negligible in the sum.
    """
    program = tl.program_id(0)
    plain = tl.zeros([BLOCK], tl.float32)
    small = tl.zeros([BLOCK], tl.float32)
    for chunk in range(program, num_chunks, NUM_PROGRAMS):
        row = rows + tl.load(row_of + chunk).to(tl.int64) * 3
        n = tl.load(row + 1)
        n = tl.multiple_of(n, 16) if IS_ALIGNED else n
        i = (chunk - tl.load(row + 2)) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(tensor_at(row, 0, DTYPE, IS_ALIGNED) + i, mask=i < n, other=0.0).to(tl.float32)
        plain += x * x
        y = x * 2.0**-80
        small += y * y
    exact = tl.sum(plain, 0)
    total = tl.where(
        exact < float("inf"), exact.to(tl.float64), tl.sum(small, 0).to(tl.float64) * 2.0**160
    )
    tl.store(found + program, total)
