"""Summaries: one dict per tensor, and a table of these dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bmtrain.errors import ConfigurationError
from bmtrain.inspect.moments import Statistics

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
