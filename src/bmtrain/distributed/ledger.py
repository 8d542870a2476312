"""What this rank has done together with others, in order, and whether they have done the same:
ranks that part are told.

Everything that ranks do together has a number and a name. A rank keeps the number and a running
digest of the names, and compares them with the other ranks': on a CPU before anything moves; on a
GPU, whose gathers and reductions the host does not wait for, wherever the ranks agree on the host
anyway, at the latest at the end of a backward pass, and once per pass in the background.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import time
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from bmtrain.errors import RanksPartedError
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.torch_internals import all_gather_flat, default_store

PATIENCE_S = 3.0  # how long a rank that has met a failure waits to hear what the others did
_NUM_REMEMBERED = 1024
_ROOM = 126  # figures that travel with a comparison
_DIGEST_BITS = 32
_NUMBER_BITS = 20  # both fit into a double, in which agreements travel
_TAG = 7 << 20  # of the messages of comparisons; a user's and a pipeline's are small numbers
_CURE = (
    "Every rank must call the same blocks, and do the same with parameters and "
    "optimizers, in the same order and as often: what "
    "only one rank needs is computed on all. Nothing that was gathered since is used; "
    "the run cannot go on, start it anew."
)
# How Gloo says that another rank has gone, or does not come.
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
    """What this rank has done with the others of an axis.

    number: how much; digest: of all names; agreed: how much of it all ranks are known to have done;
    last: the name of the last of those; since: the names of what came after.
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
    """A comparison in the background."""

    work: dist.Work
    own: torch.Tensor
    words: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Story:
    """What a rank tells of itself when ranks have parted."""

    agreed: int
    last: str
    since: list[str]
    number: int

    def at(self, number: int) -> str | None:
        """What it did as number `number`; None if it did not come to it, or has forgotten."""
        index = number - (self.number - len(self.since)) - 1
        return self.since[index] if 0 <= index < len(self.since) else None


class Ledger:
    """One per run, reached by `world.service(Ledger)`.

    Attributes:
        is_immediate: whether ranks compare before anything moves. On a GPU the host would have to
            wait for the other hosts.
    """

    def __init__(self, world: World) -> None:
        self.is_immediate = world.device.type == "cpu"
        self._rank, self._timeout = world.rank, world.timeout
        self._lines: dict[tuple[int, ...], _Line] = {}
        self._parted: str | None = None
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is not done yet: it is being captured, to be repeated later."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def note(self, axis: Axis, what: str) -> None:
        """This rank is about to do `what` with the others of the axis.

        Raises:
            RanksPartedError: if ranks have parted before.
        """
        # what is traced or captured happens later
        if axis.size == 1 or torch.compiler.is_compiling() or self._is_paused:
            return
        if self._parted is not None:
            raise RanksPartedError(self._parted)
        line = self._line(axis)
        line.number += 1
        line.digest = zlib.crc32(what.encode(), line.digest)
        line.since.append(what)

    def enter(self, axis: Axis, what: str, *, is_on_host: bool) -> None:
        """`note`, and compare if the host waits for the other ranks anyway (`is_on_host`) or always
        does.

        Raises:
            RanksPartedError: on all ranks, if they are about to do different things.
        """
        if axis.size == 1 or torch.compiler.is_compiling() or self._is_paused:
            return
        self.note(axis, what)
        if is_on_host or self.is_immediate:
            self.compare(axis)

    def compare(self, axis: Axis) -> None:
        """Collective on the CPU.

        RanksPartedError on all ranks if they have not done the same, or if one does not come.
        """
        self._largest_(torch.empty(0, dtype=torch.float64, device="cpu"), axis)

    def largest(self, figures: Sequence[float], axis: Axis) -> list[float]:
        """The largest of all ranks, figure by figure, in fp64.

        Collective; travels on the CPU, so that no device waits.

        Raises:
            RanksPartedError: as `compare`.
        """
        self.note(axis, f"agreement on {len(figures)} figures")
        wire = torch.tensor(figures, dtype=torch.float64, device="cpu")
        self._largest_(wire, axis)
        return list(wire.tolist())

    def _largest_(self, figures: torch.Tensor, axis: Axis) -> None:
        """`compare`, and put in place of each of the figures (n,), in fp64 on the CPU, the largest
        of all ranks'.

        Every comparison is the same collective, of one size: those of ranks that have parted must
        meet, too. It has room for some figures, so that small agreements cost nothing beside it;
        what is more follows once the ranks are known to do the same.
        """
        self.settle(axis)
        word = float(self._line(axis).word)
        head = torch.full((_ROOM + 2,), -math.inf, dtype=torch.float64, device="cpu")
        first = figures[:_ROOM]
        head[0], head[1], head[2 : 2 + len(first)] = word, -word, first
        with self._told(axis):
            _spread_max(head, axis)
        if head[0] != -head[1]:
            self._part(axis)
        self._agree(axis)
        first.copy_(head[2 : 2 + len(first)])
        if len(figures) > _ROOM:
            with self._told(axis):
                dist.all_reduce(figures[_ROOM:], op=dist.ReduceOp.MAX, group=axis.group)

    @contextlib.contextmanager
    def _told(self, axis: Axis) -> Iterator[None]:
        """A rank that has gone, or does not come, is a RanksPartedError."""
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _LOST):
                raise
            self._part(axis, error)

    def compare_later(self, axis: Axis) -> None:
        """Begin to compare in the background; what it finds is said by the next comparison of this
        axis.
        """
        if axis.size == 1 or self._is_paused:
            return
        self.settle(axis)
        line = self._line(axis)
        own = torch.tensor([line.word], dtype=torch.int64, device="cpu")
        words = torch.empty(axis.size, dtype=torch.int64, device="cpu")
        # The communicator of gathers carries nothing else on the CPU: the order in which hosts come
        # here is all that counts.
        work = all_gather_flat(words, own, group=axis.communicators.gather, async_op=True)
        line.pending = _Pending(work, own, words)

    def settle(self, axis: Axis) -> None:
        """Wait for what `compare_later` began."""
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

    def _agree(self, axis: Axis) -> None:
        """All ranks have done the same up to here."""
        line = self._line(axis)
        line.agreed = line.number
        if line.since:
            line.last = line.since[-1]
            line.since.clear()

    def _part(self, axis: Axis, cause: BaseException | None = None) -> None:
        """Raise RanksPartedError: ranks have done different things, or, with a cause, one is not
        there.
        """
        stories = self._exchange_stories(axis)
        self._parted = _describe(
            axis, stories, self._line(axis), None if cause is None else self._timeout
        )
        raise RanksPartedError(self._parted) from cause

    def _exchange_stories(self, axis: Axis) -> dict[int, _Story]:
        """What each rank of the axis tells, by rank, through the store of the run: communicators
        may be broken.
        """
        line = self._line(axis)
        own = _Story(line.agreed, line.last, list(line.since), line.number)
        stories = {self._rank: own}
        name = "bmtrain ranks parted " + " ".join(map(str, axis.ranks))
        try:
            store = default_store()
            store.set(f"{name}: {self._rank}", json.dumps(dataclasses.asdict(own)))
            end = time.monotonic() + PATIENCE_S
            while len(stories) < axis.size and time.monotonic() < end:
                for rank in axis.ranks:
                    if rank not in stories and store.check([f"{name}: {rank}"]):
                        stories[rank] = _Story(**json.loads(store.get(f"{name}: {rank}")))
                time.sleep(0.02)
        except RuntimeError:  # the store lives in a process that has ended: what is known must do
            return stories
        return stories

    def _line(self, axis: Axis) -> _Line:
        found = self._lines.get(axis.ranks)
        if found is None:
            found = self._lines[axis.ranks] = _Line()
        return found


