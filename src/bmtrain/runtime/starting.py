"""Ranks of this host, started without a launcher: one process for each GPU.

`python -m bmtrain run PROGRAM` is such a start.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bmtrain.runtime import world
from bmtrain.runtime.process import say

Handler = Callable[[int, Any], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PATIENCE_S = 30.0  # from the first rank's failure to the others' end
LOOK_S = 0.1


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


def num_to_start() -> int:
    """How many ranks a program is for that no launcher has started; 1 if one has."""
    return 1 if world.launched().launcher else max(torch.accelerator.device_count(), 1)


def start(words: Sequence[str], size: int) -> int:
    """Run `python WORDS` as `size` ranks of one run, and wait for all.

    SIGINT, SIGTERM and SIGUSR1 are passed on. When a rank fails the others are asked to end, and
    killed after PATIENCE_S.

    Returns:
        the exit code of the first rank that failed, as a shell says it; 0 if none did.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    with _passed_on(ranks) as handler:
        # A rank inherits that it ignores Ctrl-C, until `init_distributed`: else each would print
        # where in its imports it was. `_ignores` sees that on Linux only.
        signal.signal(signal.SIGINT, signal.SIG_IGN if sys.platform == "linux" else handler)
        for rank in range(size):
            environment = world.environment_of(rank, size, port)
            # A session of its own: Ctrl-C of the terminal comes once, from here.
            ranks.append(
                subprocess.Popen([sys.executable, *words], env=environment, start_new_session=True)
            )
        signal.signal(signal.SIGINT, handler)
        status, end = 0, float("inf")
        while None in (found := [rank.poll() for rank in ranks]):
            failed = next(filter(None, found), 0)
            if failed and not status:
                status, end = failed, time.monotonic() + PATIENCE_S
                _send(ranks, signal.SIGTERM)
            if time.monotonic() > end:
                _send(ranks, signal.SIGKILL)
            time.sleep(LOOK_S)
    status = status or next(filter(None, found), 0)
    return 128 - status if status < 0 else status


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)  # which does nothing to one that has ended


def _ignores(rank: subprocess.Popen[bytes]) -> bool:
    """Whether a rank ignores Ctrl-C."""
    status = pathlib.Path(f"/proc/{rank.pid}/status")
    found = re.search(r"^SigIgn:\s*(\w+)", status.read_text() if status.exists() else "", re.M)
    return found is not None and bool(int(found[1], 16) & 2)  # signal 2


@contextmanager
def _passed_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[Handler]:
    """Signals of this process reach the ranks, by the handler."""

    def pass_on(number: int, frame: Any) -> None:
        if number == signal.SIGINT and any(map(_ignores, ranks)):
            say("interrupted before the run has begun.\n")
            number = signal.SIGTERM
        _send(ranks, number)

    earlier = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield pass_on
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
