"""The processes of a verification: a plain one, and ranks.

Each is started anew and imports the program itself.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import pathlib
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from bmtrain import errors
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.verification.program import Program, load_program
from bmtrain.verification.record import Record
from bmtrain.verification.running import Settings, run_on_ranks, run_reference

REFUSALS = tuple(
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
GRACE_S = 5.0  # how long the other ranks may go on after one has failed

Source = str | Callable[[], Program]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a process says at its end: its record, or why there is none, and when that was."""

    record: Record | None = None
    refusal: str = ""
    failure: str = ""
    when: float = float("inf")


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a process is told: `rank` is None for the plain one, `meeting` a file by which the ranks
    find each other.
    """

    source: Source
    settings: Settings
    rank: int | None = None
    meeting: str = ""


def reference_of(source: Source, settings: Settings) -> Record:
    """The record of a process of its own, without ranks.

    Raises:
        ConfigurationError: for a program that cannot be verified.
    """
    (outcome,) = _run([_Job(source, settings)], settings)
    if outcome.record is None:
        raise ConfigurationError(
            outcome.refusal or f"the program fails in one plain process already:\n{outcome.failure}"
        )
    return outcome.record


def on_ranks(source: Source, settings: Settings) -> list[Outcome]:
    """What `settings.ranks` new processes of this host end with, in rank order."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        meeting = pathlib.Path(folder, "meeting").as_uri()
        return _run(
            [_Job(source, settings, rank, meeting) for rank in range(settings.ranks)], settings
        )


def _run(jobs: Sequence[_Job], settings: Settings) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    running: list[tuple[SpawnProcess, connection.Connection]] = []
    try:
        for job in jobs:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(job, there), daemon=True)
            process.start()
            there.close()
            running.append((process, here))
        return _collect(running, time.monotonic() + settings.timeout)
    finally:
        for process, pipe in running:
            process.join(0 if process.exitcode is None else None)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _collect(
    running: Sequence[tuple[SpawnProcess, connection.Connection]], deadline: float
) -> list[Outcome]:
    """The outcomes that arrive in time; the first failure leaves the other ranks a moment to say
    theirs.
    """
    found: dict[int, Outcome] = {}
    waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(running)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(waiting), timeout=left):
            rank = waiting.pop(pipe)
            found[rank] = _received(running[rank])
            if found[rank].record is None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    late = Outcome(
        failure="it did not end in time: it waits for another rank, or the timeout is too short"
    )
    return [found.get(rank, late) for rank in range(len(running))]


def _received(member: tuple[SpawnProcess, connection.Connection]) -> Outcome:
    process, pipe = member
    try:
        outcome = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(GRACE_S)
        return Outcome(
            failure=f"the process ended with exit code {process.exitcode}", when=time.monotonic()
        )
    return (
        outcome
        if isinstance(outcome, Outcome)
        else Outcome(failure=f"the process sent {outcome!r}")
    )


def _child(job: _Job, pipe: connection.Connection) -> None:
    """The life of a process."""
    rank, ranks = (job.rank, job.settings.ranks) if job.rank is not None else (0, 1)
    world.take_place(rank, ranks)
    torch.set_num_threads(max(1, world.num_cores() // ranks))
    try:
        outcome = Outcome(record=_work(job))
    except REFUSALS as error:
        outcome = Outcome(
            refusal=f"{type(error).__name__}: {error}" if job.rank is not None else str(error)
        )
    except Exception:  # whatever it is, the process that waits must hear of it
        outcome = Outcome(failure=traceback.format_exc(), when=time.monotonic())
    # Tensors go as values: the memory of a process that has ended is nobody's.
    with pipe:
        pipe.send_bytes(pickle.dumps(outcome))


def _work(job: _Job) -> Record:
    program = load_program(job.source)
    if job.rank is None:
        return run_reference(program, job.settings)
    settings = job.settings
    world.init_distributed(
        **{
            "init_method": job.meeting,
            "seed": settings.seed,
            "device": settings.device,
            "timeout": settings.timeout,
            **settings.init,
        }
    )
    return run_on_ranks(program, settings)
