"""Detects ranks that diverge: a per-rank log of collectives, compared between ranks.

Every operation that ranks perform together gets a number and a name. Each rank keeps the number and
a running digest of the names, and compares both with the other ranks'. On a CPU it compares before
every operation. On a GPU the host does not wait for gathers and reductions, so it compares where
the ranks agree on the host anyway (at the latest at the end of a backward pass) and once per pass
in the background.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from bmtrain.errors import ParameterError, RanksDivergedError
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.watchdog import Line, named
from bmtrain.runtime.world import World
from bmtrain.torch_internals import PROXIES, all_gather_flat, dispatch_mode, is_tracing

PATIENCE_S = 10.0  # after a failure, how long a rank waits for the other ranks' logs
_NUM_REMEMBERED = 1024
_NUM_TOLD = 3  # operations in the watchdog's report
_ROOM = 126  # figures that fit into the message of a comparison
_DIGEST_BITS = 32
_NUMBER_BITS = 20  # 52 bits in all: a double, in which figures travel, holds them exactly
_TAG = 7 << 20  # tag of comparison messages, out of the way of a user's and a pipeline's
_CURE = (
    "Data gathered since are discarded. Read what {} has printed, then start the run again: it "
    "resumes from its last checkpoint, if it keeps any."
)
_CURE_OF_CALLS = (
    "The ranks of this run diverged: every rank must call the same blocks, parameter and optimizer "
    "operations, in the same order and equally often; compute on all ranks even what only one "
    "needs. Data gathered since are discarded and the run cannot continue: start it again."
)
# Substrings of Gloo's errors when another rank has exited or does not arrive.
_LOST = (
    "Connection closed",
    "Timed out",
    "timed out",
    "timeout",
    "Connection reset",
    "Broken pipe",
    "gloo/transport",
)


@dataclasses.dataclass
class _Line:
    """The log of this rank on one axis.

    Attributes:
        number: operations so far.
        digest: CRC of all their names.
        agreed: number of the last operation that all ranks are known to have in common.
        last: name of that operation.
        since: names of the operations after it, at most _NUM_REMEMBERED.
        pending: the comparison in flight, if any.
    """

    number: int = 0
    digest: int = 0
    agreed: int = 0
    last: str = "nothing"
    since: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_NUM_REMEMBERED)
    )
    pending: _Pending | None = None

    @property
    def word(self) -> int:
        return (self.number % 2**_NUMBER_BITS) << _DIGEST_BITS | self.digest


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A comparison in flight; holds the tensors that the collective reads and writes."""

    work: dist.Work
    own: torch.Tensor
    words: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Story:
    """The log that a rank publishes when ranks have diverged."""

    agreed: int
    last: str
    since: list[str]
    number: int

    def at(self, number: int) -> str | None:
        """The name of operation `number`; None if not reached, or dropped from the log."""
        index = number - (self.number - len(self.since)) - 1
        return self.since[index] if 0 <= index < len(self.since) else None


