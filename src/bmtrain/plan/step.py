"""Memory of a training step on one GPU, moment by moment: forward, turn, backward, update.

Sizes of shards come from the layout that storages use, and peaks from the plan of recomputation. A
moment lists what lies in memory by part. What is alive in each:

* always: shards of the weights, the optimizer's states, memory that other ranks write gradients to;
* gathered weights: ZeRO-3 has NUM_BUFFERS for blocks of one size, ZeRO-2 every block
  from its forward to its backward pass, one rank none, because its shard is the whole;
* gradients: a block's shard from its backward pass to the next step's forward pass, and full ones
  of two blocks in backward, one being computed and one on its way (by NCCL two more, flattened);
* activations: what each block keeps at its level, from its forward to its backward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from bmtrain.distributed.transport import SMALLEST_SHARED_BYTES, Transport
from bmtrain.errors import ConfigurationError
from bmtrain.optim.streaming import LOAD_BYTES, NUM_SLOTS
from bmtrain.plan.outline import Group, Outline, numel_of
from bmtrain.plan.settings import DTYPES, GIB, LEVELS, Machine, Settings
from bmtrain.recompute import plan
from bmtrain.recompute.level import AUTO, Level
from bmtrain.shard.layout import Layout

NUM_BUFFERS = 2  # of each size that ZeRO-3 gathers at a time: the block in use and the next
_PAGE = 2**21  # granularity of memory that other ranks map
# Bytes beside torch's allocator, the same for every model. CONTEXT: the CUDA context with the code
# of loaded libraries. COMMUNICATION: buffers of NCCL's communicators, and the mappings of other
# ranks' memory. Both are what `cudaMemGetInfo` showed beyond reserved and shared memory on one
# H200, and on two and four: see docs/log.md.
CONTEXT, COMMUNICATION = int(0.8 * GIB), int(1.6 * GIB)
# The caching allocator keeps blocks that do not fit the next request: a share of what is allocated,
# and at least. Medians of benchmarks/results/forecast.json.
SLACK, LEAST_SLACK = 0.035, int(0.6 * GIB)
# Of a host's memory, for the system, Python and data loading: in all, and for each process.
HOST_SYSTEM, HOST_PROCESS = 4 * GIB, 4 * GIB
# Time relative to NOTHING, for the choice of levels: see recompute/planner.py.
_RELATIVE = {Level.NOTHING: 1.0, Level.CHEAP: 1.05, Level.OFFLOADED: 1.37, Level.BLOCK: 1.33}


@dataclasses.dataclass(frozen=True)
class Shard:
    """One storage on one rank.

    Attributes:
        num_bytes: of the slice, padding included.
        full_bytes: of the whole buffer; 0 if it is not gathered.
        state_bytes: of the optimizer's states of the slice.
        trained: whether it has a gradient.
    """

    num_bytes: int
    full_bytes: int
    state_bytes: int
    trained: bool


def shard_of(group: Group, ranks: int, settings: Settings) -> Shard:
    """The slice that the first of `ranks` has of a storage."""
    members, dtype, trained = group
    is_cut = dtype.is_floating_point  # weights in 4 bits are whole on every rank
    layout, form = Layout.build(members, ranks if is_cut else 1), settings.form
    pieces = [layout.piece(slot, 0) for slot in range(len(members))]
    used = max(piece.end for piece in pieces) - min(piece.begin for piece in pieces)
    # A compact state is made for each parameter by itself, a state in fp32 for all of a storage.
    numels = [piece.numel for piece in pieces] if form.is_compact else [used]
    states = sum(form.num_bytes(numel, DTYPES[settings.dtype]) for numel in numels)
    if settings.optimizer == "torch":  # two moments in the dtype of the weights
        states = 2 * used * dtype.itemsize
    num_bytes, full_bytes = (n * dtype.itemsize for n in (layout.shard_numel, layout.numel))
    return Shard(num_bytes, full_bytes * is_cut, states if trained else 0, trained)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Bytes by part at some time of a step, or the most during it."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())


class Memory:
    """The memory of steps of one model with some settings on a machine.

    Attributes:
        blocks: of each block its shards. others: shards of parameters outside of blocks.
        weights, gradients, states: bytes on the GPU; of gradients when all are there.
        staged: bytes on the GPU for states that pass through it.
        host: bytes of optimizer states in host memory, of one rank.
        shared: bytes of weights and buffers in memory that other ranks map.

    Raises:
        ConfigurationError: for sizes of parallelism that do not divide the number of ranks.
    """

    def __init__(self, outline: Outline, settings: Settings, machine: Machine) -> None:
        self.outline, self.settings, self.machine = outline, settings, machine
        self.ranks = ranks = machine.world_size
        if ranks % (settings.tp_size * settings.pipe_size):
            raise ConfigurationError(
                f"plan: tp_size {settings.tp_size} x pipe_size {settings.pipe_size} does not "
                f"divide {ranks} GPUs."
            )
        # Ranks of other stages have other layers, and their storages are cut for fewer ranks: what
        # one rank holds of all layers together is the same.
        self.blocks = [
            [shard_of(group, ranks, settings) for group in own] for own in outline.blocks
        ]
        self.others = [shard_of(group, ranks, settings) for group in outline.others]
        in_blocks = list(itertools.chain(*self.blocks))
        everything = [*in_blocks, *self.others]
        self.weights = sum(shard.num_bytes for shard in everything)
        self.gradients = sum(shard.num_bytes for shard in everything if shard.trained)
        held = sum(shard.state_bytes for shard in everything)
        is_away = settings.optimizer == "offload"
        self.host = max(0, held - int(settings.device_states * GIB)) if is_away else 0
        self.states = held - self.host
        self.staged = NUM_SLOTS * LOAD_BYTES if self.host else 0
        # GPUs of one host write gradients to each other: a buffer for each size that blocks share.
        self.has_peers = ranks > 1 and machine.hosts == 1
        big = [s for s in in_blocks if self.has_peers and s.num_bytes >= SMALLEST_SHARED_BYTES]
        sizes = Counter(shard.full_bytes for shard in big if shard.trained)
        self.exchanges = sum(
            (size // settings.tp_size // _PAGE + 1) * _PAGE
            for size, count in sizes.items()
            if count > 1
        )
        self.shared = self.exchanges + sum(shard.num_bytes for shard in big)

    def moments(self, levels: Sequence[Level]) -> list[Moment]:
        """What is alive when, with call number n at levels[n]."""
        calls, last = self.outline.calls, len(self.outline.calls)
        costs = [call.costs.levels[level] for call, level in zip(calls, levels, strict=True)]
        before = [0, *itertools.accumulate(cost.kept for cost in costs)]
        found = [
            self._moment("forward", place, before[place] + cost.forward, call.before, place + 1)
            for place, (call, cost) in enumerate(zip(calls, costs, strict=True))
        ]
        found.append(self._moment("turn", last - 1, before[last], self.outline.turn, last))
        for place in reversed(range(last)):
            kept = before[place] + costs[place].backward
            found.append(self._moment("backward", place, kept, calls[place].after, place))
        tail = self._moment("backward", 0, 0, self.outline.tail, 0)
        return [*found, tail, self._moment("update", -1, 0, 0, 0)]

    def peak(self, levels: Sequence[Level]) -> Moment:
        """The moment that takes most."""
        return max(self.moments(levels), key=lambda moment: moment.total)

    def levels(self, recompute: str, room: int) -> list[Level]:
        """The level of each call; with "auto" what `use_checkpoint="auto"` would choose.

        Args:
            recompute: of the settings.
            room: bytes of the GPU that may be in use, for "auto".
        """
        calls, names = self.outline.calls, list(_RELATIVE)
        if recompute != AUTO:
            return [LEVELS[recompute]] * len(calls)
        blocks = []
        for call in calls:
            costs, numel = call.costs.levels, max(numel_of(self.outline.blocks[call.number]), 1)
            blocks.append(
                [plan.Option(costs[x].kept, costs[x].backward, _RELATIVE[x] * numel) for x in names]
            )
        at_base = self.moments([names[-1]] * len(calls))
        forward, turn, backward = (
            [m.total for m in at_base if m.name == name] for name in ("forward", "turn", "backward")
        )
        forward[-1:] = [max(forward[-1:] + turn)]
        order = reversed(range(len(calls)))
        step = plan.Step(-1, tuple(forward), tuple(zip(order, backward, strict=False)))
        target = room
        while True:
            choice = plan.choose(blocks, step, target)
            found = [names[number] for number in choice]
            # The plan moves two measured peaks; the parts that depend on levels (the allocator's
            # slack, peaks of forward) may make it a little more.
            over = self.peak(found).total - room
            planned = plan.need(blocks, step, choice)
            if over <= 0 or planned > target:  # it fits, or nothing does
                return found
            # Below what this choice needs, so that the next one is another.
            target = planned - over

    def on_host(self, levels: Sequence[Level]) -> int:
        """Bytes of host memory on one host."""
        called = zip(self.outline.calls, levels, strict=True)
        inputs = sum(call.costs.inputs for call, level in called if level is Level.OFFLOADED)
        return HOST_SYSTEM + self.machine.gpus * (HOST_PROCESS + self.host + inputs)

    def _moment(self, name: str, place: int, kept: int, outside: int, gone: int) -> Moment:
        """The parts of a moment; gradients of the blocks before number `gone` are not there."""
        # Without blocks the turn is all of both passes.
        is_forward = name == "forward" or (name == "turn" and place >= 0)
        is_cut = self.ranks > 1 and place >= 0 and self.outline.calls
        in_flight = self._in_flight(place) if is_cut and name == "backward" else 0
        numbers = {call.number for call in self.outline.calls[gone:]}
        behind = [shard for number in numbers for shard in self.blocks[number]]
        if not is_forward or gone < len(self.outline.calls):
            behind += self.others
        parts = {
            "weights": self.weights,
            "gradients": sum(shard.num_bytes for shard in behind if shard.trained),
            "optimizer states": self.states,
            "gathered weights": self._gathered(place) if is_cut else 0,
            "gradients in flight": self.exchanges + in_flight,
            "states that pass through": self.staged,
            "activations": kept,
            "outside of blocks": outside,
        }
        slack = max(int((sum(parts.values()) - self.shared) * SLACK), LEAST_SLACK)
        parts |= {"allocator's slack": slack, "CUDA context": CONTEXT}
        return Moment(name, {**parts, "communication": COMMUNICATION if self.ranks > 1 else 0})

    def _gathered(self, place: int) -> int:
        calls = self.outline.calls
        if self.settings.zero_level == 2:
            reached = {call.number for call in calls[: place + 2]}
            found = sum(shard.full_bytes for number in reached for shard in self.blocks[number])
        else:
            sizes = Counter(shard.full_bytes for own in self.blocks for shard in own)
            found = sum(full * min(count, NUM_BUFFERS) for full, count in sizes.items())
        is_end = place in (0, len(calls) - 1)
        outside = max((shard.full_bytes for shard in self.others), default=0)
        # Of tensor-parallel layers a rank gathers its part.
        return found // self.settings.tp_size + (outside if is_end else 0)

    def _in_flight(self, place: int) -> int:
        """Full gradients of the blocks behind this one that are not reduced yet."""
        calls = self.outline.calls
        own = [
            sum(shard.full_bytes for shard in self.blocks[call.number] if shard.trained)
            for call in calls[place + 1 : place + 1 + Transport.MAX_REDUCTIONS]
        ]
        is_last = place == len(calls) - 1
        if is_last:
            own = [max((s.full_bytes for s in self.others if s.trained), default=0)]
        sizes = {sum(shard.full_bytes for shard in block) for block in self.blocks}
        by_peers = self.has_peers and len(sizes) < len(self.blocks) and not is_last
        return (sum(own[:1]) + (0 if by_peers else sum(own))) // self.settings.tp_size
