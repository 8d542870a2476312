"""Sums over the classes of each row of logits, and the gradient of its cross entropy.

With logits x (rows, columns), class weights w (1 by default) and p_c = exp(x_c - m) / s, where m =
max_c x_c and s = sum_c exp(x_c - m), the gradient of a row's loss is

    mass p_c - smooth w_c - [c = column] hit

for three numbers per row that the caller chooses (`RowFactors`). log s is never added to m: next to
a large m it would lose its digits. Arithmetic is in fp32, or fp64 for fp64 logits; a gradient is
rounded to its dtype once.

On a GPU, one Triton kernel reads each logit once for the sums, and another once for the gradient.
On a CPU, plain torch works through chunks of rows. Under torch.compile it does so with a single
chunk, which the compiler fuses into kernels as fast as these.

Source of the one-pass sums: Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bmtrain.kernels.chunks import launching_on

# Elements of the plain-torch path's fp32 scratch: 1 MiB stays in a CPU's cache.
CHUNK_NUMEL = 2**18
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

    def of(self, rows: slice) -> RowFactors:
        """The coefficients of some of the rows."""
        return RowFactors(*(each[rows] for each in self))


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
    by = row_sums_by_torch if _is_plain(logits) else row_sums_by_triton
    return by(logits, weight, smoothed=smoothed)


def row_gradient(
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> torch.Tensor:
    """The gradient (rows, columns) of logits, in their dtype.

    Args:
        logits, weight: as for `row_sums`.
        sums: over all columns of each row, including any that are not in `logits`.
        factors: see RowFactors.
        smoothed: whether `smooth` is used.
    """
    by = row_gradient_by_torch if _is_plain(logits) else row_gradient_by_triton
    return by(logits, sums, factors, weight, smoothed=smoothed)


def row_gradient_(
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> torch.Tensor:
    """`row_gradient` in place: overwrites the logits, whose rows must be contiguous."""
    by = row_gradient_by_torch_ if _is_plain(logits) else row_gradient_by_triton_
    return by(logits, sums, factors, weight, smoothed=smoothed)


def _is_plain(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" or torch.compiler.is_compiling()


# Plain torch


def row_sums_by_torch(
    logits: torch.Tensor, weight: torch.Tensor | None, *, smoothed: bool
) -> RowSums:
    """`row_sums` in chunks of rows, which avoids an fp32 copy of half-precision logits."""
    highest = logits.amax(1).to(arithmetic(logits.dtype))
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


def row_gradient_by_torch(
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> torch.Tensor:
    """`row_gradient` in chunks of rows."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(grad, logits, sums, factors, weight, smoothed=smoothed)
    return grad


def row_gradient_by_torch_(
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> torch.Tensor:
    """`row_gradient_` in chunks of rows."""
    _write_gradient(logits, logits, sums, factors, weight, smoothed=smoothed)
    return logits


def _write_gradient(
    out: torch.Tensor,
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> None:
    mass, smooth, hit, column = factors
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
    out.scatter_(1, place[:, None], at_target.to(out.dtype)[:, None])


def score(logits: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The logit (rows,) of one column of each row, in the arithmetic dtype."""
    return logits.gather(1, column[:, None])[:, 0].to(arithmetic(logits.dtype))


def _row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that bound the fp32 scratch; one under torch.compile, which fuses it away."""
    num_rows, num_columns = logits.shape
    if torch.compiler.is_compiling():
        yield slice(0, num_rows)
        return
    step = max(1, CHUNK_NUMEL // num_columns)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


# Triton


def row_sums_by_triton(
    logits: torch.Tensor, weight: torch.Tensor | None, *, smoothed: bool
) -> RowSums:
    """`row_sums` in one kernel that reads each logit once."""
    logits = _in_rows(logits)
    sums = _empty_sums(logits)
    _launch("row_sums_kernel", logits, (*sums,), weight, smoothed=smoothed)
    return sums


def row_gradient_by_triton(
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> torch.Tensor:
    """`row_gradient` in one kernel that reads and writes each element once."""
    logits = _in_rows(logits)
    grad = torch.empty_strided(
        logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device
    )
    _launch(
        "row_gradient_kernel",
        logits,
        (grad, sums.highest, sums.sum_exp, *factors),
        weight,
        smoothed=smoothed,
    )
    return grad


def row_gradient_by_triton_(
    logits: torch.Tensor,
    sums: RowSums,
    factors: RowFactors,
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> torch.Tensor:
    """`row_gradient_` in the kernel of `row_gradient`."""
    _launch(
        "row_gradient_kernel",
        logits,
        (logits, sums.highest, sums.sum_exp, *factors),
        weight,
        smoothed=smoothed,
    )
    torch.autograd.graph.increment_version(logits)
    return logits


def _in_rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits with contiguous rows and little space between them: the same tensor, or a copy."""
    stride, num_columns = logits.stride(0), logits.shape[1]
    return (
        logits
        if logits.stride(1) == 1 and num_columns <= stride < 2 * num_columns
        else logits.contiguous()
    )


def _empty_sums(logits: torch.Tensor) -> RowSums:
    return RowSums(
        *torch.empty(
            3, logits.shape[0], dtype=arithmetic(logits.dtype), device=logits.device
        ).unbind(0)
    )


def _launch(
    name: str,
    logits: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    *,
    smoothed: bool,
) -> None:
    """Launch one program per row."""
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return
    kernel = getattr(_triton_kernels(), name)
    with launching_on(logits.device):
        kernel[(num_rows,)](
            logits,
            logits.stride(0),
            num_columns,
            *tensors,
            logits if weight is None else weight,
            WEIGHTED=weight is not None,
            SMOOTHED=smoothed,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@functools.cache
def _triton_kernels() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels import cross_entropy_triton

    return cross_entropy_triton
