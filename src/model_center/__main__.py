"""`python -m model_center COMMAND`: prepare data for training, and pass on what it has written."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from bmtrain.errors import CheckpointError
from model_center.errors import ConfigError, DataError, IdentifierError, InputError, WeightsError

# Each is a module of that name, imported when it is asked for: one needs transformers, the other
# does not.
COMMANDS = {
    "preprocess": "text to token data",
    "convert": "a folder of Hugging Face made one of ModelCenter, or the other way round",
}
MENDABLE = (
    CheckpointError,
    ConfigError,
    DataError,
    IdentifierError,
    InputError,
    WeightsError,
    OSError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Errors that users can mend are printed without a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m model_center", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=about) for name, about in COMMANDS.items()}
    chosen = next((word for word in arguments if word in COMMANDS), None)
    try:
        if chosen is not None:
            command = importlib.import_module(f"model_center.{chosen}")
            command.add_arguments(parsers[chosen])
            parsers[chosen].set_defaults(run=command.run)
        args = parser.parse_args(arguments)
        args.run(args)
    except ModuleNotFoundError as error:
        needed = str(error.name).partition(".")[0]
        print(
            f"error: {chosen} needs {needed}: pip install {needed}, or this package with "
            "its extra [models].",
            file=sys.stderr,
        )
        return 1
    except MENDABLE as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
