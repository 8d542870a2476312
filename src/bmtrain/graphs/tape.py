"""What Python does in a pass that a CUDA graph repeats: the device's work is in the graph, the
host's is written down here.

A pass is rehearsed before it is captured, and what the ranks agreed on in the rehearsal holds for
the graph: while one is captured nothing runs on the device, so that ranks that waited for each
other could only learn what they know already.
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
    """Something that must happen anew in every pass was about to be frozen in a graph."""


class Rehearsal:
    """The host's part of a pass that runs as usual, before it is captured.

    Attributes:
        after: work that comes after each replay.
        answers: what ranks told each other: flags of this rank, and those of any rank.
        places: for numbers that the host gives the device in each pass, 0-dim fp32. Made outside of
            a capture: memory that is allocated in one may have served something else earlier in it,
            and would be overwritten in replays.
        num_twice: parts of the pass that were computed twice.
    """

    is_capturing = False

    def __init__(self) -> None:
        self.after: list[Work] = []
        self.answers: list[tuple[list[bool], list[bool]]] = []
        self.places: list[torch.Tensor] = []
        self.num_twice = 0

    def any_rank(self, flags: list[bool], ask: Callable[[], list[bool]]) -> list[bool]:
        """`ask()`, which the capture will not do again."""
        self.answers.append((flags, ask()))
        return self.answers[-1][1]

    def number(self, value: Callable[[], float], device: torch.device) -> float | torch.Tensor:
        """`value()`; its place for the capture."""
        self.places.append(torch.empty((), dtype=torch.float32, device=device))
        return value()

    def draws(self) -> Draws:
        """They do nothing: a rehearsal can read the state of a generator, and set it again."""
        self.num_twice += 1
        return itertools.repeat(contextlib.nullcontext())

    def refuse(self, what: str) -> None:
        """What cannot be captured can be rehearsed."""


class Capture:
    """The host's part of a pass that is being captured, and goes as the rehearsal went.

    Args:
        rehearsal: the pass before it.
        draws: for the parts that are computed twice.

    Attributes:
        before: work that comes before each replay.
        after: work that comes after it.
    """

    is_capturing = True

    def __init__(self, rehearsal: Rehearsal, draws: Iterable[Draws]) -> None:
        self._answers, self._places = iter(rehearsal.answers), iter(rehearsal.places)
        self._draws = iter(draws)
        self.before: list[Work] = []
        self.after: list[Work] = []

    def any_rank(self, flags: list[bool], ask: Callable[[], list[bool]]) -> list[bool]:
        """What the ranks agreed on in the rehearsal.

        Raises:
            NotCapturableError: when the pass asks for something else than its rehearsal did.
        """
        asked, answer = _next(self._answers)
        if asked != flags:
            raise NotCapturableError(_OTHER_PASS)
        return answer

    def number(self, value: Callable[[], float], device: torch.device) -> torch.Tensor:
        """A place, 0-dim fp32 on `device`, filled before each replay."""
        place = _next(self._places)
        self.before.append(lambda: place.fill_(value()))
        return place

    def draws(self) -> Draws:
        """States of the generator that start alike."""
        return _next(self._draws)

    def refuse(self, what: str) -> None:
        """NotCapturableError."""
        raise NotCapturableError(what)

    def check_complete(self) -> None:
        """NotCapturableError if the rehearsal went on where the captured pass has ended."""
        if next(self._answers, None) is not None:
            raise NotCapturableError(_OTHER_PASS)


@contextlib.contextmanager
def taped(host: HostSteps, tape: Rehearsal | Capture) -> Iterator[None]:
    """The host's part of the pass inside goes onto the tape."""
    host.tape = tape
    try:
        yield
    finally:
        host.tape = None


def _next(entries: Iterator[Entry]) -> Entry:
    for entry in entries:
        return entry
    raise NotCapturableError(_OTHER_PASS)
