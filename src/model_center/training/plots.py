"""Pictures of what `metrics.jsonl` says of runs: loss, learning rate, gradients, memory, speed."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from model_center.errors import DataError
from model_center.optional import package
from model_center.training.metrics_file import Record

Points = tuple[list[int], list[float]]

EXTRA = "install this package with its extra [example]"
SHARE = 1 / 30  # of all steps that a smoothed curve looks back on
SETTINGS = {"svg.fonttype": "none", "font.size": 8}  # text as text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One of the pictures, over optimizer steps.

    Attributes:
        field: of the records of steps.
        axis: the name of the vertical axis, with its unit.
        unit: what values are divided by.
        is_smoothed: whether a smoothed curve stands beside the raw one.
        beside: a field of evaluations, drawn as dots.
        from_zero: whether the axis begins at 0, so that noise does not look like growth.
    """

    field: str
    axis: str
    unit: float = 1.0
    is_smoothed: bool = True
    beside: str | None = None
    from_zero: bool = True


PANELS = (
    Panel(field="loss", axis="loss, nats per token", beside="validation_loss", from_zero=False),
    Panel(field="lr", axis="learning rate", is_smoothed=False),
    Panel(field="grad_norm", axis="gradient norm before clipping"),
    Panel(field="memory", axis="peak memory of rank 0, GiB", unit=2**30, is_smoothed=False),
    Panel(field="tokens_per_second", axis="speed, 1000 tokens/s", unit=1000.0),
    Panel(field="mfu", axis="model FLOPs utilisation, %", unit=0.01),
)


def draw_runs(runs: Mapping[str, Sequence[Record]], path: pathlib.Path) -> pathlib.Path:
    """Draw all panels that the records have values for, and return the path.

    Args:
        runs: the records of each run by the name that the legend gives it.
        path: of the picture; its ending is the format (.png, .svg or .pdf).

    Raises:
        DataError: for runs without a value to draw.
        ImportError: where matplotlib is missing.
    """
    panels = [panel for panel in PANELS if any(points(of, panel.field)[0] for of in runs.values())]
    if not panels:
        raise DataError(f"no steps to draw in the metrics of {', '.join(runs) or 'no run'}.")
    matplotlib = package("matplotlib", "a plot", instead=EXTRA)
    kind = package("matplotlib.figure", "a plot", name="matplotlib", instead=EXTRA)
    rows = -(-len(panels) // 2)
    with matplotlib.rc_context(SETTINGS):
        figure = kind.Figure(figsize=(10, 2.6 * rows + 0.3), layout="constrained")
        grid = figure.add_gridspec(rows, 2)
        spare = len(panels) % 2  # an odd number: the first panel is as wide as two
        for place, panel in enumerate(panels):
            row, column = divmod(place + spare if place else 0, 2)
            wide = spare and not place
            _draw(figure.add_subplot(grid[row, :] if wide else grid[row, column]), panel, runs)
        figure.suptitle("; ".join(_summary(name, records) for name, records in runs.items()))
        figure.savefig(path, dpi=120)
    return path


def _summary(name: str, records: Sequence[Record]) -> str:
    """The run's name, how far it came, and its last losses."""
    steps, losses = points(records, "loss")
    held_out = points(records, "validation_loss")[1]
    words = [f"{name}: {steps[-1]} steps", f"loss {losses[-1]:.2f}"] if steps else [name]
    return ", ".join([*words, *(f"held-out {loss:.2f}" for loss in held_out[-1:])])


def points(records: Sequence[Record], field: str, unit: float = 1.0) -> Points:
    """Steps and finite values of a field."""
    found = [
        (record["step"], record[field] / unit)
        for record in records
        if isinstance(record.get(field), int | float) and math.isfinite(record[field])
    ]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """The mean of the values so far, weighted by `exp(-distance / span)`.

    The weights are divided by their sum, so that the first values are not drawn towards 0.
    """
    keep = math.exp(-1.0 / span)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = total * keep + value, weight * keep + 1.0
        means.append(total / weight)
    return means


def _draw(axes: Any, panel: Panel, runs: Mapping[str, Sequence[Record]]) -> None:
    several = len(runs) > 1
    for place, (name, records) in enumerate(runs.items()):
        steps, values = points(records, panel.field, panel.unit)
        if not steps:
            continue
        colour, what = f"C{place}", name if several else "each step"
        span = max(1, round(SHARE * len(steps)))
        if panel.is_smoothed and span > 1:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35, label=what)
            means = smoothed(values, span)
            label = f"{name}, smoothed" if several else f"smoothed over {span} steps"
            axes.plot(steps, means, color=colour, linewidth=1.6, label=label)
        else:
            axes.plot(steps, values, color=colour, linewidth=1.2, label=what)
        seen = points(records, panel.beside) if panel.beside else ([], [])
        if seen[0]:
            label = f"{name}, held-out text" if several else "held-out text"
            axes.plot(*seen, "o", color=colour, markeredgecolor="black", markersize=4, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(panel.axis)
    axes.grid(alpha=0.3)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if several or len(axes.get_lines()) > 1:
        axes.legend()
