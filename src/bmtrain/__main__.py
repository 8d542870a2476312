"""`python -m bmtrain COMMAND`: tools around training programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bmtrain.checkpoint import commands
from bmtrain.plan import command as plan
from bmtrain.plan import environment
from bmtrain.runtime import starting
from bmtrain.verification import command as verify
from bmtrain.version import __version__

# What has `add_arguments(parser)` and `run(arguments)`, which returns the exit status; its help.
COMMANDS: dict[str, tuple[Any, str]] = {
    "verify": (
        verify,
        "run a program's steps in one process and on ranks, and compare them tensor by tensor",
    ),
    "check": (commands.CHECK, "compare the files of checkpoints with their checksums"),
    "consolidate": (commands.CONSOLIDATE, "write the weights of a checkpoint into one file"),
    "run": (starting, "start a program once for each GPU of this host, as ranks of one run"),
    "plan": (plan, "forecast the memory of a run: does it fit, where is its peak, what changes it"),
    "env": (environment, "show versions, GPUs, links, limits and variables, for a bug report"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Without a command, lists them all."""
    parser = argparse.ArgumentParser(prog="python -m bmtrain", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (module, about) in COMMANDS.items():
        chosen = commands.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}."
        )
        module.add_arguments(chosen)
        chosen.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    if "run" not in args:
        parser.print_help()
        return 0
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
