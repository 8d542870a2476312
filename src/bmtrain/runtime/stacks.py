"""Where the threads of this process are."""

from __future__ import annotations

import os
import pathlib
import sys
import sysconfig
import threading
import traceback
from types import FrameType

from torch.distributed import distributed_c10d

# Threads of the library that only watch.
WATCHING = ("launcher", "watchdog", "stop request")
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


def frames() -> dict[threading.Thread | None, FrameType]:
    """The innermost frame of each thread that runs Python, without those that only watch."""
    names = {thread.ident: thread for thread in threading.enumerate()}
    return {
        names.get(number): frame
        for number, frame in sys._current_frames().items()  # noqa: SLF001 (the documented way)
        if not _name(names.get(number)).startswith(WATCHING)
    }


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
    return [call for call in calls if not _is_library(call.filename)] or list(calls)


def text() -> str:
    """The Python stacks of all threads, innermost call last, the main thread first."""
    found = sorted(frames().items(), key=lambda item: item[0] is not threading.main_thread())
    return "\n".join(
        f"thread {_name(thread)}:\n" + "".join(traceback.format_stack(frame)).rstrip()
        for thread, frame in found
    )


def _name(thread: threading.Thread | None) -> str:
    return "of C" if thread is None else thread.name


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or os.path.realpath(filename).startswith(_LIBRARIES)
