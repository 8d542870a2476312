"""`python -m bmtrain run PROGRAM`: a program on all GPUs of this host."""

from __future__ import annotations

import argparse

from model_center.commands.starting import num_to_start, start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.add_argument("--ranks", type=int, metavar="N", help="(default: one for each GPU, or 1)")
    parser.add_argument("-m", action="store_true", help="the program is a module, as python -m has")
    parser.add_argument("program", help="a file of Python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")


def run(arguments: argparse.Namespace) -> int:
    """Run the program; returns the exit code of the first rank that failed, or 0."""
    words = ["-m"] * arguments.m + [arguments.program, *arguments.arguments]
    return start(words, arguments.ranks or num_to_start())
