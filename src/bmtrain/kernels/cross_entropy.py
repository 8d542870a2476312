"""Sums over the classes of each row of logits, and the gradient of its cross entropy.

With logits x (rows, columns), class weights w (1 by default) and p_c = exp(x_c - m) / s, where m =
max_c x_c and s = sum_c exp(x_c - m), the gradient of a row's loss is

    mass p_c - smooth w_c - [c = column] hit

for three numbers per row that the caller chooses (`RowFactors`). log s is never added to m: next to
a large m it would lose its digits. Arithmetic is in fp32, or fp64 for fp64 logits; a gradient is
rounded to its dtype once.

On a GPU, one Triton kernel reads each logit once for the sums, and another once for the gradient.
On a CPU, and with label smoothing, plain torch works through chunks of rows. Under torch.compile it
does so with a single chunk, which the compiler fuses into kernels as fast as these.

Source of the one-pass sums: Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from bmtrain.kernels import launch
from bmtrain.kernels.launch import Kernel, kernel, tl

# Elements of the plain-torch path's fp32 scratch: 1 MiB stays in a CPU's cache, and 64 MiB occupy a
# GPU.
CHUNK_NUMEL, GPU_CHUNK_NUMEL = 2**18, 2**24
# Columns that one program of a kernel reads at a time, and its number of warps.
BLOCK, WARPS = 2048, 4


class RowSums(NamedTuple):
    """Sums of each row, each (rows,) in the arithmetic dtype.

    Attributes:
        highest: m, the maximum. Where it is -inf, the other sums are relative to 0 instead of m.
        sum_exp: s, the sum of exp(x_c - m).
        below: sum_c w_c (x_c - m); zero unless requested.
    """

    highest: torch.Tensor
    sum_exp: torch.Tensor
    below: torch.Tensor


class RowFactors(NamedTuple):
    """Coefficients of each row's gradient: see the top of the file.

    A row of three zeros has a zero gradient, whatever its logits.

    Attributes:
        mass, smooth, hit: (rows,) in the arithmetic dtype; without smoothing, `smooth` may be any
            of the others.
        column: (rows,) int64; -1 for a row whose class is in none of the columns here.
    """

    mass: torch.Tensor
    smooth: torch.Tensor
    hit: torch.Tensor
    column: torch.Tensor


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The arithmetic dtype for logits of `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sums(logits: torch.Tensor, weight: torch.Tensor | None, *, smoothed: bool) -> RowSums:
    """Sums over the columns of logits (rows, columns), of any floating dtype and strides.

    Args:
        logits: read only.
        weight: class weights (columns,) in the arithmetic dtype; None for 1 each.
        smoothed: whether to compute `below`.
    """
    dtype = arithmetic(logits.dtype)
    if launch.takes(logits) and not (smoothed or torch.compiler.is_compiling()):
        logits = _in_rows(logits)
        num_rows, num_columns = logits.shape
        numbers = torch.zeros(3, num_rows, dtype=dtype, device=logits.device)
        sums = RowSums(*numbers.unbind(0))
        read = logits, logits.stride(0), num_columns, sums.highest, sums.sum_exp
        row_sums_kernel((num_rows,), *read, BLOCK=BLOCK, num_warps=WARPS)
        return sums
    highest = logits.amax(1).to(dtype)
    sum_exp, below = torch.empty_like(highest), torch.zeros_like(highest)
    # If all columns are masked, m is -inf and x - m is NaN. Subtracting 0 instead gives exp(x) = 0.
    shift = torch.where(highest == -torch.inf, 0.0, highest)
    for rows in _row_chunks(logits):
        # `sub` of two dtypes computes in the wider one without a converted copy of the logits.
        differences = torch.sub(logits[rows], shift[rows, None])
        if smoothed:
            below[rows] = differences.sum(1) if weight is None else (differences * weight).sum(1)
        sum_exp[rows] = differences.exp_().sum(1)
    return RowSums(highest, sum_exp, below)


def row_gradient(
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
    in_place: bool = False,
) -> torch.Tensor:
    """The gradient (rows, columns) of logits, in their dtype.

    Args:
        logits, weight: as for `row_sums`.
        sums: over all columns of each row, including any that are not in `logits`.
        factors: see RowFactors.
        smoothed: whether `smooth` is used.
        in_place: whether to overwrite the logits, whose rows must be contiguous then.
    """
    out = logits
    mass, smooth, hit, column = factors
    if launch.takes(logits) and not (smoothed or torch.compiler.is_compiling()):
        if not in_place:
            logits = _in_rows(logits)
            shape, strides = logits.shape, logits.stride()
            out = torch.empty_strided(shape, strides, dtype=logits.dtype, device=logits.device)
        num_rows, num_columns = logits.shape
        read = logits, logits.stride(0), num_columns, out, sums.highest, sums.sum_exp
        of_rows = mass, hit, column
        row_gradient_kernel((num_rows,), *read, *of_rows, BLOCK=BLOCK, num_warps=WARPS)
        if in_place:
            torch.autograd.graph.increment_version(logits)
        return out
    if not in_place:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    spread = mass / sums.sum_exp
    # Masked, not multiplied by zero: that would turn an infinite logit into NaN.
    unwanted = (mass == 0) & (smooth == 0) & (hit == 0)
    # The target's column is computed separately in fp32 and written over the result. Subtracting
    # from the stored half-precision gradient would round twice, and would need the fp32 one-hot
    # matrix that this file avoids.
    here, place = column >= 0, column.clamp(min=0)
    at_target = spread * torch.exp(score(logits, place) - sums.highest) - hit
    if smoothed:
        at_target -= smooth if weight is None else smooth * weight[place]
    for rows in _row_chunks(logits):
        part = torch.sub(logits[rows], sums.highest[rows, None]).exp_().mul_(spread[rows, None])
        if smoothed:
            part -= smooth[rows, None] if weight is None else smooth[rows, None] * weight
        out[rows] = part.masked_fill_(unwanted[rows, None], 0.0)
    at_target = torch.where(here & ~unwanted, at_target, score(out, place))
    return out.scatter_(1, place[:, None], at_target.to(out.dtype)[:, None])


def score(logits: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The logit (rows,) of one column of each row, in the arithmetic dtype."""
    return logits.gather(1, column[:, None])[:, 0].to(arithmetic(logits.dtype))


