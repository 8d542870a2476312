"""One outcome for all ranks: what fails on one becomes the same error on every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bmtrain.distributed import collectives
from bmtrain.errors import CheckpointError
from bmtrain.runtime.mesh import Axis

T = TypeVar("T")


def agree(error: str | None, axis: Axis, cause: BaseException | None = None) -> None:
    """Raise CheckpointError on every rank if any brings an `error`: its own, or else the first rank's. Collective."""
    errors = collectives.gather_objects(error, axis)
    if error is not None:
        raise CheckpointError(error) from cause
    for rank, text in zip(axis.ranks, errors, strict=True):
        if text is not None:
            raise CheckpointError(f"{text} (on rank {rank})")


def attempt(step: Callable[[], T], axis: Axis) -> T:
    """`step()` on every rank. An error of any rank is a CheckpointError on all."""
    result: T | None = None
    error: str | None = None
    cause: BaseException | None = None
    try:
        result = step()
    except Exception as failure:  # whatever it is, the other ranks must hear of it before they wait for this one
        cause = failure
        error = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
    agree(error, axis, cause)
    return result  # type: ignore[return-value]  # None only if `step` returned it
