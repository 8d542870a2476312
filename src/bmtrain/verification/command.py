"""`python -m bmtrain verify MODULE:FUNCTION`: verification from the command line."""

from __future__ import annotations

import argparse
import sys

from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.verification.verify import verify

# Exit statuses. argparse exits with 2 for bad arguments, as BAD_INPUT does.
STATUS = {"same": 0, "different": 1, "refused": 3, "failed": 4}
BAD_INPUT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.epilog = (
        "Exit status: 0 nothing differs, 1 a tensor differs, 2 the program cannot be "
        "verified, 3 ranks refuse it, 4 a rank failed."
    )
    parser.add_argument(
        "program",
        metavar="MODULE:FUNCTION",
        help="a function that returns a bmtrain.verify.Program",
    )
    for flag, name, default, about in (
        ("--ranks", "ranks", 2, "processes to start (2); under torchrun, its own"),
        ("--steps", "steps", 3, "steps of training (3)"),
        ("--device", "device", "cpu", "cpu (the default) or cuda"),
        ("--seed", "seed", 0, "of all generators (0)"),
        ("--timeout", "timeout", 300.0, "seconds for each of the two runs (300)"),
        ("--zero-level", "zero_level", 3, "2 keeps gathered parameters until backward (3)"),
        ("--tp", "tp_size", 1, "tensor-parallel ranks (1)"),
        ("--pp", "pipe_size", -1, "pipeline stages (none)"),
        ("--slack", "slack", 1.0, "factor for all tolerances (1)"),
    ):
        parser.add_argument(
            flag,
            dest=name,
            type=type(default),
            default=default,
            choices=(2, 3) if name == "zero_level" else None,
            help=about,
        )


def run(arguments: argparse.Namespace) -> int:
    """Verify, print the report on rank 0, return the exit status."""
    if "" not in sys.path:
        # `python -m` does this; other launchers would not find modules in the current folder
        sys.path.insert(0, "")
    given = dict(vars(arguments))
    given.pop("run")
    try:
        report = verify(given.pop("program"), **given)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if world.rank() == 0:
        print(report, flush=True)
    return STATUS[report.verdict]