def _row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that bound the fp32 scratch; one under torch.compile, which fuses it away."""
    num_rows, num_columns = logits.shape
    if torch.compiler.is_compiling():
        yield slice(0, num_rows)
        return
    most = CHUNK_NUMEL if logits.device.type == "cpu" else GPU_CHUNK_NUMEL
    step = max(1, most // num_columns)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


# Triton


# Vectorised loads and stores need offsets that are multiples of the vector length, and masks that
# do not cut a vector. With an odd vocabulary, a row begins and ends anywhere. So offsets are
# counted from the last multiple before the row, which is [first, last) of them. The main loop
# covers the whole vectors inside the row; one small extra block covers the rest at both ends, its
# edges.
# Arithmetic is in the dtype of the sums, fp32 or fp64. Offsets are 64-bit.
ALIGNMENT = 16  # elements
WIDTH = 8  # adjacent elements per lane: 16 bytes in half precision

# Not specialised: no kernel gains from divisibility of these arguments, and each chunk of rows
# would compile its own variants.
SIZES = ["stride", "count"]
PER_ROW = ["highest", "sum_exp", "mass", "hit", "column"]


def _in_rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits with contiguous rows and little space between them: the same tensor, or a copy."""
    stride, num_columns = logits.stride(0), logits.shape[1]
    is_dense = logits.stride(1) == 1 and num_columns <= stride < 2 * num_columns
    return logits if is_dense else logits.contiguous()