class Ledger:
    """The log of collectives. One per run, reached by `world.service(Ledger)`.

    Attributes:
        is_immediate: whether ranks compare before every operation. Not on a GPU, where the host
            would have to wait for the other hosts each time.
    """

    def __init__(self, world: World) -> None:
        self.is_immediate = world.device.type == "cpu"
        self._rank, self._timeout, self._watchdog = world.rank, world.timeout, world.watchdog
        self._watchdog.collectives = self.summary
        self._store = world.store
        self._lines: dict[tuple[int, ...], _Line] = {}
        self._parted: str | None = None
        self._refuse: Callable[[str], NoReturn] | None = None
        self._process = os.getpid()

    @contextlib.contextmanager
    def sealed(self, refuse: Callable[[str], NoReturn]) -> Iterator[None]:
        """Inside, the ranks do nothing together: `refuse(what)` raises for what they would do.

        Nothing is logged either: ranks may do what is inside at different times.

        For the capture of a CUDA graph: on a device, operations that wait for other ranks must not
        run on the branches of one, and on the host they would not run again.
        """
        self._refuse = refuse
        try:
            yield
        finally:
            self._refuse = None

    def refuse_sealed(self, axis: Axis, what: str) -> None:
        """Inside of `sealed`, have `what` refused; while torch traces raise ParameterError."""
        if axis.size == 1:
            return
        if is_tracing() or dispatch_mode(PROXIES) is not None:
            raise ParameterError(
                f"torch traces (torch.jit.trace, torch.onnx, torch.export, make_fx), and {what} "
                "communicates: trace a model that is not sharded, after "
                "plain.load_state_dict(model.state_dict())."
            )
        if self._refuse is not None:
            self._refuse(what)

    def note(self, axis: Axis, what: str) -> None:
        """Log that this rank is about to do `what` with the others of the axis.

        Raises:
            RanksDivergedError: if ranks have diverged before.
        """
        # What is traced or captured now runs later.
        if axis.size == 1 or torch.compiler.is_compiling() or self._refuse is not None:
            return
        if os.getpid() != self._process:  # its connections are the parent's: it would wait for ever
            raise ParameterError(
                f"{what} in a forked process, such as a DataLoader worker, which cannot reach "
                "other ranks: gather the values before the fork, on all ranks (value = "
                "param.gather()), or use num_workers=0."
            )
        if self._parted is not None:
            raise RanksDivergedError(self._parted)
        line = self._line(axis)
        line.number += 1
        line.digest = zlib.crc32(what.encode(), line.digest)
        line.since.append(what)
        self._watchdog.progress += 1

    def summary(self) -> list[Line]:
        """The collectives so far, axis by axis; called by the watchdog's thread."""
        return [
            Line(ranks, x.number, x.digest, list(x.since)[-_NUM_TOLD:] or [x.last][: x.number])
            for ranks, x in list(self._lines.items())
        ]

    def enter(self, axis: Axis, what: str, *, is_on_host: bool) -> None:
        """`note`, then `compare` if the host waits for the other ranks anyway or on a CPU.

        Raises:
            RanksDivergedError: on all ranks, if they are about to do different things.
            ParameterError: while torch traces.
        """
        if axis.size == 1 or torch.compiler.is_compiling():
            return
        self.refuse_sealed(axis, what)
        self.note(axis, what)
        if is_on_host or self.is_immediate:
            self.compare(axis)

    def compare_at(self, axis: Axis, what: str) -> None:
        """`enter` a place of the program at which the ranks do nothing together but that.

        Inside of `sealed` nothing is compared.
        """
        if self._refuse is None:
            self.enter(axis, what, is_on_host=False)

    def compare(self, axis: Axis) -> None:
        """Compare the logs of all ranks. Collective on the CPU.

        Raises:
            RanksDivergedError: on all ranks, if their logs differ or a rank does not arrive.
        """
        self._largest_(torch.empty(0, dtype=torch.float64, device="cpu"), axis)

    def largest(self, figures: Sequence[float], axis: Axis, what: str) -> list[float]:
        """The elementwise maximum over all ranks, in fp64, of `what`.

        Collective; travels on the CPU, so it does not synchronise with the device.

        Raises:
            RanksDivergedError: as `compare`.
        """
        self.refuse_sealed(axis, "an agreement of the hosts")
        self.note(axis, f"agreement on {what} ({len(figures)} figures)")
        wire = torch.tensor(figures, dtype=torch.float64, device="cpu")
        self._largest_(wire, axis)
        return list(wire.tolist())

    def _largest_(self, figures: torch.Tensor, axis: Axis) -> None:
        """`compare`, and set each of `figures` (n,), fp64 on the CPU, to its maximum over ranks.

        Every comparison is the same collective with a message of the same size. Otherwise the
        comparisons of ranks that have diverged would not match each other, and would hang instead
        of reporting. The message has room for _ROOM figures, so that small agreements add no round
        trip; the rest follows once the logs are known to agree.
        """
        self.settle(axis)
        word = float(self._line(axis).word)
        head = torch.full((_ROOM + 2,), -math.inf, dtype=torch.float64, device="cpu")
        first = figures[:_ROOM]
        head[0], head[1], head[2 : 2 + len(first)] = word, -word, first
        with self.told(axis):
            _spread_max(head, axis)
        if head[0] != -head[1]:
            self._part(axis)
        line = self._line(axis)  # all ranks have performed the same operations up to here
        line.agreed = line.number
        if line.since:
            line.last = line.since[-1]
            line.since.clear()
        first.copy_(head[2 : 2 + len(first)])
        if len(figures) > _ROOM:
            with self.told(axis):
                dist.all_reduce(figures[_ROOM:], op=dist.ReduceOp.MAX, group=axis.group)

    @contextlib.contextmanager
    def told(self, axis: Axis) -> Iterator[None]:
        """Turn Gloo's errors about a missing rank into RanksDivergedError."""
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _LOST):
                raise
            self._part(axis, error)

    def compare_later(self, axis: Axis) -> None:
        """Start a background comparison; the next comparison of this axis reports its result."""
        if axis.size == 1:
            return
        self.settle(axis)
        line = self._line(axis)
        own = torch.tensor([line.word], dtype=torch.int64, device="cpu")
        words = torch.empty(axis.size, dtype=torch.int64, device="cpu")
        # On the CPU this communicator carries nothing but these comparisons, so they can only match
        # each other, in the order in which the hosts issue them.
        work = all_gather_flat(words, own, group=axis.communicators.gather, async_op=True)
        line.pending = _Pending(work, own, words)

    def settle(self, axis: Axis) -> None:
        """Wait for the comparison that `compare_later` started, and report it."""
        line = self._line(axis)
        pending, line.pending = line.pending, None
        if pending is None:
            return
        try:
            pending.work.wait()
        except RuntimeError as error:
            self._part(axis, error)
        if len(set(pending.words.tolist())) > 1:
            self._part(axis)

    def _part(self, axis: Axis, cause: BaseException | None = None) -> None:
        """Raise RanksDivergedError: the logs differ, or, with a `cause`, a rank is missing."""
        stories, gone = self._exchange_stories(axis)
        waited = None if cause is None else self._timeout
        self._parted = _describe(axis, stories, gone, self._line(axis), waited)
        # what Gloo says of a lost connection would be printed first, and says less
        raise RanksDivergedError(self._parted) from None

    def _exchange_stories(self, axis: Axis) -> tuple[dict[int, _Story], dict[int, str]]:
        """The logs of the ranks of an axis, by rank, as far as they arrive within PATIENCE_S, and
        why others do not come.

        They travel through the store of the run, because the communicators may be broken.
        """
        line = self._line(axis)
        own = _Story(line.agreed, line.last, list(line.since), line.number)
        stories, gone = {self._rank: own}, dict[int, str]()
        if self._watchdog.store_is_gone:
            return stories, self._watchdog.whereabouts(set(axis.ranks) - stories.keys())
        name = "bmtrain ranks parted " + " ".join(map(str, axis.ranks))
        try:
            store = self._store
            store.set(f"{name}: {self._rank}", json.dumps(dataclasses.asdict(own)))
            end = time.monotonic() + PATIENCE_S
            while len(stories) + len(gone) < axis.size and time.monotonic() < end:
                missing = [rank for rank in axis.ranks if rank not in stories]
                # asked first: a rank publishes its log before it ends
                gone = self._watchdog.whereabouts(missing)
                for rank in missing:
                    if store.check([f"{name}: {rank}"]):
                        stories[rank] = _Story(**json.loads(store.get(f"{name}: {rank}")))
                        gone.pop(rank, None)
                time.sleep(0.02)
        # the process that hosts the store has ended: report with the logs at hand
        except RuntimeError:
            return stories, self._watchdog.whereabouts(set(axis.ranks) - stories.keys())
        return stories, gone

    def _line(self, axis: Axis) -> _Line:
        found = self._lines.get(axis.ranks)
        if found is None:
            found = self._lines[axis.ranks] = _Line()
        return found


