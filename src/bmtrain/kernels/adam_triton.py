"""The fused AdamW kernel. Imported only where there is a GPU: see kernels/adam.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    weight: tl.tensor, master: tl.tensor, mean: tl.tensor, square: tl.tensor, grad: tl.tensor, n: tl.tensor,
    keep: tl.tensor, rate: tl.tensor, beta1: tl.tensor, rest1: tl.tensor, beta2: tl.tensor, rest2: tl.tensor,
    eps: tl.tensor, factor: tl.tensor, correction2: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One pass: gradient in; master, both moments and the rounded weight out. Arithmetic in fp32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(grad + i, mask=inside).to(tl.float32) * factor
    w = tl.load(master + i, mask=inside)
    m = tl.load(mean + i, mask=inside)
    v = tl.load(square + i, mask=inside)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w * keep - rate * tl.div_rn(m, tl.sqrt_rn(v / correction2) + eps)
    tl.store(mean + i, m, mask=inside)
    tl.store(square + i, v, mask=inside)
    tl.store(master + i, w, mask=inside)
    tl.store(weight + i, w.to(weight.dtype.element_ty), mask=inside)