@functools.partial(Kernel, do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_ROW)
def row_sums_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    highest: tl.tensor,
    sum_exp: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Maximum and sum of exponentials of each row.

    Each lane accumulates its own vectors relative to its own maximum, so that lanes do not
    synchronise until the end.
    """
    number = tl.program_id(0).to(tl.int64)
    start, first = _begin(number * stride)
    DTYPE: tl.constexpr = highest.dtype.element_ty
    row, last = logits + start, first + count
    body, end = _body(first, last)
    lanes = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    most = tl.full((BLOCK // WIDTH,), float("-inf"), DTYPE)
    total = tl.zeros_like(most)
    for begin in range(0, last, BLOCK):
        places = begin + lanes
        inside = (places >= body) & (places < end)
        x = tl.load(row + places, mask=inside, other=float("-inf")).to(DTYPE)
        before, most = most, tl.maximum(most, tl.max(x, 1))
        # 0 if all logits are -inf, which less itself would be NaN
        shift = tl.where(most == float("-inf"), 0.0, most)
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
    places, inside = _edges(first, last)
    x = tl.load(row + places, mask=inside, other=float("-inf")).to(DTYPE)
    top = tl.maximum(tl.max(most, 0), tl.max(x, 0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    of_edges = tl.sum(tl.exp(x - shift), 0)
    tl.store(highest + number, top)
    tl.store(sum_exp + number, tl.sum(total * tl.exp(most - shift), 0) + of_edges)


@functools.partial(Kernel, do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_ROW)
def row_gradient_kernel(  # noqa: PLR0913 (as above)
    logits: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    grad: tl.tensor,
    highest: tl.tensor,
    sum_exp: tl.tensor,
    mass: tl.tensor,
    hit: tl.tensor,
    column: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient of each row from its sums.

    `grad` has the strides of the logits, and may be the logits.
    """
    number = tl.program_id(0).to(tl.int64)
    start, first = _begin(number * stride)
    row, out, last = logits + start, grad + start, first + count
    body, end = _body(first, last)
    mass, hit = tl.load(mass + number), tl.load(hit + number)
    highest, column = tl.load(highest + number), tl.load(column + number)
    if (mass == 0) & (hit == 0):  # whatever its logits are, they are not read
        zero = tl.zeros((), out.dtype.element_ty)
        for begin in range(0, last, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            tl.store(out + places, zero, mask=(places >= body) & (places < end))
        places, inside = _edges(first, last)
        tl.store(out + places, zero, mask=inside)
    else:
        spread = mass / tl.load(sum_exp + number)
        for begin in range(0, last, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            inside = (places >= body) & (places < end)
            _write(out, row, places, first, inside, highest, spread, hit, column)
        places, inside = _edges(first, last)
        _write(out, row, places, first, inside, highest, spread, hit, column)


@kernel
def _write(  # noqa: PLR0913 (as above)
    out: tl.tensor,
    row: tl.tensor,
    places: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    highest: tl.tensor,
    spread: tl.tensor,
    hit: tl.tensor,
    column: tl.tensor,
) -> None:
    """Write `spread exp(x - highest) - [c = column] hit`, rounded once."""
    x = tl.load(row + places, mask=inside, other=float("-inf")).to(highest.dtype)
    grad = spread * tl.exp(x - highest)
    grad -= tl.where(places - first == column, hit, 0.0)
    tl.store(out + places, grad.to(out.dtype.element_ty), mask=inside)


@kernel
def _begin(place: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Round `place` down to a multiple of ALIGNMENT; returns that and the remainder."""
    first = place % ALIGNMENT
    return tl.multiple_of(place - first, ALIGNMENT), first.to(tl.int32)


@kernel
def _body(first: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Where the first whole vector of a row begins, and where its last one ends."""
    return (first + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, last // ALIGNMENT * ALIGNMENT


@kernel
def _edges(first: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Offsets before a row's first whole vector and after its last; a mask of those inside it."""
    i = tl.arange(0, 2 * ALIGNMENT)
    body, end = _body(first, last)
    head = tl.minimum(body, last)
    tail = tl.maximum(end, head)
    is_head = i < ALIGNMENT
    places = tl.where(is_head, first + i, tail + i - ALIGNMENT)
    return places, places < tl.where(is_head, head, last)
