"""What the command lines of the programs that measure suites have in common."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import torch
from machine import machine, machine_from_outside
from suites import SUITES

RESULTS = pathlib.Path(__file__).parent / "results"


def parser_of(
    text: str | None, *, timeout: float, more: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A parser that says `text`, with the arguments of all; `timeout` seconds by default, and names
    of `more` suites.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suite",
        nargs="+",
        choices=[*(suite.name for suite in SUITES), *more],
        help="by default all that fit the machine",
    )
    parser.add_argument(
        "--run", action="append", help="arguments of throughput.py, in place of a suite"
    )
    parser.add_argument("--gpus", type=int, help="use the first of them only")
    parser.add_argument(
        "--timeout", type=float, default=timeout, help="seconds that one run may take"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--folder", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--name", help="of the file of results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try --run without a GPU"
    )
    return parser


def available(args: argparse.Namespace) -> int:
    """How many GPUs to use, or cores with --device cpu.

    Raises:
        SystemExit: if there are none, or fewer than asked for.
    """
    there = torch.cuda.device_count() if args.device == "cuda" else os.cpu_count() or 1
    if there == 0:
        raise SystemExit(
            "The benchmarks measure GPUs and torch finds none here "
            "(torch.cuda.device_count() is 0). See --device."
        )
    if args.gpus and args.gpus > there:
        raise SystemExit(f"--gpus {args.gpus}: this machine shows {there}.")
    return args.gpus or there


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """The machine that is measured."""
    return machine("cpu") if args.device == "cpu" else machine_from_outside()


def end_runs_too() -> None:
    """When this program is ended from outside, end the run under way.

    Its ranks would go on and keep the GPUs from whoever comes next.
    """

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
