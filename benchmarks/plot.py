"""Draw files of results beside them as SVG: python benchmarks/plot.py
benchmarks/results/13b-4gpu.json ... Without a file: docs/figures.svg, this library beside others.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tables import PEERS, ROOT, Beside, beside_others, origin_of, rates_of, rows_of, usual_gpu

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


def sharded(rows: Sequence[Beside]) -> list[Beside]:
    """What the picture shows: on several GPUs of the usual kind, where models are sharded."""
    return [row for row in rows if row.gpus > 1 and row.gpu == usual_gpu(rows)]


def said(rows: Sequence[Beside]) -> str:
    """The numbers of the picture in words: it carries them, so that a test can tell its age."""
    lines = []
    for row in rows:
        rates = ", ".join(f"{name} {rate:.0f}" for name, (rate, _) in sorted(row.fastest.items()))
        lines.append(f"{_place(row)}: {rates} tokens/s a GPU")
    return "; ".join(lines)


def draw_beside(rows: Sequence[Beside], path: pathlib.Path) -> pathlib.Path:
    """A group of bars for each comparison, one for each library. Needs matplotlib."""
    import matplotlib  # noqa: PLC0415 (measuring must not need it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = {"bmtrain": "bmtrain", **PEERS}
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(7.2, 0.9 + 0.55 * max(1, len(rows))), layout="constrained")
        axes = figure.subplots()
        for turn, (backend, name) in enumerate(names.items()):
            here = [(n, row) for n, row in enumerate(rows) if backend in row.fastest]
            if not here:
                continue
            places = [n + 0.27 * _turn(row, backend, list(names)) for n, row in here]
            rates = [row.fastest[backend][0] for _, row in here]
            colour = COLOURS[backend]
            bars = axes.barh(places, rates, height=0.25, color=colour, label=name, zorder=turn)
            axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
        axes.set_yticks(range(len(rows)), [_place(row) for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("tokens/s a GPU, each library by its fastest settings in 16 bits")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=len(names))
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": said(rows)})
    return path


def _turn(row: Beside, backend: str, order: list[str]) -> float:
    """Where the bar stands in its group, from the middle."""
    there = [name for name in order if name in row.fastest]
    return there.index(backend) - (len(there) - 1) / 2


def _place(row: Beside) -> str:
    return f"{row.shape}, {row.gpus} GPUs, {row.batch} x {row.seq} tokens a GPU"


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    files = "results of compare.py (default: all, in one picture beside other libraries)"
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE.json", help=files)
    paths = parser.parse_args().files
    if not paths:
        print(draw_beside(sharded(beside_others()), PICTURE))
    for path in paths:
        report = json.loads(path.read_text())
        if "what" in report["records"][0]:
            parser.error(f"{path} has results of another program: there is no plot for them.")
        print(draw(report, path.with_suffix(".svg")))


if __name__ == "__main__":
    main()
