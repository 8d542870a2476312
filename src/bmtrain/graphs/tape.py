"""The host's part of a pass that a CUDA graph repeats.

The graph repeats the device's work; host work that must repeat with it is recorded here. A pass is
rehearsed before it is captured. What the ranks agree on in the rehearsal holds for the graph:
during a capture nothing runs on the device, so ranks have nothing new to tell each other.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from bmtrain.shard.backward import Draws, HostSteps, Work

Entry = TypeVar("Entry")
_OTHER_PASS = "the pass used other parameters than the one before it"


class NotCapturableError(RuntimeError):
    """A step that must run anew in every pass was about to be frozen in a graph."""


class Rehearsal:
    """The host's part of an eager pass, before it is captured.

    Attributes:
        after: work to do after each replay.
        answers: agreements between ranks: flags of this rank, and the flags of any rank.
        places: 0-dim fp32 tensors for numbers that the host sets in each pass. Allocated outside of
            the capture: memory allocated in it may have been used earlier in the graph, and a
            replay would overwrite the number there.
        num_twice: number of parts of the pass that were computed twice.
    """

    is_capturing = False

    def __init__(self) -> None:
        self.after: list[Work] = []
        self.answers: list[tuple[list[bool], list[bool]]] = []
        self.places: list[torch.Tensor] = []
        self.num_twice = 0

    def any_rank(self, flags: list[bool], ask: Callable[[], list[bool]]) -> list[bool]:
        """`ask()`, whose answer the capture reuses."""
        self.answers.append((flags, ask()))
        return self.answers[-1][1]

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
        draws: contexts for the parts that are computed twice.

    Attributes:
        before: work to do before each replay.
        after: work to do after each replay.
    """

    is_capturing = True

    def __init__(self, rehearsal: Rehearsal, draws: Iterable[Draws]) -> None:
        self._answers, self._places = iter(rehearsal.answers), iter(rehearsal.places)
        self._draws = iter(draws)
        self.before: list[Work] = []
        self.after: list[Work] = []

    def any_rank(self, flags: list[bool], ask: Callable[[], list[bool]]) -> list[bool]:
        """The answer that the ranks agreed on in the rehearsal.

        Raises:
            NotCapturableError: if the pass asks something else than its rehearsal did.
        """
        asked, answer = _next(self._answers)
        if asked != flags:
            raise NotCapturableError(_OTHER_PASS)
        return answer

    def number(self, value: Callable[[], float], device: torch.device) -> torch.Tensor:
        """A 0-dim fp32 tensor on `device`, filled before each replay."""
        place = _next(self._places)
        self.before.append(lambda: place.fill_(value()))
        return place

    def draws(self) -> Draws:
        """Contexts with generator states that start alike."""
        return _next(self._draws)

    def refuse(self, what: str) -> None:
        """Raise NotCapturableError."""
        raise NotCapturableError(what)

    def check_complete(self) -> None:
        """Raise NotCapturableError if the rehearsal had further agreements."""
        if next(self._answers, None) is not None:
            raise NotCapturableError(_OTHER_PASS)


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
