"""A step of a run computed again, twice: does it repeat, and is it what the log says?"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import platform
from collections.abc import Sequence

import torch

import bmtrain as bmt
from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import everyone
from bmtrain.shard.slices import local_of
from model_center.training.base_weights import checksum
from model_center.training.metrics_file import Record, read_metrics

SHOWN = 3  # names in a line


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """What a rank computed in a step.

    Attributes:
        losses: of its micro-batches.
        loss, grad_norm: of all ranks, as in the log.
        gradients: checksums of this rank's slices, by parameter.
    """

    losses: list[float]
    loss: float
    grad_norm: float
    gradients: dict[str, int]

    @property
    def is_finite(self) -> bool:
        """Whether the step would be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Replay:
    """Compares a step with itself and with the log.

    Args:
        step: the number of the step.
        log: the file of metrics, which rank 0 reads; it need not be there.
    """

    def __init__(self, step: int, log: pathlib.Path) -> None:
        self.step = step
        records = read_metrics(log) if bmt.rank() == 0 else []
        self._log: dict[int, Record] = {
            record["step"]: record for record in records if "loss" in record
        }
        self._first: MeasuredStep | None = None
        self._diverged_at: int | None = None  # the first step before it that is not as in the log

    def check(self, step: int, loss: float) -> None:
        """Compare the loss of a step on the way there with the log."""
        known = self._log.get(step)
        if self._diverged_at is None and known is not None and not _equal(known["loss"], loss):
            self._diverged_at = step

    def compare(self, first: MeasuredStep, second: MeasuredStep) -> list[str]:
        """What was found, line by line. Collective; what rank 0 returns is of all ranks."""
        losses = not _same(first.losses, second.losses)
        names = [
            name for name, value in first.gradients.items() if second.gradients.get(name) != value
        ]
        axis = everyone()
        own = (losses, names, platform.node())
        found = [own] if axis is None else collectives.gather_objects(own, axis, "a replay")
        lines = [self._headline(), f"  {_figures('first time', first)}{self._as_logged(first)}"]
        lines.append(f"  {_figures('second time', second)}")
        differing = [rank for rank, (loss, grads, _) in enumerate(found) if loss or grads]
        if not differing:
            lines.append(f"  both times the same bits: losses, {len(first.gradients)} gradients")
            lines.append(self._conclusion(first))
            return lines
        for rank in differing:
            loss, grads, host = found[rank]
            what = ["its loss"] if loss else []
            what += [f"{len(grads)} gradients ({_listed(grads)})"] if grads else []
            lines.append(f"  the two times differ on rank {rank} ({host}): {', '.join(what)}")
        lines.append(_not_repeatable([rank for rank, (loss, _, _) in enumerate(found) if loss]))
        return lines

    def _headline(self) -> str:
        if self._diverged_at is None:
            return f"replay of step {self.step}:"
        return (
            f"replay of step {self.step}: from step {self._diverged_at} on, losses are not those "
            "of the log"
        )

    def _as_logged(self, found: MeasuredStep) -> str:
        known = self._log.get(self.step)
        if known is None:
            return "; the log does not have this step"
        if _is_logged(known, found):
            return "; the log has the same"
        return f"; the log has loss {known['loss']!r}, gradient norm {known['grad_norm']!r}"

    def _conclusion(self, found: MeasuredStep) -> str:
        known = self._log.get(self.step)
        if known is None or _is_logged(known, found):
            cause = "it repeats: the cause is its batch or the weights, not "
            return f"  {cause}from a device that computes wrongly now and then"
        return (
            "  it repeats here, but the log has another result: then it was computed by other "
            "machines, versions or numbers of ranks, by kernels that do not repeat, or wrongly"
        )


def gradient_checksums(model: torch.nn.Module) -> dict[str, int]:
    """A checksum of this rank's slice of each gradient."""
    return {
        name: checksum(local_of(param.grad))
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def _figures(which: str, found: MeasuredStep) -> str:
    return f"{which}: loss {found.loss!r}, gradient norm {found.grad_norm!r}"


def _not_repeatable(ranks: Sequence[int]) -> str:
    who = f"look at the device of rank {ranks[0]}" if ranks else "one of the devices (it shows in "
    who += "" if ranks else "sums of gradients alone, which do not tell whose)"
    return (
        f"  it does not repeat: {who} computes wrongly now and then, or kernels do not repeat "
        "(torch.use_deterministic_algorithms says which): exclude these first"
    )


def _is_logged(known: Record, found: MeasuredStep) -> bool:
    return _equal(known["loss"], found.loss) and _equal(known["grad_norm"], found.grad_norm)


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: float, other: float) -> bool:
    """To the last bit; a NaN is a NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
