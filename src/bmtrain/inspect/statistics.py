"""Statistics of tensors over all ranks, and the summaries made of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime.mesh import Axis

CHUNK = 1 << 22  # elements converted to fp64 at a time: 32 MiB
# Of a tensor on one rank: the number of its elements, their sum, the number of chunks with a NaN,
# the sum of squared deviations from the mean, the maximum, the negated minimum.
COUNT, TOTAL, NANS, SQUARES, TOP, BOTTOM = range(6)
COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")

Statistics = dict[str, float | None]


def statistics_of(
    tensors: Iterable[torch.Tensor | None],
    device: torch.device,
    axis: Axis | None,
    places: Collection[int] | None = None,
) -> list[Statistics]:
    """Mean, std, max and min of the elements of each tensor, in fp64.

    All four are None for an empty, complex, meta or missing tensor. `std` divides by count - 1,
    torch's default; as torch's it is NaN of a single element. Other NaN come from the data.

    Args:
        tensors: of any shape and dtype; None for one that this rank does not have.
        device: of the collectives.
        axis: whose ranks have parts of the tensors; three collectives, however many there are.
            None for this rank's own numbers.
        places: the tensors that are in parts, others being this rank's own; None for all. As many
            on all ranks.
    """
    found = [_row(x).to(device) for x in tensors]
    if not found:
        return []
    rows = torch.stack(found)
    chosen = list(range(len(found)) if places is None else places)
    if axis is not None and chosen:
        own = rows[chosen]
        sums = collectives.all_reduce(own[:, :SQUARES], "sum", axis)
        shift = own[:, TOTAL] / own[:, COUNT].clamp(min=1)
        shift -= sums[:, TOTAL] / sums[:, COUNT].clamp(min=1)
        squares = own[:, SQUARES] + own[:, COUNT] * shift.square()
        squares = collectives.all_reduce(squares, "sum", axis)
        extremes = collectives.all_reduce(own[:, TOP:], "max", axis)
        rows[chosen] = torch.cat([sums, squares[:, None], extremes], dim=1)
    out: list[Statistics] = []
    for count, total, nans, squared, top, bottom in rows.tolist():
        if not count:
            out.append(dict.fromkeys(("mean", "std", "max", "min")))
            continue
        std = math.sqrt(squared / (count - 1)) if count > 1 else math.nan
        most, least = (math.nan, math.nan) if nans else (top, -bottom)
        out.append({"mean": total / count, "std": std, "max": most, "min": least})
    return out


@torch.no_grad()
def _row(x: torch.Tensor | None) -> torch.Tensor:
    """The row of one tensor, computed on its device without a synchronisation."""
    is_empty = x is None or x.is_meta or x.is_complex() or x.numel() == 0
    row = torch.zeros(6, dtype=torch.float64, device="cpu" if x is None or x.is_meta else x.device)
    row[TOP:] = -math.inf
    if x is None or is_empty:
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


def entry(
    name: str, shape: tuple[int, ...], values: Statistics, grad: Statistics
) -> dict[str, Any]:
    """The dict of one tensor; numbers are floats, or None if undefined."""
    numbers = {key: values[key] for key in ("std", "mean", "max", "min")}
    gradients = {"grad_std": grad["std"], "grad_mean": grad["mean"]}
    return {"name": name, "shape": shape, **numbers, **gradients}


def format_summary(summary: Iterable[Mapping[str, Any]]) -> str:
    """A plain-text table of a `summary`, what `inspect_model` or `Inspector.get_summary` returns.

    A header and one line per tensor. Numbers have four significant digits, zero is 0.0000; "-"
    stands for an undefined number.

    Raises:
        ConfigurationError: for anything but a list of such dicts.
    """
    if not isinstance(summary, Iterable):
        raise ConfigurationError(
            f"format_summary got {type(summary).__name__}: expected the list that "
            "inspect_model or get_summary returns."
        )
    lines = [list(COLUMNS)]
    for row in summary:
        if not isinstance(row, Mapping) or "name" not in row:
            raise ConfigurationError(
                f"format_summary got {row!r} in its list: expected the dicts that "
                "inspect_model returns."
            )
        values = [row.get(column) for column in COLUMNS]
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        # Programs of BMTrain look for its zero.
        lines.append([{"None": "-", "0": "0.0000"}.get(text, text) for text in texts])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
