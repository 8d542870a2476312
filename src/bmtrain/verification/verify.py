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
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import BMTrainError, ConfigurationError
from bmtrain.runtime import world
from bmtrain.verification import compare, program
from bmtrain.verification.record import Record
from bmtrain.verification.running import Settings, run_on_ranks, run_reference

LOOK_S = 0.05  # between two looks for outcomes
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
    (outcome,) = _outcomes(source, settings, [None])
    if outcome.record is None:
        raise ConfigurationError(
            outcome.refusal or f"the program fails in one plain process already:\n{outcome.failure}"
        )
    return outcome.record


def _outcomes(source: Source, settings: Settings, ranks: Sequence[int | None]) -> list[Outcome]:
    """Outcomes of a new process for each rank, in their order; None is the plain process.

    Waits for `settings.timeout`, or after the first failure for GRACE_S: ranks that wait for a
    failed one in a collective would hang until the timeout.
    """
    context = multiprocessing.get_context("spawn")
    running: list[SpawnProcess] = []
    found: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        files = [pathlib.Path(folder, f"outcome-{rank}") for rank in ranks]
        try:
            for rank, file in zip(ranks, files, strict=True):
                given = (source, settings, rank, file)
                running.append(context.Process(target=_child, args=given, daemon=True))
                running[-1].start()
            deadline = time.monotonic() + settings.timeout
            while len(found) < len(running) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                for place, (process, file) in enumerate(zip(running, files, strict=True)):
                    is_over = not process.is_alive()  # asked first: it writes before it ends
                    if place in found or not (file.exists() or is_over):
                        continue
                    found[place] = (
                        pickle.loads(file.read_bytes())
                        if file.exists()
                        else Outcome(
                            failure=f"the process ended with exit code {process.exitcode}",
                            when=time.monotonic(),
                        )
                    )
                    if found[place].record is None:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            for process in running:
                # A rank may hang in a collective; as a live child it would outlast the
                # verification.
                process.kill()
                process.join()
    late = Outcome(failure="it timed out: it waits for another rank, or the timeout is too short")
    return [found.get(place, late) for place in range(len(running))]


def _child(source: Source, settings: Settings, rank: int | None, file: pathlib.Path) -> None:
    """The main function of a spawned process."""
    ranks = 1 if rank is None else settings.ranks
    world.take_place(rank or 0, ranks)
    torch.set_num_threads(max(1, world.num_cores() // ranks))
    try:
        own = program.load_program(source)
        if rank is None:
            record = run_reference(own, settings)
        else:
            world.init_distributed(
                seed=settings.seed,
                device=settings.device,
                timeout=settings.timeout,
                init_method=file.with_name("meeting").as_uri(),
                **settings.init,
            )
            record = run_on_ranks(own, settings)
        outcome = Outcome(record=record)
    except BMTrainError as error:
        kind = "" if rank is None else f"{type(error).__name__}: "
        outcome = Outcome(refusal=f"{kind}{error}")
    except Exception:  # of any kind: the parent reports it
        outcome = Outcome(failure=traceback.format_exc(), when=time.monotonic())
    partial = file.with_suffix(".part")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(file)


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
        return _judged(reference, _outcomes(source, settings, range(settings.ranks)), settings)


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
