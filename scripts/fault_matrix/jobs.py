"""Jobs: a launcher with its two ranks, what they print, and when the last of them has ended.

A job costs more than ten seconds of imports. A warm one is forked from a server that has them
behind it, torchrun and ranks alike; all else of it is torchrun's. A cold one is started as users
do.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from typing import Any

import psutil
from scripts.fault_matrix import faulty
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

ROOT = faulty.ROOT
LAUNCH = str(ROOT / "scripts" / "launch.py")
_PRELOADED = [
    "torch._dynamo",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tokenizers",
    "model_center.arguments",
    "model_center.commands.train",
    "model_center.model",
    "model_center.tokenizer",
    "model_center.training",
    "scripts.fault_matrix.jobs",
    "scripts.fault_matrix.moments",
]


@dataclasses.dataclass(frozen=True)
class Left:
    """What a job left behind.

    Attributes:
        code: the launcher's exit code; None if anything had to be killed.
        began, ended: the launcher's start, and the end of the last process; as time.monotonic().
        said: what all of them printed, piece by piece, and when.
    """

    code: int | None
    began: float
    ended: float
    said: Sequence[tuple[float, bytes]]

    @property
    def printed(self) -> str:
        """All of it."""
        return b"".join(piece for _, piece in self.said).decode(errors="replace")

    def first(self, is_wanted: Callable[[str], bool]) -> float | None:
        """When what was printed was first as wanted."""
        printed = b""
        for when, piece in self.said:
            printed += piece
            if is_wanted(printed.decode(errors="replace")):
                return when
        return None


class Job:
    """A running program on two ranks.

    Args:
        folder: for its files; made.
        command: the program and its arguments.
        environment: more of it.
        is_warm: whether it is forked.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        command: list[str],
        environment: Mapping[str, str],
        *,
        is_warm: bool,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pids = folder / f"pids-{time.monotonic_ns()}"
        self._pids.mkdir()
        pipe = self._pids / "output"
        os.mkfifo(pipe)
        # The end of the file is the end of all processes that could write to it.
        self._reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        argv = [LAUNCH, "--nproc", "2", str(pathlib.Path(faulty.__file__)), *command]
        more = {**environment, **plain_environment(), faulty.PIDS: str(self._pids)}
        self.began = time.monotonic()
        start = _forked if is_warm else _executed
        self.launcher, self._wait = start(str(pipe), argv, more)
        os.close(os.open(pipe, os.O_WRONLY))  # else its end is not seen if nobody ever opens it
        self._said: list[tuple[float, bytes]] = []

    def ranks(self) -> dict[int, int]:
        """The numbers of the processes of the ranks that have begun."""
        found = {}
        for path in self._pids.iterdir():
            with contextlib.suppress(ValueError, OSError):
                if path.name.isdecimal():
                    found[int(path.name)] = int(path.read_text())
        return found

    def left(
        self,
        limit: float,
        mark: pathlib.Path | None = None,
        seconds: float = 75,
        is_enough: Callable[[str], bool] = lambda printed: False,
    ) -> Left:
        """Wait for the end, at most `limit` seconds, and `seconds` after the mark is written, or
        until what is printed is enough; then it is killed.
        """
        end, code = time.monotonic() + limit, None
        is_marked = mark is None
        while time.monotonic() < end:
            if not is_marked and mark is not None and mark.exists():
                is_marked, end = True, min(end, time.monotonic() + seconds)
            if select.select([self._reading], [], [], 0.2)[0]:
                content = os.read(self._reading, 65536)
                if not content and self._wait(0.0) is not None:
                    code = self._wait(0.0)
                    break
                if not content:  # nobody has opened it yet, or the launcher is ending
                    time.sleep(0.02)
                self._said.append((time.monotonic(), content))
                if content and is_enough(Left(None, 0.0, 0.0, self._said).printed):
                    break
        ended = time.monotonic()
        if code is None:
            self.end()
        os.close(self._reading)
        return Left(code, self.began, ended, self._said)

    def unread(self, limit: float, mark: pathlib.Path, *, is_interrupted: bool) -> Left:
        """Read until the mark is written, and no more; then wait for the end, at most `limit`
        seconds. The launcher gets a SIGINT if it is interrupted, as by Ctrl-C, which ends a reader.
        """
        end = time.monotonic() + limit
        while not mark.exists() and time.monotonic() < end:
            if select.select([self._reading], [], [], 0.05)[0]:
                self._said.append((time.monotonic(), os.read(self._reading, 65536)))
        os.close(self._reading)
        if is_interrupted:
            os.kill(self.launcher, signal.SIGINT)
        code = self._wait(max(0.0, end - time.monotonic()))
        while any(map(psutil.pid_exists, self.ranks().values())) and time.monotonic() < end:
            time.sleep(0.05)
        ended = time.monotonic()
        self.end()
        return Left(None if ended > end else code, self.began, ended, self._said)

    def has_ended(self, seconds: float = 0.05) -> bool:
        """Whether the launcher has, within this time."""
        return self._wait(seconds) is not None

    def end(self) -> None:
        """Kill what is left."""
        numbers = {self.launcher, *self.ranks().values()}
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.launcher).children(recursive=True)
            numbers |= {child.pid for child in children}
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._wait(10.0)


