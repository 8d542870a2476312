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
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="processes to start (2); under torchrun those that there are",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of training (3)")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--seed", type=int, default=0, help="of all generators (0)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for each of the two runs (300)"
    )
    parser.add_argument(
        "--zero-level",
        type=int,
        default=3,
        choices=(2, 3),
        help="2 keeps gathered parameters until backward (3)",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--pp", type=int, default=-1, help="pipeline stages (none)")
    parser.add_argument("--slack", type=float, default=1.0, help="factor for all tolerances (1)")


def run(arguments: argparse.Namespace) -> int:
    """Verify, print the report on rank 0, return the exit status."""
    if "" not in sys.path:
        # `python -m` does this; other launchers would not find modules in the current folder
        sys.path.insert(0, "")
    try:
        report = verify(
            arguments.program,
            ranks=arguments.ranks,
            steps=arguments.steps,
            device=arguments.device,
            seed=arguments.seed,
            timeout=arguments.timeout,
            zero_level=arguments.zero_level,
            tp_size=arguments.tp,
            pipe_size=arguments.pp,
            slack=arguments.slack,
        )
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if world.rank() == 0:
        print(report, flush=True)
    return STATUS[report.verdict]
