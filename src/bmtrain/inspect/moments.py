"""Mean, spread and extremes of tensors that are spread over ranks, in fp64 and without gathering
them.

One tensor is a row of seven fp64 numbers (the columns below). Rows of the parts of a tensor add up
to the row of the whole; the sums of squares are centred, so that nothing is lost by cancellation.

Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch

from bmtrain.distributed import collectives
from bmtrain.runtime.mesh import Axis

CHUNK = 1 << 22  # elements that are fp64 at a time: 32 MiB

# Ranks that have the tensor, its elements, their sum, chunks with a NaN, squares around the mean,
# maximum, negated minimum.
NUM_COLUMNS = 7
PRESENT, COUNT, TOTAL, NANS, SQUARES, TOP, BOTTOM = range(NUM_COLUMNS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """What there is to say about a tensor's elements.

    None means that there is no such number: `std` of fewer than two elements, all four of an empty,
    complex or meta tensor. NaN therefore always comes from the data. `std` divides by count - 1,
    torch's default.
    """

    mean: float | None = None
    std: float | None = None
    max: float | None = None
    min: float | None = None


def measure(tensors: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """One row for each tensor of any shape and dtype, or None where this rank has none: (n, 7) fp64
    on `device`.
    """
    rows = [_row(x).to(device) for x in tensors]
    return (
        torch.stack(rows)
        if rows
        else torch.zeros(0, NUM_COLUMNS, dtype=torch.float64, device=device)
    )


def add_ranks(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Rows (n, 7) of the whole tensors, of which every rank of the axis measured a part.

    Three collectives for all.
    """
    if len(rows) == 0:
        return rows
    sums = collectives.all_reduce(rows[:, :SQUARES], "sum", axis)
    shift = _mean(rows) - _mean(sums)
    squares = collectives.all_reduce(
        rows[:, SQUARES] + rows[:, COUNT] * shift.square(), "sum", axis
    )
    extremes = collectives.all_reduce(rows[:, TOP:], "max", axis)
    return torch.cat([sums, squares[:, None], extremes], dim=1)


def statistics_of(rows: torch.Tensor) -> list[Statistics | None]:
    """The statistics of each row (n, 7); None for a tensor that no rank has."""
    return [_statistics(row) for row in rows.tolist()]


def _statistics(row: list[float]) -> Statistics | None:
    if row[PRESENT] == 0:
        return None
    count = row[COUNT]
    if count == 0:
        return Statistics()
    return Statistics(
        mean=row[TOTAL] / count,
        std=math.sqrt(row[SQUARES] / (count - 1)) if count > 1 else None,
        max=math.nan if row[NANS] else row[TOP],
        min=math.nan if row[NANS] else -row[BOTTOM],
    )


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, TOTAL] / rows[:, COUNT].clamp(min=1)


@torch.no_grad()
def _row(x: torch.Tensor | None) -> torch.Tensor:
    """Seven numbers of one tensor, on its device: nothing here waits for it."""
    row = torch.zeros(
        NUM_COLUMNS, dtype=torch.float64, device="cpu" if x is None or x.is_meta else x.device
    )
    row[TOP:] = -math.inf
    if x is None:
        return row
    row[PRESENT] = 1
    if x.is_meta or x.is_complex() or x.numel() == 0:
        return row
    flat = (x if x.layout == torch.strided else x.to_dense()).reshape(-1)
    row[COUNT] = flat.numel()
    for chunk in flat.split(CHUNK):
        values = chunk.double()
        lowest, highest = values.aminmax()
        row[TOTAL] += values.sum()
        row[NANS] += highest.isnan()
        # A maximum over ranks may lose a NaN, so NaNs are counted instead.
        row[TOP:] = torch.maximum(
            row[TOP:], torch.stack([highest, -lowest]).nan_to_num(-math.inf, math.inf, -math.inf)
        )
    mean = row[TOTAL] / flat.numel()
    for chunk in flat.split(CHUNK):
        row[SQUARES] += (chunk.double() - mean).square().sum()
    return row