def _spread_max(x: torch.Tensor, axis: Axis) -> None:
    """All-reduce `x` in place by maximum, in ceil(log2(ranks)) rounds of messages.

    Dissemination (Hensgen, Finkel, Manber 1988): the ranks that a value has reached double each
    round. For a few figures it takes a seventh (2 ranks) to a half (4 ranks) of the time of Gloo's
    ring.
    """
    theirs, distance = torch.empty_like(x), 1
    while distance < axis.size:
        to, source = (axis.index + distance) % axis.size, (axis.index - distance) % axis.size
        sent = dist.isend(x, group=axis.communicators.group, group_dst=to, tag=_TAG + distance)
        dist.recv(theirs, group=axis.communicators.group, group_src=source, tag=_TAG + distance)
        if sent is not None:
            sent.wait()  # else `maximum` below could overwrite `x` while it is being sent
        torch.maximum(x, theirs, out=x)
        distance *= 2


def _describe(
    axis: Axis, stories: dict[int, _Story], gone: dict[int, str], own: _Line, waited: float | None
) -> str:
    """The error message, the same on all ranks that know the same logs."""
    last = max((story.number for story in stories.values()), default=0)
    first = max((story.agreed for story in stories.values()), default=own.agreed)
    known = next((story.last for story in stories.values() if story.agreed == first), own.last)
    number = next(
        (
            n
            for n in range(first + 1, last + 1)
            if len({story.at(n) for story in stories.values()}) > 1
        ),
        first + 1,
    )
    if number > first + 1:
        known = next(iter(stories.values())).at(number - 1) or known
    lines: dict[str, list[int]] = {}
    for rank in sorted(axis.ranks, key=stories.__contains__):  # the cause first
        deed = _deeds(stories.get(rank), number, waited, gone.get(rank))
        lines.setdefault(deed, []).append(rank)
    deeds = "; ".join(f"{named(ranks)} {text}" for text, ranks in lines.items())
    cure = _CURE.format(named(sorted(gone))) if gone else _CURE_OF_CALLS
    return f"{deeds}. The last one common to all ranks is number {number - 1}: {known}. {cure}"


def _deeds(story: _Story | None, number: int, waited: float | None, gone: str | None) -> str:
    if story is None and gone is not None:
        return f"did not reach the next: it {gone}"
    if story is None:
        return "did not reach the next (it has ended, failed, or is busy elsewhere" + (
            f"; waited up to {waited:g} s)" if waited else ")"
        )
    what = story.at(number)
    if what is None:
        return "did nothing more"
    more = story.number - number
    return f"did number {number}: {what}" + (
        f", and {more} more, the last of them {story.since[-1]}" if more > 0 else ""
    )
