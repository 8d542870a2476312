"""Memory of a training step on one GPU, moment by moment: forward, turn, backward, update.

Sizes of shards come from the layout that storages use, and peaks from the plan of recomputation. A
moment lists what lies in memory by part. What is alive in each:

* always: shards of the weights, the optimizer's states, memory that other ranks write gradients to;
* gathered weights: ZeRO-3 keeps a ring of `num_buffers` for blocks of one size, ZeRO-2 every block
  from its forward to its backward pass, one rank none, because its shard is the whole;
* gradients: a block's shard from its backward pass to the next step's forward pass, and full ones
  of two blocks in backward, one being computed and one on its way (by NCCL two more, flattened);
* activations: what each block keeps at its level, from its forward to its backward pass.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from bmtrain.distributed.transport import SMALLEST_SHARED_BYTES, Transport
from bmtrain.optim.streaming import LOAD_BYTES, NUM_SLOTS
from bmtrain.plan.machine import COMMUNICATION, CONTEXT, LEAST_SLACK, SLACK, Machine
from bmtrain.plan.outline import BlockCall, Group, Outline, numel_of
from bmtrain.plan.settings import DTYPES, Settings
from bmtrain.recompute import plan
from bmtrain.recompute.level import Level
from bmtrain.shard.gradient import LEAST_FREED
from bmtrain.shard.layout import Layout

# What a moment holds, in the order in which it is shown.
PARTS = (
    "weights",
    "gradients",
    "optimizer states",
    "gathered weights",
    "gradients in flight",
    "activations",
    "outside of blocks",
    "allocator's slack",
    "CUDA context",
    "communication",
)
GIB = 2**30
_FIXED = ("allocator's slack", "CUDA context", "communication")
_PAGE = 2**21  # granularity of memory that other ranks map


@dataclasses.dataclass(frozen=True)
class Shard:
    """One storage on one rank.

    Attributes:
        numel: elements of the slice, padding included.
        full: elements of the whole buffer.
        used: elements of the slice up to the last parameter's, padding between them included.
        pieces: elements of each parameter in the slice.
        itemsize: bytes of an element.
        trained: whether it has a gradient.
    """

    numel: int
    full: int
    used: int
    pieces: tuple[int, ...]
    itemsize: int
    trained: bool

    @property
    def num_bytes(self) -> int:
        """Of the slice."""
        return self.numel * self.itemsize

    @property
    def full_bytes(self) -> int:
        """Of the whole buffer."""
        return self.full * self.itemsize


def shard_of(group: Group, ranks: int, index: int = 0) -> Shard:
    """The slice that rank `index` of `ranks` has of a storage."""
    members, dtype, trained = group
    layout = Layout.build(members, ranks)
    pieces = [layout.piece(slot, index) for slot in range(len(members))]
    used = max(piece.end for piece in pieces) - min(piece.begin for piece in pieces)
    numels = tuple(piece.numel for piece in pieces)
    return Shard(layout.shard_numel, layout.numel, used, numels, dtype.itemsize, trained)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Bytes by part at some time of a step, or the most during it."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def tensors(self) -> int:
        """Of tensors: without slack, context and communication."""
        return sum(size for name, size in self.parts.items() if name not in _FIXED)


class Memory:
    """The memory of steps of one model with some settings on a machine.

    Attributes:
        shards: of each block, lists of storages; of others.
        weights, states: bytes on the GPU.
        staged, copied: bytes on the GPU for states that pass through it, and, in the optimizer's
            step, for copies of their gradients, as far as there is room.
        hidden: which part of those updates has its gradients copied, and so goes on later.
        host: bytes of optimizer states in host memory, of one rank.
        shared: bytes of weights and buffers in memory that other ranks map.
    """

    def __init__(self, outline: Outline, settings: Settings, machine: Machine) -> None:
        self.outline, self.settings, self.machine = outline, settings, machine
        self.ranks = machine.world_size
        # Ranks of other stages have other layers, and their storages are cut for fewer ranks: what
        # one rank holds of all layers together is the same.
        self.blocks = [[shard_of(group, self.ranks) for group in own] for own in outline.blocks]
        self.others = [shard_of(group, self.ranks) for group in outline.others]
        self.everything = [*(shard for own in self.blocks for shard in own), *self.others]
        self.has_peers = self.ranks > 1 and machine.hosts == 1
        self.weights = sum(shard.num_bytes for shard in self.everything)
        held = sum(_state_bytes(shard, settings) for shard in self.everything if shard.trained)
        is_away = settings.optimizer == "offload"
        self.host = max(0, held - int(settings.device_states * GIB)) if is_away else 0
        self.states = held - self.host
        self.staged = NUM_SLOTS * LOAD_BYTES if self.host else 0
        self.exchanges = self._exchanges()
        self.shared = self.exchanges + sum(
            shard.num_bytes
            for own in self.blocks
            for shard in own
            if self.has_peers and shard.num_bytes >= SMALLEST_SHARED_BYTES
        )
        self.copied, self.hidden = 0, 0.0
        if self.host and settings.overlap:
            wanted = self.gradients * self.host // held
            room = machine.room - self._moment("update", -1, 0, 0, gone=0).total
            self.copied = max(0, min(wanted, int(room * (1 - SLACK))))
            self.hidden = self.copied / wanted

    @property
    def gradients(self) -> int:
        """Bytes of this rank's gradients when all are there."""
        return sum(shard.num_bytes for shard in self.everything if shard.trained)

    def moments(self, levels: Sequence[Level]) -> list[Moment]:
        """What is alive when, with call number n at levels[n]."""
        calls = self.outline.calls
        costs = [call.costs.levels[level] for call, level in zip(calls, levels, strict=True)]
        kept = [cost.kept for cost in costs]
        found = []
        for place, call in enumerate(calls):
            alive = sum(kept[:place]) + costs[place].forward
            found.append(self._moment("forward", place, alive, call.before, gone=place + 1))
        last = len(calls)
        found.append(self._moment("turn", last - 1, sum(kept), self.outline.turn, gone=last))
        for place in reversed(range(last)):
            alive = sum(kept[:place]) + costs[place].backward
            outside = calls[place].after
            found.append(self._moment("backward", place, alive, outside, gone=place))
        found.append(self._moment("backward", 0, 0, self.outline.tail, gone=0))
        found.append(self._moment("update", -1, 0, 0, gone=0))
        return found

    def peak(self, levels: Sequence[Level]) -> Moment:
        """The moment that takes most."""
        return max(self.moments(levels), key=lambda moment: moment.total)

    def levels(self, room: int, limit: int | None = None) -> list[Level]:
        """What `use_checkpoint="auto"` would choose.

        Args:
            room: bytes of the GPU that may be in use.
            limit: bytes that tensors may take.
        """
        if limit is not None:
            room = min(room, limit + sum(self._around(limit)))
        options = [self._options(call) for call in self.outline.calls]
        base = [len(own) - 1 for own in options]
        measured = [self._level(own, number) for own, number in zip(options, base, strict=True)]
        at_base = self.moments(measured)
        forward = [m.total for m in at_base if m.name == "forward"]
        turn = max(m.total for m in at_base if m.name == "turn")
        forward[-1:] = [max(turn, *forward[-1:])]
        backward = [m for m in at_base if m.name == "backward"]
        order = range(len(options) - 1, -1, -1)
        step = plan.Step(
            -1,
            tuple(forward),
            tuple((place, m.total) for place, m in zip(order, backward, strict=False)),
        )
        blocks, target = [[option for _, option in own] for own in options], room
        while True:
            choice = plan.choose(blocks, step, target)
            found = [self._level(own, number) for own, number in zip(options, choice, strict=True)]
            # The plan moves two measured peaks; the parts that depend on levels (the allocator's
            # slack, peaks of forward) may make it a little more.
            over = self.peak(found).total - room
            planned = plan.need(blocks, step, choice)
            if over <= 0 or planned > target:  # it fits, or nothing does
                return found
            # Below what this choice needs, so that the next one is another.
            target = planned - over

    def whole_levels(self, level: Level) -> list[Level]:
        """`level` for every call; of a block that keeps all, NOTHING."""
        whole = self.outline.whole
        return [Level.NOTHING if whole[call.number] else level for call in self.outline.calls]

    def has(self, level: Level) -> bool:
        """Whether the level has been counted."""
        called = zip(self.outline.calls, self.whole_levels(level), strict=True)
        return all(own in call.costs.levels for call, own in called)

    def kept(self, level: Level) -> int:
        """Bytes that all blocks keep together at a level."""
        called = zip(self.outline.calls, self.whole_levels(level), strict=True)
        return sum(call.costs.levels[own].kept for call, own in called)

    def _options(self, call: BlockCall) -> list[tuple[Level, plan.Option]]:
        if self.outline.whole[call.number]:
            names: tuple[Level, ...] = (Level.NOTHING,)
        else:
            names = (Level.NOTHING, Level.CHEAP, Level.OFFLOADED, Level.BLOCK)
        found = []
        for level in names:
            cost = call.costs.levels[level]
            found.append(
                (
                    level,
                    plan.Option(
                        cost.kept, cost.backward, _RELATIVE[level] * max(call.costs.flops, 1.0)
                    ),
                )
            )
        return found

    def _level(self, options: list[tuple[Level, plan.Option]], number: int) -> Level:
        return options[number][0]

    def _moment(self, name: str, place: int, kept: int, outside: int, *, gone: int) -> Moment:
        """The parts of a moment; gradients of the blocks before number `gone` are not there."""
        number = self.outline.calls[place].number if place >= 0 and self.outline.calls else -1
        parts = {
            "weights": self.weights,
            "gradients": self.gradients_behind(gone, is_forward=name in ("forward", "turn")),
            "optimizer states": self.states,
            "gathered weights": 0 if number < 0 else self._gathered(place),
            "gradients in flight": self.exchanges
            + (self._in_flight(place) if name == "backward" else 0),
            "states that pass through": self.staged + (self.copied if name == "update" else 0),
            "activations": kept + (self.outline.shared if kept else 0),
            "outside of blocks": outside,
        }
        parts |= dict(zip(_FIXED, self._around(sum(parts.values())), strict=True))
        return Moment(name, parts)

    def _around(self, tensors: int) -> tuple[int, int, int]:
        """Bytes beside those of tensors, in the order of _FIXED."""
        slack = max(int((tensors - self.shared) * SLACK), LEAST_SLACK)
        return slack, CONTEXT, COMMUNICATION if self.ranks > 1 else 0

    def gradients_behind(self, gone: int, *, is_forward: bool) -> int:
        """Bytes of gradients that lie in memory when those of calls before number `gone` do not.

        In forward, small ones that are cleared still have their memory.
        """
        numbers = {call.number for call in self.outline.calls[gone:]}
        found = 0
        for number, own in enumerate(self.blocks):
            there = number in numbers
            found += sum(
                shard.num_bytes
                for shard in own
                if shard.trained and (there or (is_forward and shard.num_bytes < LEAST_FREED))
            )
        late = gone < len(self.outline.calls)
        return found + sum(s.num_bytes for s in self.others if s.trained and late)

    def _gathered(self, place: int) -> int:
        if self.ranks == 1:
            return 0
        calls, whole = self.outline.calls, self.outline.whole
        reached = {call.number for call in calls[: place + 2]}
        stays = [n for n in reached if whole[n] or self.settings.zero_level == 2]
        found = sum(shard.full_bytes for n in stays for shard in self.blocks[n])
        sizes = Counter(
            (shard.full, shard.itemsize)
            for n, own in enumerate(self.blocks)
            if n not in stays and not whole[n] and self.settings.zero_level == 3
            for shard in own
        )
        for (full, itemsize), count in sizes.items():
            found += full * itemsize * min(count, self.settings.num_buffers)
        is_end = place in (0, len(calls) - 1)
        outside = max((shard.full_bytes for shard in self.others), default=0)
        # Of tensor-parallel layers a rank gathers its part.
        return found // self.settings.tp_size + (outside if is_end else 0)

    def _in_flight(self, place: int) -> int:
        """Full gradients of the blocks behind this one that are not reduced yet."""
        if self.ranks == 1:
            return 0
        calls = self.outline.calls
        own = [
            sum(shard.full_bytes for shard in self.blocks[call.number] if shard.trained)
            for call in calls[place + 1 : place + 1 + Transport.MAX_REDUCTIONS]
        ]
        outside = max((s.full_bytes for s in self.others if s.trained), default=0)
        if place == len(calls) - 1:
            own = [outside]
        by_peers = self.has_peers and len({sum(s.full for s in b) for b in self.blocks}) < len(
            self.blocks
        )
        flat = 0 if by_peers and place < len(calls) - 1 else sum(own)
        return (sum(own[:1]) + flat) // self.settings.tp_size

    def _exchanges(self) -> int:
        """Memory that other ranks write gradients to: a buffer for each size that blocks share."""
        sizes = Counter(
            (shard.full, shard.itemsize)
            for own in self.blocks
            for shard in own
            if shard.num_bytes >= SMALLEST_SHARED_BYTES and shard.trained
        )
        return sum(
            (full * itemsize // self.settings.tp_size // _PAGE + 1) * _PAGE
            for (full, itemsize), count in sizes.items()
            if self.has_peers and count > 1
        )


# Time relative to NOTHING, for the choice of levels: see recompute/planner.py.
_RELATIVE = {Level.NOTHING: 1.0, Level.CHEAP: 1.05, Level.OFFLOADED: 1.37, Level.BLOCK: 1.33}


def _state_bytes(shard: Shard, settings: Settings) -> int:
    """What an optimizer keeps of one storage: torch's two moments in the dtype of the weights."""
    if settings.optimizer == "torch":
        return 2 * shard.used * shard.itemsize
    form, dtype = settings.form, DTYPES[settings.dtype]
    # A compact state is made for each parameter by itself, a state in fp32 for all of a storage.
    parts = shard.pieces if form.is_compact else (shard.used,)
    return sum(form.num_bytes(numel, dtype) for numel in parts)


def elements(outline: Outline) -> tuple[int, int]:
    """Elements of all parameters, and of those that are trained."""
    sizes = [(numel_of(group), group[2]) for group in outline.groups]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
