"""Agreement among the ranks of an axis: maxima, equality, and errors raised on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import CheckpointError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis

T = TypeVar("T")
Figures = Sequence[float]  # the three of `look`
# Elements of a tensor compared between ranks. Comparing all of them takes seconds for a large model
# on a CPU.
NUM_SAMPLED = 2**22
SHOWN = 300  # characters of what each rank passes, in a message
# Of `look`: (step, weight), the sum of every step-th element counts so much.
_DIRECTION = ((1, 1.0), (2, -1.6), (3, 0.7), (5, -1.1))


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


def told_apart(text: str, axis: Axis, what: str, shown: str | None = None) -> str | None:
    """None if all ranks pass the same text; else what each of them passes, for a message.

    A checksum travels, and texts only where it differs: `shown` if given, else `text`, from shortly
    before the place where they part. Collective, on the CPU.
    """
    own = torch.tensor(zlib.crc32(text.encode()), device="cpu")  # int64
    if (world.current().service(Ledger).gathered(own, axis, f"agreement on {what}") == own).all():
        return None
    texts = collectives.gather_objects(text if shown is None else shown, axis, what)
    start = 0
    if max(map(len, texts)) > SHOWN:
        columns = zip(*texts, strict=False)
        apart = next((n for n, letters in enumerate(columns) if len({*letters}) > 1), 0)
        start = max(apart - SHOWN // 2, 0)
    return "; ".join(
        f"rank {rank}: {'... ' if start else ''}{text[start : start + SHOWN]}"
        for rank, text in zip(axis.ranks, texts, strict=True)
    )


def look(x: torch.Tensor) -> Figures:
    """The norm of a tensor, its component along a fixed direction, and a mark of NaN and
    infinities.

    The component distinguishes tensors of equal norm; in both NaN and infinities count as 0. All
    are computed from at most NUM_SAMPLED evenly spaced elements. Synchronises with the device.
    """
    norm, component, mark = _figures(x).tolist()
    return norm, component, mark


def _figures(x: torch.Tensor) -> torch.Tensor:
    """What `look` says of a tensor: (3,), fp64, on its device."""
    x = (x.to_dense() if x.layout is not torch.strided else x).detach()
    flat = evenly_spaced(torch.view_as_real(x) if x.is_complex() else x, NUM_SAMPLED)
    if flat.is_floating_point():
        marked = flat.isnan() * 1.0 + flat.isposinf() * 1e3 + flat.isneginf() * 1e6
        flat = flat.nan_to_num(0, 0, 0)
    else:
        flat = flat.double()
        marked = torch.zeros_like(flat[:1])
    sums = [flat[::step].sum(dtype=torch.float64) * weight for step, weight in _DIRECTION]
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.stack([norm, torch.stack(sums).sum(), marked.sum(dtype=torch.float64)])


def evenly_spaced(x: torch.Tensor, most: int) -> torch.Tensor:
    """At most `most` evenly spaced elements of a tensor, 1-D."""
    flat = x.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))]


class HostCopy:
    """Tensors on their way to the host: the copies start here, without waiting for the device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._arrived = list(tensors), list[torch.Event]()
        for device in {x.device for x in tensors if x.device.type != "cpu"}:
            # into page-locked memory: a pageable copy would block the host
            self._tensors = [
                x.to("cpu", non_blocking=True) if x.device == device else x for x in self._tensors
            ]
            self._arrived.append(torch.cuda.current_stream(device).record_event())

    @property
    def needs_waiting(self) -> bool:
        """Whether anything comes from a device at all."""
        return bool(self._arrived)

    def values(self) -> list[torch.Tensor]:
        """The tensors on the CPU. Waits for the device."""
        for event in self._arrived:
            # Without it, the host would read memory that the copy has not written yet.
            event.synchronize()
        return self._tensors


class Comparison:
    """Tensors that all ranks have computed, to be compared between them.

    What is compared is computed and copied to the host from the start on, without waiting for the
    device; the tensors may change afterwards.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], axis: Axis, what: str) -> None:
        self._axis, self._what = axis, what
        self._dtypes = [x.dtype for x in tensors]
        self._figures = HostCopy([_figures(x) for x in tensors])

    def differing(self) -> list[bool]:
        """For each tensor, whether it differs between ranks by more than rounding.

        Collective; waits for the device.
        """
        own = torch.stack(self._figures.values())
        ledger = world.current().service(Ledger)
        found = ledger.gathered(own, self._axis, f"{len(own)} {self._what} to compare")
        highs, lows = found.amax(0).tolist(), found.amin(0).tolist()
        return [not are_near(*x) for x in zip(highs, lows, self._dtypes, strict=True)]


def differ(tensors: Sequence[torch.Tensor], axis: Axis, what: str) -> list[bool]:
    """For each tensor, computed on all ranks, whether they differ by more than rounding.

    Collective; synchronises with the device.
    """
    if axis.size == 1:
        return [False] * len(tensors)
    return Comparison(tensors, axis, what).differing()


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
    errors = [error] if axis is None else collectives.gather_objects(error, axis, "errors")
    if error is not None:
        raise kind(error) from cause
    for place, text in enumerate(errors):
        if axis is not None and text is not None:
            raise kind(f"{text} (on rank {axis.ranks[place]})")


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
