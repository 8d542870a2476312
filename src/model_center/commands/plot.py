"""`python -m model_center plot RUN ...`: draw the metrics of runs."""

from __future__ import annotations

import argparse
import pathlib

from model_center.errors import DataError
from model_center.training.metrics_file import read_metrics
from model_center.training.plots import draw_runs
from model_center.training.run_log import METRICS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.description = (
        "Loss, learning rate, norm of the gradients, memory and speed of runs, from the "
        f"{METRICS} in their folders, in one picture."
    )
    folder = f"folder of a run (its --save or --log-dir), or a {METRICS}"
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help=folder)
    out = "the picture: .png, .svg or .pdf (default: curves.png in the folder of the first run)"
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help=out)


def run(args: argparse.Namespace) -> None:
    """Draw, and say where.

    Raises:
        DataError: for a run without metrics.
    """
    files = [path / METRICS if path.is_dir() else path for path in args.runs]
    missing = [str(path) for path in files if not path.exists()]
    if missing:
        raise DataError(f"no metrics at {', '.join(missing)}: name the folder of a run.")
    names = [str(path) for path in args.runs]
    records = {name: read_metrics(path) for name, path in zip(names, files, strict=True)}
    print(draw_runs(records, args.out or files[0].with_name("curves.png")))
