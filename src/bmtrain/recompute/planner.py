"""use_checkpoint="auto": passes over the model are measured, planned and watched; all ranks decide
alike.

A pass is the calls of blocks up to a backward pass and that backward pass. The first one of a run
recomputes every block: if anything fits, that does, and afterwards gradients and the optimizer's
state are there. The second does the same and measures. If memory does not hold everything, the
third has a plan and measures what remains to be known. From then on the plan holds for inputs of
that shape and smaller ones, until something no longer fits.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import weakref
import zlib
from collections.abc import Callable, Sequence

import torch

from bmtrain.distributed.agreement import is_same, largest
from bmtrain.recompute import plan
from bmtrain.recompute.level import Level
from bmtrain.recompute.memory import Memory, memory_of
from bmtrain.recompute.offload import Host
from bmtrain.recompute.plan import Option, Options, Step
from bmtrain.recompute.profiles import PassKey, Profile, Profiles, Shape, padded
from bmtrain.runtime.log import print_rank
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.shard.engine import Engine

LEVELS = tuple(Level)
# measured first: if everything fits, nothing else matters
_FIRST = frozenset({Level.NOTHING, Level.BLOCK, Level.OFFLOADED})
_THEN = frozenset({Level.CHEAP})
# What computes more takes longer, whatever a clock has shown of short blocks: at least as much more
# than at NOTHING.
_LEAST_MORE = {Level.NOTHING: 1.0, Level.CHEAP: 1.005, Level.BLOCK: 1.1, Level.OFFLOADED: 1.1}
_UNKNOWN = Option(2**60, 0, float("inf"))
# of the limit: what passes may begin with more than the one before without a new plan
_SLACK = 0.01
_RECONSIDERED = 32  # after as many passes there may be room again for more, and failures count half
# so many passes from there on, and after one that measures, the limit may move: libraries allocate,
# memory breaks up
_NEWS = 4
# passes that were not as measured; where there are more, every block is recomputed
_MOST_FAILURES = 16
# of the limit, kept free whenever the allocator had to retry
_MORE_MARGIN, _MOST_MARGIN = 0.02, 0.2


Measure = Callable[[Sequence[Level]], dict[Level, Option]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A call of a block that can be measured.

    block: whose call it is. kind: equal for calls that differ at most in shapes. shape: dims of the
    tensors among the arguments, one after the other, of which `num_dims` are those of the first.
    options: what the call would keep and take at some levels; those that it cannot run at are left
    out. None if it must not run
        more often than the program asks, on this rank.
    """

    block: torch.nn.Module
    kind: object
    shape: Shape
    num_dims: int
    options: Measure | None


@dataclasses.dataclass(frozen=True)
class Turn:
    """One call of a pass: its level, and where it says that backward has come to it."""

    planner: Planner
    num_pass: int
    number: int
    level: Level

    def backward_begins(self) -> None:
        """Backward passes through this call from now on."""
        self.planner.turn_back(self)


class _Watch:
    """The highest memory of each part of a pass: bytes beyond those at its beginning."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._start, self._peak = memory, memory.allocated(), 0
        self._open: int | None = None
        self.turn, self.backward = 0, dict[int, int]()
        memory.take_peak()

    def pause(self) -> None:
        """What follows is not part of the pass, until `resume`."""
        self._peak = max(self._peak, self._memory.take_peak())

    def resume(self) -> None:
        """The pass goes on."""
        self._memory.take_peak()

    def close(self, following: int | None = None) -> None:
        """A part is over; backward through call `following` begins."""
        if following is not None and following == self._open:
            return
        peak, self._peak = max(self._peak, self._memory.take_peak()) - self._start, 0
        if self._open is None:
            self.turn = peak
        else:
            self.backward[self._open] = max(self.backward.get(self._open, 0), peak)
        self._open = following


class Stage(enum.Enum):
    """How far a pass has come."""

    FORWARD = enum.auto()
    #: the next call of a block belongs to another pass
    BACKWARD = enum.auto()


@dataclasses.dataclass
class _Pass:
    """One pass: the calls of blocks up to a backward pass, and that.

    number: from 1 on. first: the block whose call began it. profile: what is known of such passes;
    None if every block is recomputed. wanted: levels that are measured. found: what has been
    measured, by kind and shape of calls. watch: of the memory, if its peaks are measured.
    num_calls: so far. is_stale: whether it was not as its profile says.
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


