"""What all ranks of an axis know alike: the largest of their figures, whether they are the same,
and what failed on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import CheckpointError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis

T = TypeVar("T")
# elements of a tensor that are compared between ranks: all would take seconds with large models on
# the CPU
NUM_SAMPLED = 2**22


def everyone() -> Axis | None:
    """All ranks of the run; None before `init_distributed`, where there is nobody to agree with."""
    return world.current().mesh.world if world.is_initialized() else None


def largest(figures: Sequence[float], axis: Axis) -> list[float]:
    """The largest of all ranks, figure by figure, in fp64.

    Collective; travels on the CPU, so that no device waits.
    """
    if axis.size == 1:
        return list(figures)
    return world.current().service(Ledger).largest(figures, axis)


def is_same(figures: Sequence[int], axis: Axis) -> bool:
    """Whether all ranks have these figures. Collective, as many figures everywhere."""
    ends = largest([*figures, *(-figure for figure in figures)], axis)
    return all(
        high == -low for high, low in zip(ends[: len(figures)], ends[len(figures) :], strict=True)
    )


def look(x: torch.Tensor) -> tuple[float, float]:
    """The norm of a tensor, and its component along a fixed direction, which tells two tensors of
    one norm apart.

    Of large tensors those of evenly spaced elements.
    """
    flat = evenly_spaced(
        (x.to_dense() if x.layout is not torch.strided else x).detach(), NUM_SAMPLED
    )
    flat = flat.nan_to_num(0, 0, 0) if flat.is_floating_point() else flat.double()
    weights = {1: 1.0, 2: -1.6, 3: 0.7, 5: -1.1}
    component = sum(
        weight * float(flat[::step].sum(dtype=torch.float64)) for step, weight in weights.items()
    )
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)), component


def evenly_spaced(x: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many elements of a tensor, 1-D."""
    flat = x.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))]


def differ(tensors: Sequence[torch.Tensor], axis: Axis) -> list[bool]:
    """Whether each, which all ranks have computed, differs between them by more than rounding.

    Collective, a GPU is waited for.
    """
    if axis.size == 1:
        return [False] * len(tensors)
    figures = [
        figure
        for x in tensors
        for norm, along in [look(x)]
        for figure in (norm, -norm, along, -along)
    ]
    ends = iter(largest(figures, axis))
    found = []
    for x, high, low, most, least in zip(tensors, ends, ends, ends, ends, strict=True):
        rounding = torch.finfo(x.dtype).eps ** 0.5 if x.is_floating_point() else 0.0
        found.append(not max(high + low, most + least) <= rounding * high)
    return found


def agree(
    error: str | None,
    axis: Axis | None,
    cause: BaseException | None = None,
    kind: type[Exception] = CheckpointError,
) -> None:
    """Raise `kind` on every rank if any brings an `error`: its own, or else the first rank's.

    Collective.
    """
    errors = (
        {}
        if axis is None
        else dict(zip(axis.ranks, collectives.gather_objects(error, axis), strict=True))
    )
    if error is not None:
        raise kind(error) from cause
    for rank, text in errors.items():
        if text is not None:
            raise kind(f"{text} (on rank {rank})")


def attempt(step: Callable[[], T], axis: Axis | None, kind: type[Exception] = CheckpointError) -> T:
    """`step()` on every rank. An error of any rank is one of this `kind` on all."""
    result: T | None = None
    error: str | None = None
    cause: BaseException | None = None
    try:
        result = step()
    # whatever it is, the other ranks must hear of it before they wait for this one
    except Exception as failure:
        cause = failure
        is_told = isinstance(failure, CheckpointError | kind)
        error = str(failure) if is_told else f"{type(failure).__name__}: {failure}"
    agree(error, axis, cause, kind)
    return result  # type: ignore[return-value]  # None only if `step` returned it
