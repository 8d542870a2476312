"""Detects ranks that diverge: a per-rank log of collectives, compared between ranks.

Every operation that ranks perform together gets a number and a name. Each rank keeps the number and
a running digest of the names, its word, and compares it with the other ranks'.

On a CPU the word travels with the data, see `Ledger.swap`. It must be compared before the data are
taken, because Gloo matches collectives by their order alone: two of one size that are not the same
mix their data in silence, two of different sizes end the process, and two of different kinds hang
until the time limit. So whatever ranks do on an axis, they begin with messages of one size, which
match whatever else differs, and which carry the words. Nothing is written before all words are
known to be the same. Words travel alone only where ranks do nothing else together: at a call of a
wrapped model, which may gather nothing, and before an optimizer changes parameters.

On a GPU the host does not wait for gathers and reductions, so the words are compared where the
ranks agree on the host anyway (at the latest at the end of a backward pass) and once per pass in
the background.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
FIRST_BYTES = 4088  # of data, in the message that carries the word: a shard of a small block
_TAG = 7 << 20  # tag of comparison messages, out of the way of a user's and a pipeline's
_CURE = (
    "Data gathered since are discarded. Read what {} has printed, then start the run again: it "
    "resumes from its last checkpoint, if it keeps any."
)
_CURE_OF_CALLS = (
    "The ranks of this run diverged: every rank must call the same blocks, parameter and optimizer "
    "operations, in the same order (threads have none) and equally often; compute on all ranks "
    "even what only one needs. Data gathered since are discarded and the run cannot continue: "
    "start it again."
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
class _AxisLog:
    """The log of this rank on one axis.

    Attributes:
        number: operations so far.
        digest: CRC of all their names.
        agreed: number of the last operation that all ranks are known to have in common.
        last: name of that operation.
        since: names of the operations after it, at most _NUM_REMEMBERED.
        pending: the comparison in flight, if any, with the tensors that it reads and writes.
    """

    number: int = 0
    digest: int = 0
    agreed: int = 0
    last: str = "nothing"
    since: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_NUM_REMEMBERED)
    )
    pending: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def at(self, number: int) -> str | None:
        """The name of operation `number`; None if not reached, or dropped from the log."""
        index = number - (self.number - len(self.since)) - 1
        return self.since[index] if 0 <= index < len(self.since) else None


class Ledger:
    """The log of collectives. One per run, reached by `world.service(Ledger)`.

    Attributes:
        is_immediate: whether ranks compare in every operation. Not on a GPU, where the host would
            have to wait for the other hosts each time.
    """

    def __init__(self, world: World) -> None:
        self.is_immediate = world.device.type == "cpu"
        self._rank, self._timeout, self._watchdog = world.rank, world.timeout, world.watchdog
        self._watchdog.collectives = self.summary
        self._store = world.store
        self._lines = collections.defaultdict[tuple[int, ...], _AxisLog](_AxisLog)
        self._parted: str | None = None
        self._process = os.getpid()

    def refuse_traced(self, axis: Axis, what: str) -> None:
        """Raise ParameterError for `what` the ranks would do together while torch traces."""
        if axis.size == 1:
            return
        if is_tracing() or dispatch_mode(PROXIES) is not None:
            raise ParameterError(
                f"torch traces (torch.jit.trace, torch.onnx, torch.export, make_fx), and {what} "
                "communicates: trace a model that is not sharded, after "
                "plain.load_state_dict(model.state_dict())."
            )

    def note(self, axis: Axis, what: str) -> None:
        """Log that this rank is about to do `what` with the others of the axis.

        Raises:
            RanksDivergedError: if ranks have diverged before.
        """
        # What is traced now runs later.
        if axis.size == 1 or torch.compiler.is_compiling():
            return
        if os.getpid() != self._process:  # its connections are the parent's: it would wait for ever
            raise ParameterError(
                f"{what} in a forked process, such as a DataLoader worker, which cannot reach "
                "other ranks: gather the values before the fork, on all ranks (value = "
                "param.gather()), or use num_workers=0."
            )
        if self._parted is not None:
            raise RanksDivergedError(self._parted)
        line = self._lines[axis.ranks]
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

    def enter(self, axis: Axis, what: str, *, compares: bool) -> None:
        """`note`; then `compare`, if `compares`: where the host waits for the other ranks anyway,
        but not by `swap`, which compares by itself.

        Raises:
            RanksDivergedError: on all ranks, if they are about to do different things.
            ParameterError: while torch traces.
        """
        if axis.size == 1 or torch.compiler.is_compiling():
            return
        self.refuse_traced(axis, what)
        self.note(axis, what)
        if compares:
            self.compare(axis)

    def swap(self, axis: Axis, given: torch.Tensor, taken: torch.Tensor) -> None:
        """Send `given[i]` (n,) to the rank at index i of the axis, and fill `taken[i]` (n,) with
        what that rank gives, unless the logs differ. Collective; both are on the CPU.

        The first message to each rank has the same size whatever is sent: the word, and the first
        FIRST_BYTES of the data. The rest is under way behind it, but enters this rank's memory only
        when the words of all ranks are known to be the same.

        Raises:
            RanksDivergedError: on all ranks, if their logs differ or a rank does not arrive.
        """
        self.finish_comparison(axis)
        own, group, line = axis.index, axis.communicators.group, self._lines[axis.ranks]

        def start(do: Callable[..., Any], rows: torch.Tensor, tag: int, place: str) -> list[Any]:
            works = []
            for i, row in enumerate(rows):
                if i != own and len(row):
                    works.append(do(row, group=group, tag=tag, **{place: i}))
            return works

        sent, into = given.view(torch.uint8), taken.view(torch.uint8)
        heads = torch.zeros((2, axis.size, FIRST_BYTES + 8), dtype=torch.uint8, device="cpu")
        words = heads.view(torch.int64)[..., 0]
        words[:] = word = line.number << 32 | line.digest  # CRC32 has 32 bits
        heads[:, :, 8 : 8 + sent.shape[1]] = sent[:, :FIRST_BYTES]
        with self.naming_lost_ranks(axis):
            works = start(dist.isend, heads[0], _TAG, "group_dst")
            works += start(dist.isend, sent[:, FIRST_BYTES:], _TAG - 1, "group_dst")
            for work in start(dist.irecv, heads[1], _TAG, "group_src"):
                work.wait()
        if (words != word).any():
            self._raise_diverged(axis)
        line.agreed = line.number  # all ranks have performed the same operations up to here
        line.last = line.since[-1] if line.since else line.last
        line.since.clear()
        into[:, :FIRST_BYTES] = heads[1, :, 8 : 8 + into.shape[1]]
        into[own, FIRST_BYTES:] = sent[own, FIRST_BYTES:]
        with self.naming_lost_ranks(axis):
            works += start(dist.irecv, into[:, FIRST_BYTES:], _TAG - 1, "group_src")
            for work in works:
                work.wait()

    def gathered(self, x: torch.Tensor, axis: Axis, what: str) -> torch.Tensor:
        """Every rank's `x`, on the CPU, stacked: (axis.size, *x.shape). Collective.

        `what` it is, for the log, with its size: only words tell that ranks would send other sizes.

        Raises:
            RanksDivergedError: as `swap`.
        """
        self.enter(axis, what, compares=False)
        rows = x.new_empty((axis.size, x.numel()))
        self.swap(axis, x.detach().contiguous().view(1, -1).expand_as(rows), rows)
        return rows.view(axis.size, *x.shape)

    def compare(self, axis: Axis) -> None:
        """Compare the logs of all ranks. Collective on the CPU.

        Raises:
            RanksDivergedError: on all ranks, if their logs differ or a rank does not arrive.
        """
        nothing = torch.empty((axis.size, 0), device="cpu")
        self.swap(axis, nothing, nothing)

    def largest(self, figures: Sequence[float], axis: Axis, what: str) -> list[float]:
        """The elementwise maximum over all ranks, in fp64, of `what`.

        Collective; travels on the CPU, so it does not synchronise with the device.

        Raises:
            RanksDivergedError: as `compare`.
        """
        own = torch.tensor(figures, dtype=torch.float64, device="cpu")
        found = self.gathered(own, axis, f"agreement on {what} ({len(figures)} figures)")
        return list(found.amax(0).tolist())

    @contextlib.contextmanager
    def naming_lost_ranks(self, axis: Axis) -> Iterator[None]:
        """Turn Gloo's errors about a missing rank into RanksDivergedError."""
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _LOST):
                raise
            self._raise_diverged(axis, error)

    def compare_later(self, axis: Axis) -> None:
        """Start a background comparison; the next comparison of this axis reports its result."""
        if axis.size == 1:
            return
        self.finish_comparison(axis)
        line = self._lines[axis.ranks]
        word = line.number << 32 | line.digest
        own = torch.tensor([word], dtype=torch.int64, device="cpu")
        words = torch.empty(axis.size, dtype=torch.int64, device="cpu")
        # On the CPU this communicator carries nothing but these comparisons, so they can only match
        # each other, in the order in which the hosts issue them.
        work = all_gather_flat(words, own, group=axis.communicators.gather, async_op=True)
        line.pending = work, own, words

    def finish_comparison(self, axis: Axis) -> None:
        """Wait for the comparison that `compare_later` started, and report it."""
        line = self._lines[axis.ranks]
        pending, line.pending = line.pending, None
        if pending is None:
            return
        work, _, words = pending
        try:
            work.wait()
        except RuntimeError as error:
            self._raise_diverged(axis, error)
        if len(set(words.tolist())) > 1:
            self._raise_diverged(axis)

    def _raise_diverged(self, axis: Axis, cause: BaseException | None = None) -> None:
        """Raise RanksDivergedError: the logs differ, or, with a `cause`, a rank is missing."""
        stories, gone = self._exchange_stories(axis)
        waited = None if cause is None else self._timeout
        self._parted = _describe(axis, stories, gone, waited)
        # what Gloo says of a lost connection would be printed first, and says less
        raise RanksDivergedError(self._parted) from None

    def _exchange_stories(self, axis: Axis) -> tuple[dict[int, _AxisLog], dict[int, str]]:
        """The logs of the ranks of an axis, by rank, as far as they arrive within PATIENCE_S, and
        why others do not come.

        They travel through the store of the run, because the communicators may be broken.
        """
        line = self._lines[axis.ranks]
        stories, gone = {self._rank: line}, dict[int, str]()
        name = f"parted {axis.ranks}"
        try:
            if self._watchdog.store_is_gone:
                raise RuntimeError("asking it would wait for ever")
            self._watchdog.write(
                self._store, f"{name} {self._rank}", dataclasses.replace(line, pending=None)
            )
            end = time.monotonic() + PATIENCE_S
            while len(stories) + len(gone) < axis.size and time.monotonic() < end:
                missing = [rank for rank in axis.ranks if rank not in stories]
                # asked first: a rank publishes its log before it ends
                gone = self._watchdog.whereabouts(missing)
                for rank, story in self._watchdog.read(self._store, name, missing).items():
                    stories[rank] = story
                    gone.pop(rank, None)
                time.sleep(0.02)
        # the process that hosts the store has ended: report with the logs at hand
        except RuntimeError:
            return stories, self._watchdog.whereabouts(set(axis.ranks) - stories.keys())
        return stories, gone


def _describe(
    axis: Axis, stories: dict[int, _AxisLog], gone: dict[int, str], waited: float | None
) -> str:
    """The error message, the same on all ranks that know the same logs."""
    last = max(story.number for story in stories.values())
    first = max(story.agreed for story in stories.values())
    known = next(story.last for story in stories.values() if story.agreed == first)
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


def _deeds(story: _AxisLog | None, number: int, waited: float | None, gone: str | None) -> str:
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
