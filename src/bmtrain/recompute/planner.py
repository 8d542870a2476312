"""use_checkpoint="auto": measures, plans and monitors passes. All ranks use the same plan.

A pass is the calls of blocks up to a backward pass, and that backward pass. The first pass of a run
recomputes every block: if any level fits, that one does, and after it gradients and the optimizer's
state are resident. The second does the same and measures. If not everything fits, the third has a
plan and measures the remaining level. From then on the plan holds for inputs of that shape and
smaller ones, until it no longer fits. A rank whose calls do not match it recomputes the rest of
that pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch

from bmtrain.distributed.agreement import largest, told_apart
from bmtrain.recompute import plan
from bmtrain.recompute.level import Level
from bmtrain.recompute.memory import Memory, memory_of
from bmtrain.recompute.offload import Host
from bmtrain.recompute.plan import Option, Options, Step
from bmtrain.recompute.profiles import PassKey, Profile, Profiles, Shape, padded
from bmtrain.runtime.log import print_rank
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World

LEVELS = tuple(Level)
# Levels measured first: if NOTHING fits, CHEAP is never needed.
_FIRST = frozenset({Level.NOTHING, Level.BLOCK, Level.OFFLOADED})
_THEN = Level.CHEAP
# Least time of each level relative to NOTHING. Timings of short blocks are too noisy to order them.
_LEAST_MORE = {Level.NOTHING: 1.0, Level.CHEAP: 1.005, Level.BLOCK: 1.1, Level.OFFLOADED: 1.1}
_UNKNOWN = Option(2**60, 0, float("inf"))
# Slack, as a fraction of the limit: room may shrink by this much before the plan is replaced.
_SLACK = 0.01
_RECONSIDERED = 32  # passes between replans; each also halves the count of failures
# The limit is read again in this many passes after a reconsideration, and after a pass that
# measures or has a new plan: libraries allocate, and what is lost to fragments has changed.
_NEWS = 4
# Passes that did not match their profile. Beyond this many, every block is recomputed.
_MOST_FAILURES = 16
# Fractions of the limit: kept free per pass in which the allocator retried, and at most.
_MORE_MARGIN, _MOST_MARGIN = 0.02, 0.2


Measure = Callable[[Sequence[Level]], dict[Level, Option]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A call of a block that can be measured.

    block: the block. kind: equal for calls that differ in shapes only. shape: dims of all tensors
    among the arguments, concatenated; the first `num_dims` are those of the first tensor. options:
    measures the call at some levels, leaving out those at which it cannot run; None if the call
    must not run more often than the program asks, on this rank.
    """

    block: torch.nn.Module
    kind: object
    shape: Shape
    num_dims: int
    options: Measure | None


@dataclasses.dataclass(frozen=True)
class Turn:
    """One call of a pass, and its level."""

    num_pass: int
    number: int
    level: Level


class _Watch:
    """Peak memory of each part of a pass, in bytes beyond its start.

    Attributes:
        forward: peak per call, from its beginning to that of the next one, or of backward.
        loss: the peak since the last call began, beyond its beginning: most of it is what the
            program computes of the call's output.
        backward: peak per call, by number, in backward's order.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory, self._start, self._peak = memory, memory.allocated(), 0
        self._has_begun = False
        self._open: int | None = None
        self._at_call = self._start
        self.forward, self.loss, self.backward = list[int](), 0, dict[int, int]()
        memory.take_peak()

    def begin_call(self) -> None:
        """A call begins, and the part of the call before it ends."""
        peak = self._take()
        self.forward += [peak] if self._has_begun else []
        self._has_begun, self._at_call = True, self._memory.allocated()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing counts: measuring runs are not part of the pass."""
        self._peak = max(self._peak, self._memory.take_peak())
        yield
        self._memory.take_peak()

    def close(self, following: int | None = None) -> None:
        """End the current part; backward of call `following` begins."""
        if following is not None and following == self._open:
            return
        peak = self._take()
        if self._open is None:
            self.forward.append(peak)
            self.loss = self._start + peak - self._at_call
        else:
            self.backward[self._open] = max(self.backward.get(self._open, peak), peak)
        self._open = following

    def _take(self) -> int:
        """The peak of the part that ends now."""
        peak, self._peak = max(self._peak, self._memory.take_peak()) - self._start, 0
        return peak


