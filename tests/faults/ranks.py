"""Ranks that may die: processes with the exit codes and the output that programs would have."""

import atexit
import dataclasses
import os
import re
import sys
import time

import torch
from tests.ranks import runner


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
    store = None if hosted else runner.new_store()  # lives as long as the ranks
    port = runner.free_port() if store is None else store.port
    own = {"DEVICE": "cpu", "TORCHELASTIC_USE_AGENT_STORE": str(not hosted)}
    environments = [
        {**os.environ, **runner.environment_of(rank, ranks, port), **own} for rank in range(ranks)
    ]
    return run_in(environments, program, *args, folder=folder, timeout=timeout, grace=grace)


def run_in(environments, program, *args, folder, timeout=60.0, grace=3.0):
    """Run `program(*args)` in a process for each of these environments.

    Args:
        grace: seconds for the others when the first has ended: one that cannot end is left alone.
    """
    logs = [folder / f"rank{rank}.log" for rank in range(len(environments))]
    processes = [
        runner.fork_server().Process(
            target=_live, args=(dict(environment), str(log), program, args)
        )
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


def _live(environment, log, program, args):
    """What the interpreter does with a main program."""
    runner.print_into(log)
    sys.__stderr__ = sys.stderr  # type: ignore[misc, assignment]
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
