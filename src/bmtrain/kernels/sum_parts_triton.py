"""The kernel that sums parts in rank order.

Imported only where there is a GPU: see kernels/sum_parts.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def sum_parts_kernel(
    total: tl.tensor,
    parts: tl.tensor,
    n: tl.tensor,
    ACCUMULATE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program sums BLOCK elements of all parts in fp32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    result = tl.load(parts + i, mask=inside).to(tl.float32)
    for rank in tl.static_range(1, NUM_RANKS):
        result += tl.load(parts + rank * tl.cast(n, tl.int64) + i, mask=inside).to(tl.float32)
    if ACCUMULATE:
        result += tl.load(total + i, mask=inside).to(tl.float32)
    tl.store(total + i, result.to(total.dtype.element_ty), mask=inside)
