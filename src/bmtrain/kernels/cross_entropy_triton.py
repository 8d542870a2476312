"""Cross entropy kernels, one program per row of logits; see kernels/cross_entropy.py.

Imported only where there is a GPU. Arithmetic is in the dtype of the sums, fp32 or fp64. Offsets
are 64-bit.

Vectorised loads and stores need offsets that are multiples of the vector length, and masks that do
not cut a vector. With an odd vocabulary, a row begins and ends anywhere. So offsets are counted
from the last multiple before the row, which is [first, last) of them. The main loop covers the
whole vectors inside the row; one small extra block covers the rest at both ends, its edges.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Not specialised: no kernel gains from divisibility of these arguments, and each chunk of rows
# would compile its own variants.
SIZES = ["stride", "count"]
PER_ROW = ["highest", "sum_exp", "below", "mass", "smooth", "hit", "column"]

ALIGNMENT = tl.constexpr(16)  # elements
WIDTH = tl.constexpr(8)  # adjacent elements per lane: 16 bytes in half precision


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_ROW)  # type: ignore[untyped-decorator]
def row_sums_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    logits: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    highest: tl.tensor,
    sum_exp: tl.tensor,
    below: tl.tensor,
    weight: tl.tensor,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Maximum, sum of exponentials and weighted sum of each row."""
    row = tl.program_id(0).to(tl.int64)
    start, first = _begin(row * stride)
    h, s, b = _sums(
        logits + start,
        first,
        first + count,
        highest.dtype.element_ty,
        weight,
        WEIGHTED,
        SMOOTHED,
        BLOCK,
    )
    tl.store(highest + row, h)
    tl.store(sum_exp + row, s)
    tl.store(below + row, b)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_ROW)  # type: ignore[untyped-decorator]