class Planner:
    """Levels for the calls of blocks that the ranks of one axis make together."""

    def __init__(self, world: World, axis: Axis) -> None:
        self._axis, self._memory, self._host = axis, world.service(memory_of), world.service(Host)
        self._steps = world.service(Engine).host
        self._profiles = Profiles()
        self._pass = _Pass(0, None, Stage.BACKWARD)
        self._num_retries = self._memory.num_retries()
        self._num_failures = 0
        # of this rank; of all ranks, as of the last agreement
        self._limit = self._smallest_limit = self._memory.limit()
        self._base = 0  # bytes at the beginning of the last pass whose peaks were measured
        self._margin = 0.0

    @property
    def levels(self) -> tuple[Level, ...]:
        """Of the calls of this pass, as far as they are planned."""
        profile = self._pass.profile
        return tuple(LEVELS[number] for number in (profile and profile.choice) or ())

    def next(self, subject: Subject) -> Turn:
        """The level of the next call. Collective where a pass begins."""
        if self._memory.limit_is_open:
            return Turn(self, -1, -1, Level.NOTHING)
        if self._steps.is_capturing:
            return Turn(self, -1, -1, self._level_in_graph())
        if self._pass.stage is Stage.BACKWARD or self._is_repeated(subject):
            self._begin(subject)
        current = self._pass
        number, current.num_calls = current.num_calls, current.num_calls + 1
        return Turn(self, current.number, number, self._level(current, number, subject))

    def abort(self) -> None:
        """A call of this pass has failed: if the program goes on, then with another.

        What this one has measured is not used.
        """
        self._pass.stage, self._pass.is_stale = Stage.BACKWARD, bool(self._pass.wanted)

    def turn_back(self, turn: Turn) -> None:
        """Backward has come to a call."""
        if turn.num_pass != self._pass.number:
            return
        self._pass.stage = Stage.BACKWARD
        if self._pass.watch is not None:
            self._pass.watch.close(turn.number)

    def _is_repeated(self, subject: Subject) -> bool:
        """All calls of the plan have been made and the first comes again: nothing came back through
        that forward pass.
        """
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
        if subject.options is None:  # a call like no other
            current.is_stale = current.is_stale or bool(current.wanted)
            return Level.BLOCK
        if current.wanted and not current.is_stale:
            self._measure(current, number, subject, profile, subject.options)
        current.is_stale = current.is_stale or not profile.covers(
            number, subject.kind, subject.shape
        )
        if current.is_stale or profile.choice is None:
            return Level.BLOCK
        return LEVELS[profile.choice[number]]

    def _level_in_graph(self) -> Level:
        """Nothing can be measured or agreed on in a CUDA graph: the plan that there is, if it is
        the same for all blocks.

        Copies to the host and back are ordered by the host, which has no part in a replay.
        """
        planned = set(self.levels)
        return (
            planned.pop() if len(planned) == 1 and Level.OFFLOADED not in planned else Level.BLOCK
        )

    def _measure(
        self, current: _Pass, number: int, subject: Subject, profile: Profile, options: Measure
    ) -> None:
        if profile.choice is None:
            profile.append(subject.kind, subject.shape)
        key = subject.kind, subject.shape
        if key not in current.found:
            if current.watch is not None:
                current.watch.pause()
            current.found[key] = options([level for level in LEVELS if level in current.wanted])
            if current.watch is not None:
                current.watch.resume()
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
        """What kind of pass this is, the smallest room and any complaint of all ranks. One small
        collective a pass, on the CPU.

        Ranks may have rows of different lengths, different memory and failures of their own; it
        takes a step to compute what this takes to travel a thousand times.
        """
        if number % _RECONSIDERED < _NEWS or last.wanted:
            self._limit = self._memory.limit()
        retries, used = self._memory.num_retries(), max(self._memory.allocated(), self._base)
        complaints = (
            int(last.is_stale),
            int(retries > self._num_retries and number > 3 and not last.wanted),
        )
        self._num_retries = retries
        kind = zlib.crc32(repr(first.kind).encode())  # the same on all ranks, as `hash` is not
        wire = [kind, *padded(first.shape), used - self._limit, -self._limit, *complaints]
        kind, *dims, lacking, negative_limit, is_stale, has_retried = map(
            int, largest(wire, self._axis)
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
        """Decide what this pass measures, and make the plan fit what memory there is."""
        if profile.agreed is None or profile.choice is None:
            profile.clear()
            self._memory.tidy()
            current.wanted, current.watch = _FIRST, _Watch(self._memory)
            self._base = self._memory.allocated()
        elif any(profile.choice) and not profile.measured >= _THEN:
            current.wanted = _THEN
        elif not self._fits(profile, room) or current.number % _RECONSIDERED == 0:
            self._plan(profile, room)

    def _fits(self, profile: Profile, room: int) -> bool:
        """Whether the plan still does; a little more may have been allocated when a pass begins
        than when it was made.
        """
        if profile.agreed is None or profile.choice is None:
            return False
        return (
            plan.need(*profile.agreed, profile.choice)
            <= room - _in_pieces(*profile.agreed) + _SLACK * self._smallest_limit
        )

    def _conclude(
        self, profile: Profile, measured: frozenset[Level], watch: _Watch | None, room: int
    ) -> None:
        """All ranks have measured: plan with the largest of what they found."""
        if watch is not None:
            profile.turn, profile.backward = watch.turn, watch.backward
        # Ranks that ran other blocks, or came back through them in another order, measure again.
        calls = [len(profile.kinds), *profile.backward]
        if not (is_same([len(calls)], self._axis) and is_same(calls, self._axis)):
            profile.clear()
            self._num_failures += 1
            return
        figures = iter(
            largest([*profile.figures(LEVELS, _UNKNOWN), -self._host.room()], self._axis)
        )
        profile.shapes = [tuple(int(next(figures)) for _ in shape) for shape in profile.shapes]
        blocks = [
            _in_order(
                [Option(int(next(figures)), int(next(figures)), next(figures)) for _ in LEVELS]
            )
            for _ in profile.kinds
        ]
        base = LEVELS.index(Level.BLOCK)
        # memory that is not counted has no peaks
        turn = max(int(next(figures)), sum(options[base].kept for options in blocks))
        step = Step(base, turn, tuple((place, int(next(figures))) for place in profile.backward))
        _bound_host(blocks, int(-next(figures)))
        profile.agreed, profile.measured = (blocks, step), profile.measured | measured
        self._plan(profile, room)

    def _plan(self, profile: Profile, room: int) -> None:
        if profile.agreed is None:
            return
        blocks, step = profile.agreed
        room -= _in_pieces(blocks, step)
        choice = plan.choose(blocks, step, room)
        if choice != profile.choice:
            self._memory.tidy()  # what was cached for the old one is in pieces of other sizes
        profile.choice = choice
        if choice != profile.told and (profile.measured >= _THEN or not any(choice)):
            profile.told = choice
            self._tell(profile.key.shape[: profile.key.num_dims], blocks, step, choice, room)

    def _tell(
        self, shape: Shape, blocks: Sequence[Options], step: Step, choice: Sequence[int], room: int
    ) -> None:
        used, gib = max(self._memory.allocated(), self._base), 2.0**30
        print_rank(
            f"recomputation for inputs {shape}: "
            f"{plan.describe([level.value for level in LEVELS], choice)}; "
            f"{(used + plan.need(blocks, step, choice)) / gib:.1f} of "
            f"{(used + room) / gib:.1f} GiB, "
            f"{plan.more_time(blocks, choice):.1%} more time",
            rank=self._axis.ranks[0],
            flush=True,
        )


class Planners:
    """One planner per axis of blocks. One per run, reached by `world.service(Planners)`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._planners: dict[str, Planner] = {}

    def of(self, axis: Axis) -> Planner:
        """The planner of blocks that the ranks of `axis` share."""
        if axis.name not in self._planners:
            self._planners[axis.name] = Planner(self._world, axis)
        return self._planners[axis.name]


def _in_order(options: Sequence[Option]) -> list[Option]:
    """The options of one call, by level, with times that go with the levels."""
    fastest = options[0].seconds
    floors = [fastest * _LEAST_MORE[level] if math.isfinite(fastest) else 0.0 for level in LEVELS]
    return [
        dataclasses.replace(option, seconds=max(option.seconds, floor))
        for option, floor in zip(options, floors, strict=True)
    ]


def _in_pieces(blocks: Sequence[Options], step: Step) -> int:
    """Bytes that may be free but in pieces too small for a large tensor: a few of the largest
    tensors of a block.
    """
    return max(options[step.base].peak for options in blocks) // 2


def _bound_host(blocks: Sequence[list[Option]], room: int) -> None:
    """Leave inputs on the host to as many blocks as it has room for: the first, which backward
    comes to last.
    """
    block, offloaded = LEVELS.index(Level.BLOCK), LEVELS.index(Level.OFFLOADED)
    for options in blocks:
        if options[offloaded] != _UNKNOWN:
            room -= options[block].kept - options[offloaded].kept
        if room < 0:
            options[offloaded] = _UNKNOWN
