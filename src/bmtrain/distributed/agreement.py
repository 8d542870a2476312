"""One outcome for all ranks: what fails on one becomes the same error on every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bmtrain.distributed import collectives
from bmtrain.errors import CheckpointError
from bmtrain.runtime.mesh import Axis

T = TypeVar("T")


def agree(
    error: str | None, axis: Axis | None, cause: BaseException | None = None, kind: type[Exception] = CheckpointError
) -> None:
    """Raise `kind` on every rank if any brings an `error`: its own, or else the first rank's. Collective."""
    errors = {} if axis is None else dict(zip(axis.ranks, collectives.gather_objects(error, axis), strict=True))
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
    except Exception as failure:  # whatever it is, the other ranks must hear of it before they wait for this one
        cause = failure
        is_told = isinstance(failure, CheckpointError | kind)
        error = str(failure) if is_told else f"{type(failure).__name__}: {failure}"
    agree(error, axis, cause, kind)
    return result  # type: ignore[return-value]  # None only if `step` returned it