class Stage(enum.Enum):
    """How far a pass has come."""

    FORWARD = enum.auto()
    #: the next call of a block begins another pass
    BACKWARD = enum.auto()


@dataclasses.dataclass
class _Pass:
    """One pass: the calls of blocks up to a backward pass, and that backward pass.

    number: from 1. first: the block of its first call. profile: what is known of such passes; None
    if every block is recomputed. wanted: levels to measure. found: measurements by kind and shape
    of calls. watch: counts the peaks, in a pass that measures them. num_calls: so far. is_stale:
    whether the pass did not match its profile. is_replanned: whether it is the first of its plan.
    """

    number: int
    first: weakref.ref[torch.nn.Module] | None
    stage: Stage = Stage.FORWARD
    profile: Profile | None = None
    wanted: frozenset[Level] = frozenset()
    found: dict[object, dict[Level, Option]] = dataclasses.field(default_factory=dict)
    watch: _Watch | None = None
    num_calls: int = 0
    is_stale: bool = False
    is_replanned: bool = False


class Planner:
    """Chooses levels for the blocks of one axis, whose ranks make the same calls."""

    def __init__(self, world: World, axis: Axis) -> None:
        self._axis, self._memory, self._host = axis, world.service(memory_of), world.service(Host)
        self._profiles = Profiles()
        self._pass = _Pass(0, None, Stage.BACKWARD)
        self._num_retries = self._memory.num_retries()
        self._num_failures = 0
        # Of this rank, and the smallest of all ranks as of the last agreement.
        self._limit = self._smallest_limit = self._memory.limit()
        self._base = 0  # allocated at the start of the last pass whose peaks were measured
        self._margin = 0.0

    @property
    def levels(self) -> tuple[Level, ...]:
        """Planned levels of the calls of this pass; empty without a plan."""
        profile = self._pass.profile
        return tuple(LEVELS[number] for number in (profile and profile.choice) or ())

    def next(self, subject: Subject) -> Turn:
        """The turn of the next call. Collective at the start of a pass."""
        if self._memory.limit_is_open:
            return Turn(-1, -1, Level.NOTHING)
        if self._pass.stage is Stage.BACKWARD or self._is_repeated(subject):
            self._begin(subject)
        current = self._pass
        number, current.num_calls = current.num_calls, current.num_calls + 1
        if current.watch is not None:
            current.watch.begin_call()
        return Turn(current.number, number, self._level(current, number, subject))

    def abort(self) -> None:
        """A call of this pass has failed: the next call begins a new pass.

        Discards the measurements of this one.
        """
        self._pass.stage, self._pass.is_stale = Stage.BACKWARD, bool(self._pass.wanted)

    def turn_back(self, turn: Turn) -> None:
        """Backward has reached the call of `turn`."""
        if turn.num_pass != self._pass.number:
            return
        self._pass.stage = Stage.BACKWARD
        if self._pass.watch is not None:
            self._pass.watch.close(turn.number)

    def _is_repeated(self, subject: Subject) -> bool:
        """Whether the first block runs again after all planned calls: a pass without backward."""
        current = self._pass
        planned = len(self.levels) if current.profile and current.profile.choice else -1
        return (
            current.num_calls == planned
            and current.first is not None
            and current.first() is subject.block
        )

    def _level(self, current: _Pass, number: int, subject: Subject) -> Level:
        profile = current.profile
        if profile is None:
            return Level.BLOCK
        if subject.options is None:  # may not be measured
            covered = profile.covers(number, subject.kind, subject.shape)
            current.is_stale = current.is_stale or bool(current.wanted) or not covered
            return Level.BLOCK
        if current.wanted and not current.is_stale:
            self._measure(current, number, subject, profile, subject.options)
        current.is_stale = current.is_stale or not profile.covers(
            number, subject.kind, subject.shape
        )
        if current.is_stale or profile.choice is None:
            return Level.BLOCK
        return LEVELS[profile.choice[number]]

    def _measure(
        self, current: _Pass, number: int, subject: Subject, profile: Profile, options: Measure
    ) -> None:
        if profile.choice is None:
            profile.append(subject.kind, subject.shape)
        key = subject.kind, subject.shape
        if key not in current.found:
            with contextlib.nullcontext() if current.watch is None else current.watch.paused():
                current.found[key] = options([level for level in LEVELS if level in current.wanted])
        if number < len(profile.options):
            profile.options[number].update(current.found[key])

    def _begin(self, first: Subject) -> None:
        """End the last pass and begin another."""
        last, number = self._pass, self._pass.number + 1
        if last.watch is not None:
            last.watch.close()
        key, room, is_stale = self._agree(first, last, number)
        self._pass = current = _Pass(number, weakref.ref(first.block))
        self._num_failures += is_stale
        if number % _RECONSIDERED == 0:
            self._num_failures //= 2
        if number == 1 or self._num_failures > _MOST_FAILURES:
            return
        if last.profile is not None and is_stale:
            self._profiles.remove(last.profile)
        elif last.profile is not None and last.wanted:
            self._conclude(last.profile, last.wanted, last.watch, room)
        current.profile = self._profiles.serving(key)
        self._prepare(current, current.profile, room)

    def _agree(self, first: Subject, last: _Pass, number: int) -> tuple[PassKey, int, bool]:
        """The key of this pass, the smallest room, and whether the last pass was stale on any rank.

        One small CPU collective per pass, about a thousandth of a step. Ranks may differ in
        sequence lengths, memory and failures, and must choose the same levels.
        """
        if number % _RECONSIDERED < _NEWS or last.wanted or last.is_replanned:
            self._limit = self._memory.limit()
        retries, used = self._memory.num_retries(), max(self._memory.allocated(), self._base)
        complaints = (
            int(last.is_stale),
            int(retries > self._num_retries and number > 3 and not last.wanted),
        )
        self._num_retries = retries
        kind = zlib.crc32(repr(first.kind).encode())  # unlike `hash`, equal on all ranks
        wire = [kind, *padded(first.shape), used - self._limit, -self._limit, *complaints]
        kind, *dims, lacking, negative_limit, is_stale, has_retried = map(
            int, largest(wire, self._axis, "memory of a step")
        )
        self._smallest_limit = -negative_limit
        if has_retried:
            self._margin = min(self._margin + _MORE_MARGIN, _MOST_MARGIN)
        return (
            PassKey(kind, tuple(dims), first.num_dims),
            int(-lacking - self._margin * self._smallest_limit),
            bool(is_stale),
        )

    def _prepare(self, current: _Pass, profile: Profile, room: int) -> None:
        """Decide what this pass measures, or replace its plan if that no longer fits."""
        if profile.agreed is None or profile.choice is None:
            profile.clear()
            self._memory.tidy()
            current.wanted, current.watch = _FIRST, _Watch(self._memory)
            self._base = self._memory.allocated()
        elif any(profile.choice) and _THEN not in profile.measured:
            current.wanted = frozenset({_THEN})
        elif not self._fits(profile, room) or current.number % _RECONSIDERED == 0:
            self._plan(profile, room)

    def _fits(self, profile: Profile, room: int) -> bool:
        """Whether the plan fits, with some slack for what has been allocated since it was made."""
        if profile.agreed is None or profile.choice is None:
            return False
        return plan.need(*profile.agreed, profile.choice) <= room + _SLACK * self._smallest_limit

    def _conclude(
        self, profile: Profile, measured: frozenset[Level], watch: _Watch | None, room: int
    ) -> None:
        """Merge the measurements of all ranks, by maximum, and plan."""
        if watch is not None:
            profile.forward, profile.loss = watch.forward, watch.loss
            profile.backward = watch.backward
        # Ranks that ran different blocks, or reached them in backward in a different order, start
        # over: their figures would not line up in the reduction below.
        calls = [len(profile.kinds), len(profile.forward), *profile.backward]
        if told_apart(str(calls), self._axis, "calls") is not None:
            profile.clear()
            self._num_failures += 1
            return
        figures = iter(
            largest([*profile.figures(LEVELS, _UNKNOWN), -self._host.room()], self._axis, "a plan")
        )
        profile.shapes = [tuple(int(next(figures)) for _ in shape) for shape in profile.shapes]
        blocks = [
            _in_order(
                [Option(int(next(figures)), int(next(figures)), next(figures)) for _ in LEVELS]
            )
            for _ in profile.kinds
        ]
        base = LEVELS.index(Level.BLOCK)
        forward = tuple(int(next(figures)) for _ in profile.forward)
        if not any(forward):  # the device does not count memory: use what blocks keep
            forward = tuple(itertools.accumulate(options[base].kept for options in blocks))
        profile.loss = int(next(figures))
        backward = tuple((place, int(next(figures))) for place in profile.backward)
        step = Step(base, forward, backward)
        _bound_host(blocks, int(-next(figures)))
        profile.agreed, profile.measured = (blocks, step), profile.measured | measured
        self._plan(profile, room)

    def _plan(self, profile: Profile, room: int) -> None:
        if profile.agreed is None:
            return
        blocks, step = profile.agreed
        choice = plan.choose(blocks, step, room)
        if choice != profile.choice:
            self._memory.tidy()  # the cache consists of blocks in the sizes of the old plan
            self._pass.is_replanned = True
        profile.choice = choice
        if choice != profile.told and (_THEN in profile.measured or not any(choice)):
            profile.told = choice
            self._tell(profile, blocks, step, choice, room)

    def _tell(
        self,
        profile: Profile,
        blocks: Sequence[Options],
        step: Step,
        choice: Sequence[int],
        room: int,
    ) -> None:
        used, gib = max(self._memory.allocated(), self._base), 2.0**30
        loss = max(profile.loss - blocks[-1][step.base].kept, 0)
        print_rank(
            f"recomputation for inputs {profile.key.shape[: profile.key.num_dims]}: "
            f"{plan.describe([level.value for level in LEVELS], choice)}; "
            f"{(used + plan.need(blocks, step, choice)) / gib:.1f} of "
            f"{(used + room) / gib:.1f} GiB, {loss / gib:.1f} of them for the loss, "
            f"{plan.more_time(blocks, choice):.1%} more time",
            rank=self._axis.ranks[0],
            flush=True,
        )


