"""Statistics of tensors over all ranks, and the summaries made of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime.log import aligned
from bmtrain.runtime.mesh import Axis

CHUNK = 1 << 22  # elements converted to fp64 at a time: 32 MiB
COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")

Statistics = dict[str, float | None]
# Of a rank's part of a tensor: the number of its elements, their sum, the sum of their squared
# deviations from its mean, the maximum, the minimum; here of no elements.
NOTHING = (0.0, 0.0, 0.0, -math.inf, math.inf)


def statistics_of(
    tensors: Iterable[torch.Tensor | None],
    device: torch.device,
    axis: Axis,
    own: Collection[int] = (),
) -> list[Statistics]:
    """Mean, std, max and min of the elements of each tensor, in fp64. Collective: one exchange.

    All four are None for an empty, complex, meta or missing tensor. `std` divides by count - 1,
    torch's default; as torch's it is NaN of a single element. Other NaN come from the data.

    Args:
        tensors: of any shape and dtype, as many on all ranks; None for one that this rank lacks.
        device: of the collective.
        axis: whose ranks have parts of the tensors.
        own: places of tensors of which each rank has its own, and gets the numbers of that.
    """
    found = [row_of(x).to(device) for x in tensors]
    if not found:
        return []
    rows = collectives.all_gather(torch.stack(found), axis)
    for rank in range(axis.size):
        if rank != axis.index:
            rows[rank, [*own]] = rows.new_tensor(NOTHING)
    return combined(rows)


@torch.no_grad()
def row_of(x: torch.Tensor | None) -> torch.Tensor:
    """The numbers of NOTHING for one tensor: (5,), on its device, without a synchronisation."""
    if x is None or x.is_meta or x.is_complex() or x.numel() == 0:
        return torch.tensor(NOTHING, dtype=torch.float64, device="cpu")
    chunks = (x if x.layout == torch.strided else x.to_dense()).reshape(-1).split(CHUNK)
    total, squares = torch.zeros(2, dtype=torch.float64, device=x.device)
    extremes = []
    for chunk in chunks:
        values = chunk.double()
        total += values.sum()
        extremes.append(torch.stack(values.aminmax()))
    for chunk in chunks:
        squares += (chunk.double() - total / x.numel()).square().sum()
    least, most = torch.stack(extremes).unbind(1)
    count = torch.full_like(total, x.numel())
    return torch.stack([count, total, squares, most.amax(), least.amin()])


def combined(rows: torch.Tensor) -> list[Statistics]:
    """Statistics of tensors from the rows of all ranks, (ranks, tensors, 5)."""
    counts, totals, squares, tops, bottoms = rows.unbind(-1)
    count = counts.sum(0)
    mean = totals.sum(0) / count
    shift = totals / counts.clamp(min=1) - mean
    variance = (squares + counts * shift.square()).sum(0) / (count - 1)
    numbers = torch.stack([mean, variance.sqrt(), tops.amax(0), bottoms.amin(0)], dim=1)
    names = ("mean", "std", "max", "min")
    return [
        dict(zip(names, values, strict=True)) if of_any else dict.fromkeys(names)
        for values, of_any in zip(numbers.tolist(), count.tolist(), strict=True)
    ]


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
    return aligned(lines)
