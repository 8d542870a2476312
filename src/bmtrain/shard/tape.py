"""What Python does in a pass that a CUDA graph repeats: the device's work is in the graph, the
host's is written down here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from bmtrain.distributed.agreement import largest
from bmtrain.distributed.ledger import Ledger
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World

Work = Callable[[], object]
# For a part of a pass that is computed twice, a context for each time: both draw the same random
# numbers.
Draws = Iterator[contextlib.AbstractContextManager[object]]
Entry = TypeVar("Entry")
_OTHER_PASS = "the pass used other parameters than the one before it"


class NotCapturableError(RuntimeError):
    """Something that must happen anew in every pass was about to be frozen in a graph."""


class Tape:
    """The host's part of one pass.

    before: work that comes before each replay; after: work that comes after it. answers: what ranks
    told each other in the pass: flags of this rank, and those of any rank. places: for numbers that
    the host gives the device in each pass. Made outside of a capture: memory that is allocated in
    one
        may have served something else earlier in it, and would be overwritten in replays.
    num_twice: parts of the pass that were computed twice.
    """

    def __init__(self) -> None:
        self.before: list[Work] = []
        self.after: list[Work] = []
        self.answers: list[tuple[list[bool], list[bool]]] = []
        self.places: list[torch.Tensor] = []
        self.num_twice = 0


class Taping:
    """Whether a pass is being captured, and what it leaves for the replays. One per run:
    `world.service(Taping)`.

    A pass is rehearsed before it is captured, and what the ranks agreed on in the rehearsal holds
    for the graph: while one is captured nothing runs on the device, so that ranks that waited for
    each other could only learn what they know already.
    """

    def __init__(self, world: World) -> None:
        self._ledger = world.service(Ledger)
        self._tape: Tape | None = None
        self._rehearsal: Tape | None = None  # of the pass that is being captured
        self._draws: Iterator[Draws] = iter(())

    @property
    def is_taping(self) -> bool:
        """Whether a pass is being rehearsed or captured."""
        return self._tape is not None

    @property
    def is_capturing(self) -> bool:
        """Whether a pass is being captured."""
        return self._rehearsal is not None

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[Tape]:
        """The body runs a pass as usual; the tape keeps what the ranks agree on."""
        self._tape = Tape()
        try:
            yield self._tape
        finally:
            self._tape = None

    @contextlib.contextmanager
    def capturing(self, rehearsal: Tape) -> Iterator[Tape]:
        """The body is captured, and goes as the rehearsal went. The tape gets what replays need."""
        self._rehearsal = rehearsal
        try:
            with self._ledger.paused(), self.rehearsing() as tape:
                yield tape
            if len(tape.answers) != len(rehearsal.answers):
                raise NotCapturableError(_OTHER_PASS)
        finally:
            self._rehearsal = None

    def number(self, value: Callable[[], float], device: torch.device) -> float | torch.Tensor:
        """`value()`, as it is in each pass: in a graph a 0-dim fp32 tensor on `device`, filled
        before each replay.
        """
        tape, rehearsal = self._tape, self._rehearsal
        if tape is None:
            return value()
        if rehearsal is None:
            tape.places.append(torch.empty((), dtype=torch.float32, device=device))
            return value()
        place = _next(rehearsal.places, len(tape.places))
        tape.places.append(place)
        tape.before.append(lambda: place.fill_(value()))
        return place

    def now_and_after_replays(self, work: Work) -> None:
        """Do `work` now, and again after each replay if this pass is being captured."""
        work()
        if self._tape is not None:
            self._tape.after.append(work)

    def now_or_after_replays(self, work: Work) -> None:
        """Do `work` now, unless this pass is being captured: then after each replay.

        For work that needs values on the host.
        """
        if self._tape is not None and self.is_capturing:
            self._tape.after.append(work)
        else:
            work()

    def provide(self, draws: Iterable[Draws]) -> None:
        """For the parts of the captured pass that are computed twice."""
        self._draws = iter(draws)

    def draws(self) -> Draws:
        """The contexts of the next part of the pass that is computed twice.

        Outside of captures they do nothing: there the state of a generator can be read, and set
        again.
        """
        if self._tape is not None:
            self._tape.num_twice += 1
        if not self.is_capturing:
            return itertools.repeat(contextlib.nullcontext())
        draws = next(self._draws, None)
        if draws is None:
            raise NotCapturableError(_OTHER_PASS)
        return draws

    def refuse(self, what: str) -> None:
        """NotCapturableError if a pass is being captured."""
        if self.is_capturing:
            raise NotCapturableError(what)

    def any_rank(self, flags: list[bool], axis: Axis) -> list[bool]:
        """Which flags are true on any rank of the axis. Travels on the CPU: no device waits.

        Raises:
            NotCapturableError: when a captured pass asks for something else than its rehearsal did.
        """
        if axis.size == 1 or not flags:
            return flags
        tape, rehearsal = self._tape, self._rehearsal
        if tape is not None and rehearsal is not None:
            asked, answer = _next(rehearsal.answers, len(tape.answers))
            if asked != flags:
                raise NotCapturableError(_OTHER_PASS)
        else:
            answer = [bool(flag) for flag in largest(flags, axis)]
        if tape is not None:
            tape.answers.append((flags, answer))
        return answer


def _next(entries: Sequence[Entry], index: int) -> Entry:
    if index >= len(entries):
        raise NotCapturableError(_OTHER_PASS)
    return entries[index]
