"""A rank that meets with a fault: `faulty.py PROGRAM [ARGUMENT...]`, where $FAULT says which. The
program is a file, or -m and a module.

Only what Python has itself is imported before the program, so that a fault can come first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import pathlib
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]
FAULT, PIDS = "FAULT", "FAULT_PIDS"
TWO = " + "  # what comes to rank 0, and what comes to rank 1


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a rank, once.

    Attributes:
        kind: a name in `DEEDS`, or in `moments.CHANGES`; of two ranks two, with TWO in between.
        moment: "import", or a name in `moments.MOMENTS`.
        rank: to whom; None for all.
        step: in which step, from 1 on; of moments outside of steps, the number of steps done.
        mark: a file that is written at that moment, with the time as time.monotonic() tells it.
        timeout: seconds, in place of the program's; None for that.
    """

    kind: str
    moment: str
    rank: int | None
    step: int
    mark: str
    timeout: float | None = None

    def dumped(self) -> str:
        """For $FAULT."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def is_here(self) -> bool:
        """Whether it comes to this rank."""
        return self.rank is None or os.environ["RANK"] == str(self.rank)

    @property
    def own_kind(self) -> str:
        """What comes to this rank."""
        kinds = self.kind.split(TWO)
        return kinds[int(os.environ["RANK"]) % len(kinds)]

    def note(self) -> None:
        """Write the mark, unless another rank has."""
        path = pathlib.Path(self.mark)
        if not path.exists():
            path.write_text(str(time.monotonic()), encoding="utf-8")

    def happen(self) -> None:
        """Do it."""
        self.note()
        DEEDS[self.own_kind]()


def _send(number: signal.Signals, *, launcher: bool = False) -> Callable[[], None]:
    return lambda: os.kill(os.getppid() if launcher else os.getpid(), number)


def _kill_ranks() -> None:
    own = os.getpid()
    found = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text()
    for number in sorted(map(int, found.split()), key=lambda number: number == own):
        os.kill(number, signal.SIGKILL)


def _fail() -> None:
    raise KeyError("the culprit")


def _deadlock() -> None:
    """A thread holds a lock and waits for a second one, which this thread holds."""
    first, second = threading.Lock(), threading.Lock()
    is_held = threading.Event()

    def wait() -> None:
        with first:
            is_held.set()
            second.acquire()

    with second:
        threading.Thread(target=wait, daemon=True).start()
        is_held.wait()
        first.acquire()


DEEDS: dict[str, Callable[[], object]] = {
    "SIGKILL of a rank": _send(signal.SIGKILL),
    "SIGKILL of both ranks": _kill_ranks,
    "SIGKILL of the launcher": _send(signal.SIGKILL, launcher=True),
    "SIGTERM to a rank": _send(signal.SIGTERM),
    "SIGTERM to the launcher": _send(signal.SIGTERM, launcher=True),
    "SIGINT to a rank": _send(signal.SIGINT),
    "SIGINT to the launcher": _send(signal.SIGINT, launcher=True),
    "SIGUSR1 to a rank": _send(signal.SIGUSR1),
    "SIGUSR1 to the launcher": _send(signal.SIGUSR1, launcher=True),
    "SIGSTOP of a rank": _send(signal.SIGSTOP),
    "segmentation fault": lambda: ctypes.string_at(0),
    "abort": lambda: ctypes.CDLL(None).abort(),
    "exception": _fail,
    "sys.exit(3)": lambda: sys.exit(3),
    "early return": lambda: sys.exit(0),
    "endless sleep": lambda: time.sleep(600),
    "call that holds Python's lock": lambda: ctypes.PyDLL(None).sleep(600),
    "deadlock": _deadlock,
    "pause": lambda: time.sleep(25),
    "closed pipe": lambda: None,  # whoever reads goes when the mark is written
    "closed pipe and SIGINT": lambda: None,
}


def main() -> None:
    """Become the program."""
    number = os.environ["RANK"]
    pathlib.Path(os.environ[PIDS], number).write_text(str(os.getpid()), encoding="utf-8")
    is_module = sys.argv[1] == "-m"
    program = sys.argv[1 + is_module]
    sys.argv = sys.argv[1 + is_module :]
    if os.environ.get(FAULT):
        fault = Fault(**json.loads(os.environ[FAULT]))
        if fault.moment == "import" and fault.is_here:
            fault.happen()
        sys.path.insert(0, str(ROOT))
        importlib.import_module("scripts.fault_matrix.moments").install(fault)
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(pathlib.Path(program).parent))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
