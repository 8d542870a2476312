"""`python -m model_center chat`: talk with a model."""

from __future__ import annotations

import argparse
import sys

from model_center.commands.generate import (
    add_model_arguments,
    open_generator,
    read_on_rank_zero,
    say,
)
from model_center.generation.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.description = (
        "Chat with a model that has a chat template. Each line is a question; an empty line "
        "starts a new conversation, Ctrl-D (end of input) exits."
    )
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")


def run(args: argparse.Namespace) -> None:
    """Answer lines of the standard input until it ends.

    Raises:
        ConfigError, IdentifierError, InputError, WeightsError: as of `open_generator`, and for a
            tokenizer without a chat template.
    """
    first = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(first)
    with Session() as session:
        generator = open_generator(args, session)
        while (line := _read_question()) is not None:
            if not line:
                messages = list(first)
                continue
            messages.append({"role": "user", "content": line})
            answer = ""
            for piece in generator.stream_chat(messages):
                say(piece)
                answer += piece
            say("\n")
            messages.append({"role": "assistant", "content": answer})


def _read_question() -> str | None:
    """The next line, which the first rank reads; None at the end of the input."""
    say("> " if sys.stdin.isatty() else "")
    line = read_on_rank_zero(sys.stdin.readline)
    return line.strip() if line else None
