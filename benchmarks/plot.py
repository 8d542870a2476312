"""Draw files of results beside them as SVG: python benchmarks/plot.py
benchmarks/results/13b-4gpu.json ... Without a file: docs/figures.svg, this library beside others.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tables import ROOT, Beside, beside_others, origin_of, rates_of, rows_of

PICTURE = ROOT / "docs" / "figures.svg"

COLOURS = {"bmtrain": "#d62728", "fsdp2": "#4c78a8", "plain": "#72b7b2", "deepspeed": "#9d9d9d"}
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "font.size": 8,
}  # text as text; the same file from the same numbers


def draw(report: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
    """Tokens/s a GPU: bars of modes and batches; lines over the number of GPUs where it varies.

    Needs matplotlib.
    """
    import matplotlib  # noqa: PLC0415 (measuring must not need it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    rates = rates_of(rows_of(report["records"]))
    with matplotlib.rc_context(SETTINGS):
        varies = len({gpus for _, gpus, *_ in rates}) > 1
        figure = Figure(
            figsize=(7.2, 3.2 if varies else 0.8 + 0.24 * max(1, len(rates))), layout="constrained"
        )
        axes = figure.subplots()
        (_lines if varies else _bars)(axes, rates)
        axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(origin_of(report), fontsize=7, x=0.01, ha="left")
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _bars(axes: Any, rates: dict[tuple[Any, ...], float]) -> None:
    """One bar per mode, grouped by model and batch, the fastest first."""
    ordered = sorted(rates.items(), key=lambda row: (row[0][:4], -row[1]))
    names = [f"{shape}, batch {batch}: {mode}" for (shape, _, batch, _, mode), _ in ordered]
    colours = [COLOURS.get(key[4].split(" ")[0], "black") for key, _ in ordered]
    bars = axes.barh(range(len(ordered)), [rate for _, rate in ordered], color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
    axes.set_yticks(range(len(ordered)), names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("tokens/s a GPU")


def _lines(axes: Any, rates: dict[tuple[Any, ...], float]) -> None:
    """One line per mode, model and batch over the number of GPUs; level is perfect weak scaling."""
    kinds = dict.fromkeys((shape, batch, mode) for shape, _, batch, _, mode in rates)
    for shape, batch, mode in kinds:
        points = sorted(
            (key[1], rate)
            for key, rate in rates.items()
            if (key[0], key[2], key[4]) == (shape, batch, mode)
        )
        colour = COLOURS.get(mode.split(" ")[0], "black")
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            color=colour,
            label=f"{shape}, batch {batch}: {mode}",
        )
    counts = sorted({gpus for _, gpus, *_ in rates})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens/s a GPU")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def said(rows: Sequence[Beside]) -> str:
    """The numbers of the picture in words: it carries them, so that a test can tell its age."""
    return "; ".join(
        f"{_place(row)}: bmtrain {row.ours['tokens_per_s']}, {row.peer} "
        f"{row.other['tokens_per_s']} tokens/s a GPU"
        for row in rows
    )


def draw_beside(rows: Sequence[Beside], path: pathlib.Path) -> pathlib.Path:
    """A bar for each comparison: how many times the fastest other, which is 1. Needs matplotlib."""
    import matplotlib  # noqa: PLC0415 (measuring must not need it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    ratios = [row.ratio for row in rows]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(7.2, 0.9 + 0.27 * max(1, len(rows))), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(range(len(rows)), ratios, 0.7, color=COLOURS["bmtrain"])
        axes.bar_label(
            bars, [f"{row.ratio:.2f} x {row.peer}" for row in rows], padding=3, fontsize=7
        )
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_yticks(range(len(rows)), [_place(row) for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, max(ratios, default=1.0) * 1.4)
        axes.set_xlabel("bmtrain without an option, tokens/s a GPU; 1.0: the fastest other")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": said(rows)})
    return path


def _place(row: Beside) -> str:
    return f"{row.place}, {row.what} tokens"


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    files = "results of compare.py (default: all, in one picture beside other libraries)"
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE.json", help=files)
    paths = parser.parse_args().files
    if not paths:
        print(draw_beside(beside_others(), PICTURE))
    for path in paths:
        report = json.loads(path.read_text())
        if "what" in report["records"][0]:
            parser.error(f"{path} has results of another program: there is no plot for them.")
        print(draw(report, path.with_suffix(".svg")))


if __name__ == "__main__":
    main()