def _spread_max(x: torch.Tensor, axis: Axis) -> None:
    """Put the largest of all ranks' in place of each element of `x`, in ceil(log2(ranks)) rounds of
    messages.

    Dissemination (Hensgen, Finkel, Manber 1988): what a rank knows doubles with each round. For a
    few figures it takes a seventh (2 ranks) to a half (4 ranks) of the time of Gloo's ring.
    """
    theirs, distance = torch.empty_like(x), 1
    while distance < axis.size:
        to, source = (axis.index + distance) % axis.size, (axis.index - distance) % axis.size
        sent = dist.isend(x, group=axis.communicators.group, group_dst=to, tag=_TAG + distance)
        dist.recv(theirs, group=axis.communicators.group, group_src=source, tag=_TAG + distance)
        if sent is not None:
            sent.wait()  # before x is written: the message would carry what comes after it
        torch.maximum(x, theirs, out=x)
        distance *= 2


def _describe(axis: Axis, stories: dict[int, _Story], own: _Line, waited: float | None) -> str:
    """The message, the same on all ranks that know the same stories."""
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
    for rank in axis.ranks:
        lines.setdefault(_deeds(stories.get(rank), number, waited), []).append(rank)
    deeds = "; ".join(f"{_ranks(ranks)} {text}" for text, ranks in lines.items())
    return (
        f"the ranks of this run did different things. After number {number - 1} ({known}), "
        f"which all did, {deeds}. {_CURE}"
    )


def _deeds(story: _Story | None, number: int, waited: float | None) -> str:
    if story is None:
        return "did not come to the next (it has ended, failed, or is busy with something else" + (
            f"; waited for it up to {waited:g} s)" if waited else ")"
        )
    what = story.at(number)
    if what is None:
        return "did nothing more"
    more = story.number - number
    return f"did number {number}: {what}" + (
        f", and {more} more, the last of them {story.since[-1]}" if more > 0 else ""
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
