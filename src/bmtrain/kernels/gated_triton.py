"""The kernel of gated activations. Imported only where there is a GPU: see kernels/gated.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def activated(
    x: tl.tensor, ACT: tl.constexpr, LINEAR: tl.constexpr, CUBIC: tl.constexpr
) -> tl.tensor:
    """The activation of this name, of fp32; LINEAR and CUBIC as in kernels/gelu.py."""
    if ACT == "relu":
        y = tl.maximum(x, 0.0)
    elif ACT == "silu":
        y = x / (1 + tl.exp(-x))
    elif ACT == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        y = x / (1 + tl.exp(-x * (LINEAR + CUBIC * x * x)))
    return y


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    ACT: tl.constexpr,
    LINEAR: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program computes BLOCK elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(gate + i, inside, other=0.0).to(tl.float32)
    y = activated(x, ACT, LINEAR, CUBIC) * tl.load(up + i, inside, other=0.0).to(tl.float32)
    tl.store(out + i, y.to(out.dtype.element_ty), inside)
