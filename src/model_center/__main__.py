"""`python -m model_center COMMAND`: prepare what training reads, and pass on what it has written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bmtrain.errors import CheckpointError
from model_center import convert, preprocess
from model_center.errors import ConfigError, DataError, IdentifierError, InputError, WeightsError

COMMANDS = {"preprocess": preprocess, "convert": convert}
MENDABLE = (CheckpointError, ConfigError, DataError, IdentifierError, InputError, WeightsError, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors that users can mend are printed without a traceback."""
    parser = argparse.ArgumentParser(prog="python -m model_center", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        chosen = commands.add_parser(name, help=str(command.__doc__).partition(": ")[2])
        command.add_arguments(chosen)
        chosen.set_defaults(run=command.run)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except MENDABLE as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