def row_gradient_kernel(  # noqa: PLR0913 (as above)
    logits: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    grad: tl.tensor,
    highest: tl.tensor,
    sum_exp: tl.tensor,
    mass: tl.tensor,
    smooth: tl.tensor,
    hit: tl.tensor,
    column: tl.tensor,
    weight: tl.tensor,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient of each row from its sums.

    `grad` has the strides of the logits, and may be the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    start, first = _begin(row * stride)
    own_mass, own_smooth, own_hit = tl.load(mass + row), tl.load(smooth + row), tl.load(hit + row)
    if (own_mass == 0) & (own_smooth == 0) & (own_hit == 0):
        _clear(grad + start, first, first + count, BLOCK)
    else:
        _write_gradient(
            grad + start,
            logits + start,
            first,
            first + count,
            tl.load(highest + row),
            own_mass / tl.load(sum_exp + row),
            own_smooth,
            own_hit,
            tl.load(column + row),
            weight,
            WEIGHTED,
            SMOOTHED,
            BLOCK,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _begin(place: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Round `place` down to a multiple of ALIGNMENT; returns that and the remainder."""
    first = place % ALIGNMENT
    return tl.multiple_of(place - first, ALIGNMENT), first.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _edges(first: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Offsets before a row's first whole vector and after its last; a mask of those inside it."""
    i = tl.arange(0, 2 * ALIGNMENT)
    head = tl.minimum(_body_first(first), last)
    tail = tl.maximum(_body_last(last), head)
    is_head = i < ALIGNMENT
    places = tl.where(is_head, first + i, tail + i - ALIGNMENT)
    return places, places < tl.where(is_head, head, last)


@triton.jit  # type: ignore[untyped-decorator]
def _body_first(first: tl.tensor) -> tl.tensor:
    return (first + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@triton.jit  # type: ignore[untyped-decorator]
def _body_last(last: tl.tensor) -> tl.tensor:
    return last // ALIGNMENT * ALIGNMENT


@triton.jit  # type: ignore[untyped-decorator]
def _weights(
    weight: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    DTYPE: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> tl.tensor:
    """Class weights; 0 outside the row."""
    return (
        tl.load(weight + columns, mask=inside, other=0.0)
        if WEIGHTED
        else tl.where(inside, 1.0, 0.0).to(DTYPE)
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sums(
    row: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    DTYPE: tl.constexpr,
    weight: tl.tensor,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One pass over a row: maximum, sum of exponentials, weighted sum.

    Each lane accumulates its own vectors relative to its own maximum, so that lanes do not
    synchronise until the end. The weighted sum is relative to the row's first logit until then.
    """
    lanes = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    highest = tl.full((BLOCK // WIDTH,), float("-inf"), DTYPE)
    sum_exp = tl.zeros_like(highest)
    below, seen = tl.zeros((BLOCK // WIDTH, WIDTH), DTYPE), tl.zeros((BLOCK // WIDTH, WIDTH), DTYPE)
    # A base that follows the maximum would need `seen` inside the loop. There, Triton 3.6
    # miscompiles a reduction over lanes of an accumulator of loaded values: it reads the
    # accumulator's first value.
    base = tl.load(row + first).to(DTYPE)
    base = tl.where(tl.abs(base) < float("inf"), base, 0.0)
    for start in range(0, last, BLOCK):
        places = start + lanes
        inside = (places >= _body_first(first)) & (places < _body_last(last))
        x = tl.load(row + places, mask=inside, other=float("-inf")).to(DTYPE)
        before, highest = highest, tl.maximum(highest, tl.max(x, 1))
        shift = _finite(highest)
        sum_exp = sum_exp * tl.exp(before - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        if SMOOTHED:
            w = _weights(weight, places - first, inside, DTYPE, WEIGHTED)
            below += w * tl.where(inside, x - base, 0.0)
            seen += w
    places, inside = _edges(first, last)
    x = tl.load(row + places, mask=inside, other=float("-inf")).to(DTYPE)
    top = tl.maximum(tl.max(highest, 0), tl.max(x, 0))
    shift = _finite(top)
    total = tl.sum(sum_exp * tl.exp(highest - shift), 0) + tl.sum(tl.exp(x - shift), 0)
    total_below = tl.zeros_like(total)
    if SMOOTHED:
        w = _weights(weight, places - first, inside, DTYPE, WEIGHTED)
        total_below += tl.sum(tl.sum(below + seen * (base - shift), 1), 0) + tl.sum(
            w * tl.where(inside, x - shift, 0.0), 0
        )
    return top, total, total_below


@triton.jit  # type: ignore[untyped-decorator]
def _finite(highest: tl.tensor) -> tl.tensor:
    """The value to subtract: the maximum, or 0 if all logits are -inf, which would give NaN."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradient(  # noqa: PLR0913 (as above)
    out: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    highest: tl.tensor,
    spread: tl.tensor,
    smooth: tl.tensor,
    hit: tl.tensor,
    column: tl.tensor,
    weight: tl.tensor,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradient of a whole row."""
    for start in range(0, last, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = (places >= _body_first(first)) & (places < _body_last(last))
        _write_places(
            out,
            row,
            places,
            inside,
            first,
            highest,
            spread,
            smooth,
            hit,
            column,
            weight,
            WEIGHTED,
            SMOOTHED,
        )
    places, inside = _edges(first, last)
    _write_places(
        out,
        row,
        places,
        inside,
        first,
        highest,
        spread,
        smooth,
        hit,
        column,
        weight,
        WEIGHTED,
        SMOOTHED,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write_places(  # noqa: PLR0913 (as above)
    out: tl.tensor,
    row: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    highest: tl.tensor,
    spread: tl.tensor,
    smooth: tl.tensor,
    hit: tl.tensor,
    column: tl.tensor,
    weight: tl.tensor,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
) -> None:
    """Write `spread exp(x - highest) - smooth w - [c = column] hit`, rounded once."""
    x = tl.load(row + places, mask=inside, other=float("-inf")).to(highest.dtype)
    grad = spread * tl.exp(x - highest)
    if SMOOTHED:
        grad -= smooth * _weights(weight, places - first, inside, highest.dtype, WEIGHTED)
    grad -= tl.where(places - first == column, hit, 0.0)
    tl.store(out + places, grad.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _clear(out: tl.tensor, first: tl.tensor, last: tl.tensor, BLOCK: tl.constexpr) -> None:
    zero = tl.zeros((), out.dtype.element_ty)
    for start in range(0, last, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(
            out + places, zero, mask=(places >= _body_first(first)) & (places < _body_last(last))
        )
    places, inside = _edges(first, last)
    tl.store(out + places, zero, mask=inside)
