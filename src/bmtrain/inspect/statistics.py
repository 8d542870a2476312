"""Statistics of tensors over all ranks, and the summaries made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime.mesh import Axis

CHUNK = 1 << 22  # elements converted to fp64 at a time: 32 MiB

# The number of ranks that have the tensor, the number of its elements, their sum, the number of
# chunks with a NaN, the sum of squared deviations from the mean, the maximum, the negated minimum.
NUM_COLUMNS = 7
PRESENT, COUNT, TOTAL, NANS, SQUARES, TOP, BOTTOM = range(NUM_COLUMNS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """The statistics of a tensor's elements.

    A number that is undefined is None: `std` of fewer than two elements, all four of an empty,
    complex or meta tensor. NaN therefore always comes from the data. `std` divides by count - 1,
    torch's default.
    """

    mean: float | None = None
    std: float | None = None
    max: float | None = None
    min: float | None = None


def measure(tensors: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Rows (n, 7), fp64 on `device`, of n tensors of any shape and dtype.

    A tensor that this rank does not have is None; its row is neutral when ranks are combined.
    """
    rows = [_row(x).to(device) for x in tensors]
    return (
        torch.stack(rows)
        if rows
        else torch.zeros(0, NUM_COLUMNS, dtype=torch.float64, device=device)
    )


def add_ranks(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Combine the rows (n, 7) of all ranks of the axis to those of the full tensors. Collective.

    Three collectives, however many rows there are. The number of rows must be equal on all ranks.
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
    """The statistics of each of n rows (n, 7); None for a tensor that no rank has."""
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
    """The row of one tensor, computed on its device without a synchronisation."""
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
        # A max reduction over ranks may drop NaN, so chunks with NaN are counted instead.
        row[TOP:] = torch.maximum(
            row[TOP:], torch.stack([highest, -lowest]).nan_to_num(-math.inf, math.inf, -math.inf)
        )
    mean = row[TOTAL] / flat.numel()
    for chunk in flat.split(CHUNK):
        row[SQUARES] += (chunk.double() - mean).square().sum()
    return row


COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")


def entry(
    name: str, shape: tuple[int, ...], values: Statistics | None, grad: Statistics | None
) -> dict[str, Any]:
    """The dict of one tensor; numbers are floats, or None if undefined."""
    values, grad = values or Statistics(), grad or Statistics()
    return {
        "name": name,
        "shape": shape,
        "std": values.std,
        "mean": values.mean,
        "max": values.max,
        "min": values.min,
        "grad_std": grad.std,
        "grad_mean": grad.mean,
    }


def format_summary(summary: Iterable[Mapping[str, Any]]) -> str:
    """A plain-text table of the result of `inspect_model` or `Inspector.get_summary`.

    A header and one line per tensor. Numbers have four significant digits; "-" stands for an
    undefined number, the gradient of a frozen parameter for example.

    Raises:
        ConfigurationError: for anything but a list of such dicts.
    """
    if isinstance(summary, str | Mapping) or not isinstance(summary, Iterable):
        raise ConfigurationError(
            f"format_summary got {type(summary).__name__}: expected the list that "
            "inspect_model or get_summary returns."
        )
    lines = [COLUMNS, *(_cells(row) for row in summary)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
    return "\n".join(_line(line, widths) for line in lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if not isinstance(row, Mapping) or "name" not in row:
        raise ConfigurationError(
            f"format_summary got {row!r} in its list: expected the dicts that "
            "inspect_model returns."
        )
    return tuple(_text(row.get(column)) for column in COLUMNS)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    """One line of the table: the name left-aligned, all else right-aligned."""
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])