class Planners:
    """One planner per axis. One per run, from `world.service(Planners)`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._planners: dict[str, Planner] = {}

    def of(self, axis: Axis) -> Planner:
        """The planner of the blocks that are sharded over `axis`."""
        if axis.name not in self._planners:
            self._planners[axis.name] = Planner(self._world, axis)
        return self._planners[axis.name]


def _in_order(options: Sequence[Option]) -> list[Option]:
    """The options of one call by level, with times raised to the least of each level."""
    fastest = options[0].seconds
    floors = [fastest * _LEAST_MORE[level] if math.isfinite(fastest) else 0.0 for level in LEVELS]
    return [
        dataclasses.replace(option, seconds=max(option.seconds, floor))
        for option, floor in zip(options, floors, strict=True)
    ]


def _bound_host(blocks: Sequence[list[Option]], room: int) -> None:
    """Allow OFFLOADED for the first blocks only, as many as the host has room for.

    Backward reaches those last, so their inputs would stay resident longest.
    """
    block, offloaded = LEVELS.index(Level.BLOCK), LEVELS.index(Level.OFFLOADED)
    for options in blocks:
        if options[offloaded] != _UNKNOWN:
            room -= options[block].kept - options[offloaded].kept
        if room < 0:
            options[offloaded] = _UNKNOWN
