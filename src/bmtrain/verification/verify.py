"""`verify`: check that a program computes the same on ranks as in one process.

One plain process and the ranks; each is spawned and imports the program itself.
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
from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.verification import compare, program
from bmtrain.verification.record import Record
from bmtrain.verification.running import Settings, run_on_ranks, run_reference

REFUSALS = tuple(
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
GRACE_S = 5.0  # how long the other ranks may run on after one has failed

Source = str | Callable[[], program.Program]


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
    late = Outcome(failure="it timed out: it waits for another rank, or the timeout is too short")
    return [found.get(rank, late) for rank in range(len(running))]


def _child(
    pipe: connection.Connection, source: Source, settings: Settings, rank: int | None, meeting: str
) -> None:
    """The main function of a spawned process."""
    ranks = 1 if rank is None else settings.ranks
    world.take_place(rank or 0, ranks)
    torch.set_num_threads(max(1, world.num_cores() // ranks))
    try:
        own = program.load_program(source)
        if rank is None:
            record = run_reference(own, settings)
        else:
            given = {name: vars(settings)[name] for name in ("seed", "device", "timeout")}
            world.init_distributed(**{"init_method": meeting, **given, **settings.init})
            record = run_on_ranks(own, settings)
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


class Verify:
    """Runs a program in one plain process and on ranks, and compares all tensors."""

    Program = program.Program
    Report = compare.Report
    Difference = compare.Difference
    Trainer = program.Trainer

    def __call__(
        self,
        source: Source,
        *,
        ranks: int = 2,
        steps: int = 3,
        device: str = "cpu",
        seed: int = 0,
        timeout: float = 300.0,
        **init: Any,
    ) -> compare.Report:
        """Compare losses, gradients, parameters, buffers, optimizer and random states of each step.

        Spawns processes, so a script that calls it needs `if __name__ == "__main__":`. Under
        torchrun the launched processes are the ranks; all of them must call it, before
        `init_distributed`. Each rank records full tensors: use a small configuration of the model.

        Args:
            source: a function that returns a `Program`, at the top level of a module, or
                "module:function".
            ranks: the number of ranks; under torchrun the world size is used instead.
            steps: the number of training steps.
            device: "cpu" or "cuda", for the plain process and all ranks.
            seed: the seed of torch, random and numpy.
            timeout: seconds for the plain run and for the run on ranks, each; under torchrun the
                latter is not limited as a whole, but each of its collectives is.
            init: further arguments of `init_distributed`, such as zero_level; and `slack`, a factor
                for all tolerances.

        Returns:
            A report, true if nothing differs by more than its tolerance, which follows from the
            dtypes.

        Raises:
            ConfigurationError: for a program that cannot be verified, one that is not deterministic
                for example.
        """
        if world.is_initialized():
            raise ConfigurationError(
                "verify starts runs of its own: call it before init_distributed, or in "
                "another program."
            )
        program.check_source(source)
        launched = world.launched().size
        settings = Settings(
            ranks=launched if launched > 1 else ranks,
            steps=steps,
            device=device,
            seed=seed,
            timeout=timeout,
            slack=init.pop("slack", 1.0),
            init=init,
        )
        if launched > 1:
            return _in_this_launch(source, settings)
        reference = reference_of(source, settings)
        return _judged(reference, on_ranks(source, settings), settings)


def _judged(reference: Record, outcomes: list[Outcome], settings: Settings) -> compare.Report:
    """The report on the ranks' outcomes.

    A failure comes before a refusal, which may be its consequence on other ranks. Of several
    failures the earliest is reported.
    """
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.failure]
    if failed:
        rank = min(failed, key=lambda rank: outcomes[rank].when)
        others = "".join(f"\nrank {r}: {o.refusal}" for r, o in enumerate(outcomes) if o.refusal)
        return compare.Report(
            verdict="failed", text=f"rank {rank}: {outcomes[rank].failure}{others}"
        )
    refused = {rank: outcome.refusal for rank, outcome in enumerate(outcomes) if outcome.refusal}
    if refused and len(refused) < len(outcomes):
        return compare.Report(
            verdict="failed",
            text=f"ranks {sorted(refused)} alone refused: {next(iter(refused.values()))}",
        )
    if refused:
        return compare.Report(verdict="refused", text=f"on all ranks, {refused[0]}")
    records = [outcome.record for outcome in outcomes if outcome.record is not None]
    return compare.compare(reference, records, settings.device, settings.slack)


def _in_this_launch(source: Source, settings: Settings) -> compare.Report:
    """Verify on the ranks that torchrun has started.

    Errors are not caught: the rank that raises exits, and torchrun then ends the others, which
    would otherwise hang in a collective.
    """
    is_first = world.launched().rank == 0
    reference = reference_of(source, settings) if is_first else None
    world.init_distributed(
        seed=settings.seed, device=settings.device, timeout=settings.timeout, **settings.init
    )
    axis = world.current().mesh.world
    own = run_on_ranks(program.load_program(source), settings)
    records = collectives.gather_objects(own, axis, "verify")
    report = (
        None
        if reference is None
        else compare.compare(reference, records, settings.device, settings.slack)
    )
    found: compare.Report = collectives.broadcast_object(report, 0, axis, "verify")
    return found


verify = Verify()
