"""The commands of `python -m model_center`, and what their errors look like."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

from bmtrain.errors import CheckpointError, printable
from bmtrain.runtime import world
from bmtrain.runtime.starting import num_to_start, start
from model_center.commands.configuration import words_of
from model_center.errors import (
    ConfigError,
    DataError,
    IdentifierError,
    InputError,
    ResumeError,
    WeightsError,
)
from model_center.optional import missing

ABOUT = "Train models, prepare their data, use the results."
# What each does, and its module, imported when it is asked for: some need transformers, others do
# not.
COMMANDS = {
    "train": (
        "train a language model on conversations or texts, all weights or LoRA",
        "model_center.commands.train",
    ),
    "certify": (
        "check which tokens a run would train on, one by one",
        "model_center.commands.certify",
    ),
    "generate": ("continue texts with a model", "model_center.commands.generate"),
    "chat": ("chat with a model", "model_center.commands.chat"),
    "merge": ("merge adapters into their base model", "model_center.commands.merge"),
    "plan": ("forecast the memory of a run", "model_center.commands.plan"),
    "plot": ("draw loss, learning rate, memory and speed of runs", "model_center.commands.plot"),
    "preprocess": ("tokenize text into token data", "model_center.preprocess"),
    "convert": (
        "convert a folder of Hugging Face to ModelCenter's format, or back",
        "model_center.convert",
    ),
}
MENDABLE = (
    CheckpointError,
    ConfigError,
    DataError,
    IdentifierError,
    InputError,
    ResumeError,
    WeightsError,
    ImportError,
    OSError,
)


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status.

    Errors that users can mend are printed without a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that a terminal lacks ends nothing
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(prog="python -m model_center", description=ABOUT)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=about) for name, (about, _) in COMMANDS.items()}
    chosen = next((word for word in arguments if word in COMMANDS), None)
    try:
        if chosen is not None:
            command = importlib.import_module(COMMANDS[chosen][1])
            command.add_arguments(parsers[chosen])
            parsers[chosen].set_defaults(run=command.run)
            arguments = words_of(arguments, parsers[chosen])
        args = parser.parse_args(arguments)
        ranks = 1
        if chosen in {"train", "certify"} and not world.launched().launcher:
            ranks = args.ranks or num_to_start()
        if ranks > 1:
            return start(["-m", "model_center", *arguments], ranks)
        args.run(args)
    except ModuleNotFoundError as error:
        needed = str(error.name).partition(".")[0]
        print(f"error: {missing(str(chosen), needed)}", file=sys.stderr)
        return 1
    except MENDABLE as error:
        # in one piece: print writes the end of the line alone, behind another rank's text perhaps
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return 1
    return 0
