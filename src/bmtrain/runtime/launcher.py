"""The torchrun that started this process, and the end of a rank that has lost it.

A torchrun that is killed outright tells its ranks nothing. Going on without it, they would write
where the next run does, and a rank that waits for another would wait for ever.

A thread looks, because it also looks while the main thread waits in a collective. Linux could send
a signal at the parent's death instead (PR_SET_PDEATHSIG), but it does so when the parent's *thread*
ends, and other systems cannot.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import threading
import time

from bmtrain.runtime import exits

LOOK_S = 0.5  # between two looks
_LIBRARY = "libtorch"  # what torchrun has mapped, and no init, shell or service manager has


class Launcher:
    """Ends this process when torchrun has ended, from its construction until `leave`.

    Args:
        rank: for the message.

    Attributes:
        patience: seconds that the process may go on after its launcher, to save what it has.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._parent = rank, os.getppid()
        self.patience = 0.0
        self._lost, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._look, name="launcher", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether it has ended."""
        return self._lost.is_set() or os.getppid() != self._parent

    def leave(self) -> None:
        """The run is over: what becomes of the launcher does not matter any more."""
        self._left.set()

    def _look(self) -> None:
        if not has_launching_ancestor():
            self._lost.set()
        while not self.is_lost:
            if self._left.wait(LOOK_S):
                return
        self._lost.set()
        end = time.monotonic() + self.patience
        # a second Ctrl-C, and the end of what is saved, bring patience to 0
        while self.patience and time.monotonic() < end and not self._left.wait(LOOK_S):
            continue
        if not self._left.is_set():
            say(f"[rank {self._rank}] the torchrun that started this rank has ended: so does it.\n")
            os._exit(exits.LAUNCHER_LOST)


def has_launching_ancestor() -> bool:
    """Whether a process above this one may be torchrun; False if it has ended already.

    That it has ended while this process was starting cannot be told from the parent's number: in a
    container torchrun may be process 1, which adopts orphans elsewhere. On Linux it is told by
    torch's library, which torchrun has loaded. Wrappers between torchrun and this process do not
    matter.
    """
    if not sys.platform.startswith("linux"):
        return os.getppid() != 1
    number = os.getppid()
    if number == 0:
        return True  # it is outside of this container: nothing can be told
    while number > 0:
        if _may_launch(number):
            return True
        found = re.search(r"^PPid:\s*(\d+)", _process_file(number, "status"), re.MULTILINE)
        number = int(found.group(1)) if found else 0
    return False


def _may_launch(number: int) -> bool:
    """Whether a process may be torchrun, by what it has mapped; by its command where that is
    hidden.
    """
    mapped = _process_file(number, "maps")
    return _LIBRARY in mapped or (not mapped and "python" in _process_file(number, "cmdline"))


def _process_file(number: int, name: str) -> str:
    """A file of /proc; empty if the process has ended or does not show it."""
    try:
        return pathlib.Path(f"/proc/{number}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def say(text: str) -> None:
    """Write to standard error, past Python's buffer, whose lock a stuck thread may hold."""
    data = text.encode(errors="replace")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:  # nobody reads it any more
        return