def plain_environment() -> dict[str, str]:
    """Of programs on the CPU, beside each other."""
    return {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # as scripts/launch.py has it, which a warm job reads late
    }


Wait = Callable[[float], int | None]  # the launcher's exit code, None if it has not ended by then


def _executed(pipe: str, argv: list[str], more: Mapping[str, str]) -> tuple[int, Wait]:
    with open(pipe, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *argv],
            env={**os.environ, **more},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None

    return process.pid, wait


def _forked(pipe: str, argv: list[str], more: Mapping[str, str]) -> tuple[int, Wait]:
    process = _server().Process(target=_launch, args=(pipe, argv, dict(more)), daemon=False)
    process.start()

    def wait(seconds: float) -> int | None:
        process.join(seconds)
        return process.exitcode

    assert process.pid is not None
    return process.pid, wait


_STARTING = threading.Lock()


def _server() -> Any:
    """The server, which is started with the environment that its modules are to see."""
    context = multiprocessing.get_context("forkserver")
    with _STARTING:
        context.set_forkserver_preload(_PRELOADED)
        before = dict(os.environ)
        os.environ.update(plain_environment())
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
    return context


def _launch(pipe: str, argv: list[str], more: Mapping[str, str]) -> None:
    """In a process of its own: the launcher."""
    os.setsid()
    output = os.open(pipe, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.__stderr__ = sys.stderr  # type: ignore[misc]
    os.environ.update(more)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    SubprocessHandler._popen = _fork  # type: ignore[method-assign,assignment]  # noqa: SLF001
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


class _Child:
    """What torchrun asks of a subprocess.Popen."""

    def __init__(self, number: int, args: tuple[str, ...]) -> None:
        self.pid, self.args = number, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None:
            number, status = os.waitpid(self.pid, os.WNOHANG)
            if number:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: as Popen does.
        """
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return self.returncode or 0


def _fork(handler: Any, args: tuple[str, ...], environment: dict[str, str]) -> _Child:
    """In place of a new interpreter: `args` are "python -u PROGRAM ARGUMENT..."."""
    number = os.fork()
    if number:
        return _Child(number, args)
    code: object = 1
    try:
        os.setsid()
        # torchrun's connections, which a new program would not have; none of its objects goes away
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(environment)
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(name, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()  # noqa: SLF001
        sys.excepthook = sys.__excepthook__
        sys.argv = list(args[args.index(str(pathlib.Path(faulty.__file__))) :])
        code = _live()
    finally:
        os._exit(code if isinstance(code, int) else 1 if code else 0)


def _live() -> object:
    """What the interpreter does with a main program; its exit code."""
    code: object = 0
    try:
        faulty.main()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    return code
