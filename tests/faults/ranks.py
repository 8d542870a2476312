"""Ranks that may die: processes with the exit codes and the output that programs would have."""

import atexit
import contextlib
import dataclasses
import os
import re
import socket
import sys
import time

import torch
import torch.distributed as dist
from tests.ranks.runner import fork_server


@dataclasses.dataclass(frozen=True)
class Left:
    """What the ranks left behind.

    Attributes:
        codes: exit codes, None for a rank that had to be killed.
        printed: what they wrote.
        ended: when the last rank that ended by itself had, as time.monotonic() tells it.
    """

    codes: list[int | None]
    printed: list[str]
    ended: float

    @property
    def seconds(self):
        """From the fault, whose time a rank has printed, to the end."""
        found = re.search(r"^fault at (.*)$", "\n".join(self.printed), re.MULTILINE)
        assert found is not None, self.printed
        return self.ended - float(found.group(1))


def run(program, *args, ranks=2, folder, timeout=60.0, hosted=False, grace=3.0):
    """Run `program(*args)` on each rank, as the main program of a process.

    Args:
        hosted: whether rank 0 hosts the store, as without torchrun.
        grace: see `run_in`.
    """
    with _store(hosted) as port:
        environments = [
            {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "DEVICE": "cpu",
                "TORCHELASTIC_USE_AGENT_STORE": str(not hosted),
            }
            for rank in range(ranks)
        ]
        return run_in(environments, program, *args, folder=folder, timeout=timeout, grace=grace)


def run_in(environments, program, *args, folder, timeout=60.0, grace=3.0):
    """Run `program(*args)` in a process for each of these environments.

    Args:
        grace: seconds for the others when the first has ended: one that cannot end is left alone.
    """
    logs = [folder / f"rank{rank}.log" for rank in range(len(environments))]
    processes = [
        fork_server().Process(target=_live, args=(dict(environment), str(log), program, args))
        for environment, log in zip(environments, logs, strict=True)
    ]
    for process in processes:
        process.start()
    codes: list[int | None] = [None] * len(processes)
    ended = 0.0
    end = time.monotonic() + timeout
    while None in codes and time.monotonic() < end:
        for rank, process in enumerate(processes):
            if codes[rank] is None and not process.is_alive():
                codes[rank], ended = process.exitcode, time.monotonic()
                end = min(end, time.monotonic() + grace)
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    return Left(codes, [log.read_text(errors="replace") for log in logs], ended)


@contextlib.contextmanager
def _store(hosted):
    """The port of the store."""
    if hosted:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield port
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port
    del store


def _live(environment, log, program, args):
    """What the interpreter does with a main program."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.__stderr__ = sys.stderr  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    code: object = 0
    try:
        program(*args)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)
