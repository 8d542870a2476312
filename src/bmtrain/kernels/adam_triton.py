"""The fused AdamW kernel. Imported only where there is a GPU: see kernels/adam.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    weight, master, mean, square, grad, n, lr, beta1, beta2, eps, weight_decay, factor, correction1, correction2, BLOCK: tl.constexpr
):
    """One pass: gradient in; master, both moments and the rounded weight out. Arithmetic in fp32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(grad + i, mask=inside).to(tl.float32) * factor
    w = tl.load(master + i, mask=inside)
    m = tl.load(mean + i, mask=inside)
    v = tl.load(square + i, mask=inside)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w = w * (1 - lr * weight_decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(mean + i, m, mask=inside)
    tl.store(square + i, v, mask=inside)
    tl.store(master + i, w, mask=inside)
    tl.store(weight + i, w.to(weight.dtype.element_ty), mask=inside)
