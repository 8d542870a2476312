"""The kernel that multiplies and converts.

Imported only where there is a GPU: see kernels/scale_to.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def scale_to_kernel(
    out: tl.tensor, tensor: tl.tensor, factor: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Each program converts BLOCK elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    product = tl.load(tensor + i, mask=inside) * tl.load(factor)
    tl.store(out + i, product.to(out.dtype.element_ty), mask=inside)
