"""This process: its host, what it can compile with, its exit codes, its threads, its launcher."""

from __future__ import annotations

import enum
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType

from torch.distributed import distributed_c10d

from bmtrain.errors import printable

C_COMPILERS = ("cc", "gcc", "clang")
LOOK_S = 0.5  # between two looks for the launcher

# Threads of the library that only watch.
_WATCHING = ("launcher", "watchdog", "stop request")
_OURS = pathlib.Path(__file__).parents[1]
_LIBRARIES = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        str(_OURS),
        str(_OURS.parent / "model_center"),
    )
)
# as they stand in the names of code, links and all
_COMMUNICATION = (distributed_c10d.__file__, str(_OURS / "distributed") + os.sep)
_DEPTH = 3  # calls from the innermost in which a wait for other ranks is looked for


class Exit(enum.IntEnum):
    """Exit codes of a run's processes; users have them in docs/site/en/reference/trouble.md."""

    FAILED = 1  # an exception
    REQUEUE = 75  # stopped with a checkpoint by SIGUSR1: start it again (EX_TEMPFAIL)
    HUNG = 81  # the watchdog: no progress for its limit
    PARTED = 82  # RanksDivergedError: ranks diverged, or one is missing
    LAUNCHER_LOST = 83  # the torchrun that started this rank has ended
    OUT_OF_PATIENCE = 84  # asked to stop, and the step or its checkpoint took too long
    INTERRUPTED = 130  # Ctrl-C (the second one where the first asks for a stop)


def this_host() -> tuple[str, str]:
    """This process's container and kernel boot id ("" if unknown).

    Processes can map each other's memory only if these are equal.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""


def missing_for_gpu(compilers: Sequence[str] = C_COMPILERS) -> str | None:
    """The missing tool without which torch.compile cannot make GPU code, or None.

    Args:
        compilers: names or paths of C compilers; one of them must be found.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    if not any(shutil.which(name) for name in compilers):
        return f"a C compiler ({', '.join(compilers)})"
    return None


def say(text: str) -> None:
    """Write to standard error, past Python's buffer, whose lock a stuck thread may hold."""
    data = printable(text).encode(errors="replace")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:  # nobody reads it any more
        return


# Threads
# --------------------------------------------------------------------------------------------------


def frames() -> dict[threading.Thread | None, FrameType]:
    """The innermost frame of each thread that runs Python, without those that only watch.

    None stands for threads of C.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found: dict[threading.Thread | None, FrameType] = {}
    for number, frame in sys._current_frames().items():  # noqa: SLF001 (the documented way)
        thread = threads.get(number)
        if thread is None or not thread.name.startswith(_WATCHING):
            found[thread] = frame
    return found


def is_communicating() -> bool:
    """Whether a thread is inside of a collective, as far as Python can see."""
    for frame in frames().values():
        inner: FrameType | None = frame
        for _ in range(_DEPTH):
            if inner is None:
                break
            if inner.f_code.co_filename.startswith(_COMMUNICATION):
                return True
            inner = inner.f_back
    return False


def place(thread: threading.Thread) -> str:
    """Where a thread is in the user's program: file, line, function and the line itself.

    That is the innermost call outside of torch, of these packages and of Python's own library.
    """
    frame = frames().get(thread)
    if frame is None:
        return "nowhere"
    call = calls_of_program(traceback.extract_stack(frame))[-1]
    return f"{call.filename}:{call.lineno} in {call.name}: {call.line or '?'}"


def calls_of_program(calls: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The calls outside of torch, these packages and Python's own library; all if none is."""
    own = [
        call
        for call in calls
        if not call.filename.startswith("<")
        and not os.path.realpath(call.filename).startswith(_LIBRARIES)
    ]
    return own or list(calls)


def stacks() -> str:
    """The Python stacks of all threads, innermost call last, the main thread first."""
    found = sorted(frames().items(), key=lambda item: item[0] is not threading.main_thread())
    return "\n".join(
        f"thread {'of C' if thread is None else thread.name}:\n"
        + "".join(traceback.format_stack(frame)).rstrip()
        for thread, frame in found
    )


# Launcher
# --------------------------------------------------------------------------------------------------


class Launcher:
    """Ends this process when torchrun has ended, from its construction until `left` is set.

    A torchrun that is killed outright tells its ranks nothing. Going on without it, they would
    write where the next run does, and a rank that waits for another would wait for ever.

    A thread looks, because it also looks while the main thread waits in a collective. Linux could
    send a signal at the parent's death instead (PR_SET_PDEATHSIG), but it does so when the parent's
    *thread* ends, and other systems cannot.

    Args:
        rank: for the message.

    Attributes:
        patience: seconds that the process may go on after its launcher, to save what it has.
        left: set when the run is over, and what becomes of the launcher does not matter any more.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._parent = rank, os.getppid()
        self.patience = 0.0
        self._lost, self.left = threading.Event(), threading.Event()
        threading.Thread(target=self._look, name="launcher", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether it has ended."""
        return self._lost.is_set() or os.getppid() != self._parent

    def _look(self) -> None:
        if not has_launching_ancestor():
            self._lost.set()
        while not self.is_lost:
            if self.left.wait(LOOK_S):
                return
        self._lost.set()
        end = time.monotonic() + self.patience
        # a second Ctrl-C, and the end of what is saved, bring patience to 0
        while self.patience and time.monotonic() < end and not self.left.wait(LOOK_S):
            continue
        if not self.left.is_set():
            say(f"[rank {self._rank}] the torchrun that started this rank has ended: exiting.\n")
            os._exit(Exit.LAUNCHER_LOST)


def has_launching_ancestor() -> bool:
    """Whether a process above this one may be torchrun; False if it has ended already.

    That it has ended while this process was starting cannot be told from the parent's number: in a
    container torchrun may be process 1, which adopts orphans elsewhere. On Linux it is told by
    torch's library, which torchrun has mapped, and no init, shell or service manager has; where
    that is hidden, by its command. Wrappers between torchrun and this process do not matter.
    """
    number = os.getppid()
    if not sys.platform.startswith("linux"):
        return number != 1
    if number == 0:
        return True  # it is outside of this container: nothing can be told

    def read(name: str) -> str:
        """Empty if the process has ended or does not show it."""
        try:
            return pathlib.Path(f"/proc/{number}/{name}").read_text(errors="replace")
        except OSError:
            return ""

    while number > 0:
        mapped = read("maps")
        if "libtorch" in mapped or (not mapped and "python" in read("cmdline")):
            return True
        found = re.search(r"^PPid:\s*(\d+)", read("status"), re.MULTILINE)
        number = int(found.group(1)) if found else 0
    return False
