"""`verify`: check that a program computes the same on ranks as in one process."""

from __future__ import annotations

from typing import Any

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.verification import compare, processes, program, record, running
from bmtrain.verification.processes import Outcome, Source


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
            A report, true if nothing differs. Tolerances follow from dtypes: see
            verification/tolerance.py.

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
        settings = running.Settings(
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
        reference = processes.reference_of(source, settings)
        return _judged(reference, processes.on_ranks(source, settings), settings)


def _judged(
    reference: record.Record, outcomes: list[Outcome], settings: running.Settings
) -> compare.Report:
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


def _in_this_launch(source: Source, settings: running.Settings) -> compare.Report:
    """Verify on the ranks that torchrun has started.

    Errors are not caught: the rank that raises exits, and torchrun then ends the others, which
    would otherwise hang in a collective.
    """
    is_first = world.launched().rank == 0
    reference = processes.reference_of(source, settings) if is_first else None
    world.init_distributed(
        seed=settings.seed, device=settings.device, timeout=settings.timeout, **settings.init
    )
    axis = world.current().mesh.world
    own = running.run_on_ranks(program.load_program(source), settings)
    records = collectives.gather_objects(own, axis, "verify")
    report = (
        None
        if reference is None
        else compare.compare(reference, records, settings.device, settings.slack)
    )
    found: compare.Report = collectives.broadcast_object(report, 0, axis, "verify")
    return found


verify = Verify()
