"""The host's part of a pass that a CUDA graph repeats.

The graph repeats what the device computes. Everything else is done anew for each replay: before it,
full parameters are gathered and numbers are set; after it, gradients are reduced and added to
`.grad`, as at the end of any backward pass. That work is recorded here, in its order. A pass is
rehearsed before it is captured, which tells what it needs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar

import torch

from bmtrain.shard.backward import Draws, HostSteps, Work
from bmtrain.shard.residence import Residence

Entry = TypeVar("Entry")
_OTHER_PASS = "the pass used other parameters than the one before it"


class NotCapturableError(RuntimeError):
    """A step that must run anew in every pass was about to be frozen in a graph."""


class Rehearsal:
    """The host's part of an eager pass, before it is captured.

    Attributes:
        after: work to do after each replay; an eager pass has none.
        used: where the full values are that it reads, in the order of their first use.
        places: 0-dim fp32 tensors for numbers that the host sets in each pass. Allocated outside of
            the capture: memory allocated in it may have been used earlier in the graph, and a
            replay would overwrite the number there.
        num_twice: number of parts of the pass that were computed twice.
    """

    is_capturing = False

    def __init__(self) -> None:
        self.after: list[Work] = []
        self.used: dict[Residence, None] = {}
        self.places: list[torch.Tensor] = []
        self.num_twice = 0

    def uses(self, residence: Residence) -> None:
        """Note what has to be gathered before each replay."""
        self.used[residence] = None

    def number(self, value: Callable[[], float], device: torch.device) -> float | torch.Tensor:
        """`value()`; allocates its place for the capture."""
        self.places.append(torch.empty((), dtype=torch.float32, device=device))
        return value()

    def draws(self) -> Draws:
        """Null contexts: an eager pass can save and restore the generator's state."""
        self.num_twice += 1
        return itertools.repeat(contextlib.nullcontext())

    def refuse(self, what: str) -> None:
        """Allowed: an eager pass can do anything."""


class Capture:
    """The host's part of a pass during its capture, which must match the rehearsal.

    Args:
        rehearsal: the pass before it.
        gathered: where the full values of the rehearsal's residences are, at fixed addresses.
        draws: contexts for the parts that are computed twice.

    Attributes:
        before: work to do before each replay.
        after: work to do after each replay.
    """

    is_capturing = True

    def __init__(
        self, rehearsal: Rehearsal, gathered: Iterable[Residence], draws: Iterable[Draws]
    ) -> None:
        self._places, self._draws = iter(rehearsal.places), iter(draws)
        self._gathered = set(gathered)
        self.before: list[Work] = []
        self.after: list[Work] = []

    def uses(self, residence: Residence) -> None:
        """NotCapturableError if the values of `residence` were not gathered before."""
        if residence not in self._gathered:
            raise NotCapturableError(_OTHER_PASS)

    def number(self, value: Callable[[], float], device: torch.device) -> torch.Tensor:
        """A 0-dim fp32 tensor on `device`, filled before each replay."""
        place = _next(self._places)
        self.before.append(lambda: place.fill_(value()))
        return place

    def draws(self) -> Draws:
        """Contexts with generator states that start alike."""
        return _next(self._draws)

    def refuse(self, what: str) -> NoReturn:
        """Raise NotCapturableError."""
        raise NotCapturableError(what)

    def refuse_communication(self, what: str) -> NoReturn:
        """Raise NotCapturableError: the ranks would do `what` together inside of the graph."""
        raise NotCapturableError(f"the ranks communicate inside of it: {what}")


@contextlib.contextmanager
def taped(host: HostSteps, tape: Rehearsal | Capture) -> Iterator[None]:
    """Record the host's part of the pass inside on `tape`."""
    host.tape = tape
    try:
        yield
    finally:
        host.tape = None


def _next(entries: Iterator[Entry]) -> Entry:
    for entry in entries:
        return entry
    raise NotCapturableError(_OTHER_PASS)
