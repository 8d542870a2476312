"""Agreement among the ranks of an axis: maxima, equality, and errors raised on all of them."""

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
Figures = tuple[float, float, float]  # of `look`
# Elements of a tensor compared between ranks. Comparing all of them takes seconds for a large model
# on a CPU.
NUM_SAMPLED = 2**22


def everyone() -> Axis | None:
    """The axis of all ranks; None before `init_distributed`, where there is one process."""
    return world.current().mesh.world if world.is_initialized() else None


def largest(figures: Sequence[float], axis: Axis, what: str) -> list[float]:
    """The elementwise maximum over all ranks, in fp64.

    Collective; travels on the CPU, so it does not synchronise with the device. `what` the figures
    are: ranks that have diverged must not take one agreement for another.
    """
    if axis.size == 1:
        return list(figures)
    return world.current().service(Ledger).largest(figures, axis, what)


def is_same(figures: Sequence[int], axis: Axis, what: str) -> bool:
    """Whether all ranks pass the same figures. Collective; the count must match on all ranks."""
    ends = largest([*figures, *(-figure for figure in figures)], axis, what)
    return all(
        high == -low for high, low in zip(ends[: len(figures)], ends[len(figures) :], strict=True)
    )


def look(x: torch.Tensor) -> Figures:
    """The norm of a tensor, its component along a fixed direction, and a mark of NaN and
    infinities.

    The component distinguishes tensors of equal norm; in both NaN and infinities count as 0. All
    are computed from at most NUM_SAMPLED evenly spaced elements.
    """
    x = (x.to_dense() if x.layout is not torch.strided else x).detach()
    flat = evenly_spaced(torch.view_as_real(x) if x.is_complex() else x, NUM_SAMPLED)
    mark = 0.0
    if flat.is_floating_point():
        mark = float((flat.isnan() * 1.0 + flat.isposinf() * 1e3 + flat.isneginf() * 1e6).sum())
        flat = flat.nan_to_num(0, 0, 0)
    else:
        flat = flat.double()
    weights = {1: 1.0, 2: -1.6, 3: 0.7, 5: -1.1}
    component = sum(
        weight * float(flat[::step].sum(dtype=torch.float64)) for step, weight in weights.items()
    )
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)), component, mark


def evenly_spaced(x: torch.Tensor, most: int) -> torch.Tensor:
    """At most `most` evenly spaced elements of a tensor, 1-D."""
    flat = x.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))]


def differ(tensors: Sequence[torch.Tensor], axis: Axis, what: str) -> list[bool]:
    """For each tensor, computed on all ranks, whether they differ by more than rounding.

    Collective; synchronises with the device.
    """
    if axis.size == 1:
        return [False] * len(tensors)
    figures = [
        figure
        for x in tensors
        for norm, along, mark in [look(x)]
        for figure in (norm, -norm, along, -along, mark, -mark)
    ]
    ends = iter(largest(figures, axis, what))
    return [
        not are_near((high, most, top), (-low, -least, -bottom), x.dtype)
        for x, high, low, most, least, top, bottom in zip(tensors, *[ends] * 6, strict=True)
    ]


def are_near(one: Figures, other: Figures, dtype: torch.dtype) -> bool:
    """Whether what `look` says of two tensors of this dtype differs by no more than rounding."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    rounding = 0.0 if exact else torch.finfo(dtype).eps ** 0.5
    off = max(abs(one[0] - other[0]), abs(one[1] - other[1]))
    return off <= rounding * max(one[0], other[0]) and one[2] == other[2]


def agree(
    error: str | None,
    axis: Axis | None,
    cause: BaseException | None = None,
    kind: type[Exception] = CheckpointError,
) -> None:
    """Raise `kind` on every rank if any rank passes an `error`: its own, else the first rank's.

    Collective. Without it, the ranks that succeeded would hang in their next collective.
    """
    errors = (
        {}
        if axis is None
        else dict(zip(axis.ranks, collectives.gather_objects(error, axis, "errors"), strict=True))
    )
    if error is not None:
        raise kind(error) from cause
    for rank, text in errors.items():
        if text is not None:
            raise kind(f"{text} (on rank {rank})")


def attempt(step: Callable[[], T], axis: Axis | None, kind: type[Exception] = CheckpointError) -> T:
    """Run `step()`; an exception on any rank raises `kind` on all. Collective."""
    result: T | None = None
    error: str | None = None
    cause: BaseException | None = None
    try:
        result = step()
    # Any exception: an uncaught one would leave the other ranks hanging in `agree`.
    except Exception as failure:
        cause = failure
        is_told = isinstance(failure, CheckpointError | kind)
        error = str(failure) if is_told else f"{type(failure).__name__}: {failure}"
    agree(error, axis, cause, kind)
    return result  # type: ignore[return-value]  # None only if `step` returned it
