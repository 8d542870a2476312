"""What was not finite in a step, by a second pass over its batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import bmtrain as bmt
from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import everyone
from bmtrain.errors import NonFiniteError
from model_center.training.step_replay import Losses

SHOWN = 16  # rows of a batch in a message
Found = tuple[bmt.inspect.NonFinite, list[int] | None]


def find_cause(
    model: torch.nn.Module,
    manager: bmt.optim.OptimManager,
    losses: Losses,
    rows: list[list[int]] | None,
) -> list[Found]:
    """What each rank finds in its losses, and the rows of its micro-batch. Collective.

    Args:
        rows: of this rank's micro-batches, in the data set; None where they are not known.
    """
    found = bmt.inspect.find_non_finite(
        model, losses, lambda loss: manager.scale_loss(loss).backward()
    )
    number = found[bmt.rank()].micro_batch or 0
    own = rows[number] if rows is not None and number < len(rows) else None
    axis = everyone()
    all_rows = [own] if axis is None else collectives.gather_objects(own, axis, "a second look")
    return list(zip(found, all_rows, strict=True))


def cause_lines(found: Sequence[Found]) -> list[str]:
    """What a user needs to know, a line for each rank that is a cause."""
    weights = [one for one, _ in found if one.weight is not None]
    if weights:  # these are why all the rest is not finite
        return [f"rank {one.rank}: before the step, parameter {one.weight}" for one in weights]
    causes = [(one, rows) for one, rows in found if one.is_cause]
    if not causes:  # of a loss that is finite, gradients of weights alone tell
        causes = [(one, rows) for one, rows in found if one.gradient is not None]
    if not causes:
        return [
            "a second pass over the same batches is finite on all ranks: a device computes wrongly "
            "now and then, or kernels do not repeat; see --replay-step"
        ]
    return [f"rank {one.rank}: {one.text()}{_of_rows(rows)}" for one, rows in causes]


def non_finite_error(step: int, in_a_row: int, lines: Sequence[str]) -> NonFiniteError:
    """The error that ends a run."""
    found = "; ".join(lines) or (
        "its batches did not come from Run.steps, so they could not be looked at again"
    )
    return NonFiniteError(
        f"loss or gradients of {in_a_row} steps in a row, up to step {step}, are not finite, and "
        f"the steps were skipped. In the last one: {found}. The last checkpoint is as it was. "
        "Remedy: check these rows and that module, then restart with --resume and a lower "
        "learning rate or other data."
    )


def _of_rows(rows: list[int] | None) -> str:
    if rows is None:
        return " (the loader does not know the rows)"
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f" (rows {', '.join(map(str, rows[:SHOWN]))}{more} of the data set)"
