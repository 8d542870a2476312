"""The processes of a verification: one plain process and the ranks.

Each is spawned and imports the program itself.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import pathlib
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
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
GRACE_S = 5.0  # how long the other ranks may run on after one has failed

Source = str | Callable[[], Program]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a process: its record, or else a refusal or a failure.

    Attributes:
        record: None if the process has failed.
        refusal: the text of an error of bmtrain.errors.
        failure: the traceback of any other error, or how the process ended.
        when: the time of the failure in seconds of the host's monotonic clock; infinite if unknown.
    """

    record: Record | None = None
    refusal: str = ""
    failure: str = ""
    when: float = float("inf")


def reference_of(source: Source, settings: Settings) -> Record:
    """Run the program in one new process and return its record.

    Raises:
        ConfigurationError: for a program that cannot be verified, or that fails in one process.
    """
    (outcome,) = _run(source, settings, [None], "")
    if outcome.record is None:
        raise ConfigurationError(
            outcome.refusal or f"the program fails in one plain process already:\n{outcome.failure}"
        )
    return outcome.record


def on_ranks(source: Source, settings: Settings) -> list[Outcome]:
    """Run the program on `settings.ranks` new processes; their outcomes in rank order."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        meeting = pathlib.Path(folder, "meeting").as_uri()
        return _run(source, settings, range(settings.ranks), meeting)


def _run(
    source: Source, settings: Settings, ranks: Iterable[int | None], meeting: str
) -> list[Outcome]:
    """Outcomes of a new process for each rank; None is the plain one. `meeting`: of the ranks."""
    context = multiprocessing.get_context("spawn")
    running: list[tuple[SpawnProcess, connection.Connection]] = []
    try:
        for rank in ranks:
            here, there = context.Pipe(duplex=False)
            given = (there, source, settings, rank, meeting)
            process = context.Process(target=_child, args=given, daemon=True)
            process.start()
            # Without this, the write end stays open here, a child that dies sends no end of file,
            # and the wait for its outcome lasts until the timeout.
            there.close()
            running.append((process, here))
        return _collect(running, time.monotonic() + settings.timeout)
    finally:
        for process, pipe in running:
            process.join(0 if process.exitcode is None else None)
            # A rank may hang in a collective; as a live child it would outlast the verification.
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _collect(
    running: Sequence[tuple[SpawnProcess, connection.Connection]], deadline: float
) -> list[Outcome]:
    """Collect outcomes until the deadline, which the first failure moves to GRACE_S from then.

    Ranks that wait for a failed one in a collective would otherwise hang until the timeout.
    """
    found: dict[int, Outcome] = {}
    waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(running)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(waiting), timeout=left):
            rank = waiting.pop(pipe)
            process, own = running[rank]
            try:
                outcome = pickle.loads(own.recv_bytes())
            except (EOFError, OSError):  # it died before it sent, or while it did
                process.join(GRACE_S)
                outcome = Outcome(
                    failure=f"the process ended with exit code {process.exitcode}",
                    when=time.monotonic(),
                )
            found[rank] = outcome
            if outcome.record is None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    late = Outcome(
        failure="it did not end in time: it waits for another rank, or the timeout is too short"
    )
    return [found.get(rank, late) for rank in range(len(running))]


def _child(
    pipe: connection.Connection, source: Source, settings: Settings, rank: int | None, meeting: str
) -> None:
    """The main function of a spawned process."""
    ranks = 1 if rank is None else settings.ranks
    world.take_place(rank or 0, ranks)
    torch.set_num_threads(max(1, world.num_cores() // ranks))
    try:
        program = load_program(source)
        if rank is None:
            record = run_reference(program, settings)
        else:
            given = {name: vars(settings)[name] for name in ("seed", "device", "timeout")}
            world.init_distributed(**{"init_method": meeting, **given, **settings.init})
            record = run_on_ranks(program, settings)
        outcome = Outcome(record=record)
    except REFUSALS as error:
        kind = "" if rank is None else f"{type(error).__name__}: "
        outcome = Outcome(refusal=f"{kind}{error}")
    except Exception:  # of any kind: the parent reports it
        outcome = Outcome(failure=traceback.format_exc(), when=time.monotonic())
    # Pickled by value. Connection.send would share the tensors' memory, which this process frees
    # when it exits, possibly before the parent has mapped it.
    with pipe:
        pipe.send_bytes(pickle.dumps(outcome))
