"""What all storages of a run share: streams, rings, the gather schedule, the backward pass."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch

from bmtrain.distributed.agreement import largest
from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.peers import PeerGroups
from bmtrain.distributed.transport import Streams, Transport
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.shard.backward import NO_PASS, Backward
from bmtrain.shard.label import Label, Phase
from bmtrain.shard.layout import Slot
from bmtrain.shard.parting import Sameness
from bmtrain.shard.replicated import Replicated
from bmtrain.shard.residence import Fixed, Residence
from bmtrain.shard.steps import Steps

Item = TypeVar("Item", bound=Hashable)


class Schedule(Generic[Item]):
    """Learns which item is gathered after which, per phase, so that the next can be prefetched.

    Before it has seen a backward pass, it expects forward in reverse. A wrong guess costs one
    gather, once: what came instead is learned. An item that is met again within a pass starts a new
    pass, and a pass has no successor in the next: parameters may change in between, so a gather
    across that border would take old values. Items are kept alive on purpose: all ranks must guess
    alike, whenever each of them collects the garbage of a model, or their gathers no longer match
    and they hang. What has not been gathered for `memory` passes is forgotten, on all ranks at the
    same place.
    """

    memory = 64

    def __init__(self) -> None:
        self._next: dict[Phase, dict[Item, Item]] = {phase: {} for phase in Phase}
        self._previous: dict[Item, Item] = {}
        self._last: Item | None = None
        self._seen: set[Item] = set()
        self._phase = Phase.FORWARD
        self._num_passes = 0
        self._last_pass: dict[Item, int] = {}  # that gathered it

    def plan(self, order: Sequence[Item]) -> None:
        """Teach the forward order of some items before the first pass."""
        for item, following in itertools.pairwise(order):
            self._learn(Phase.FORWARD, item, following)

    def begins_pass(self, item: Item, phase: Phase) -> bool:
        """Whether gathering `item` now starts another pass over the model."""
        return phase is not self._phase or item in self._seen or not self._seen

    def observe(self, item: Item, phase: Phase) -> Item | None:
        """Note that `item` is gathered now; returns the item to prefetch, if one is known."""
        if self.begins_pass(item, phase):
            self.restart(phase)
        if self._last is not None:
            self._learn(phase, self._last, item)
        self._last = item
        self._seen.add(item)
        self._last_pass[item] = self._num_passes
        known = self._next[phase].get(item)
        return self._previous.get(item) if known is None and phase is Phase.BACKWARD else known

    def interrupt(self) -> None:
        """The next item has no predecessor, so that it is never prefetched.

        Other ranks may need data from this one before they reach that gather: a prefetch would wait
        for ranks that wait for this one, a deadlock.
        """
        self._last = None

    def restart(self, phase: Phase = Phase.FORWARD) -> None:
        """The next item begins a pass; the last item of the pass before has no successor."""
        if self._last is not None:
            following = self._next[self._phase].pop(self._last, None)
            if following is not None and self._previous.get(following) is self._last:
                del self._previous[following]
        self._phase, self._last = phase, None
        self._seen.clear()
        self._num_passes += 1
        if self._num_passes % self.memory == 0:
            self._forget_unused()

    def _forget_unused(self) -> None:
        oldest = self._num_passes - self.memory
        kept = {item for item, number in self._last_pass.items() if number >= oldest}
        self._last_pass = {item: self._last_pass[item] for item in kept}
        for known in (*self._next.values(), self._previous):
            for item in [x for x, other in known.items() if x not in kept or other not in kept]:
                del known[item]

    def _learn(self, phase: Phase, item: Item, following: Item) -> None:
        self._next[phase][item] = following
        if phase is Phase.FORWARD:
            self._previous[following] = item


class Engine:
    """One per run, reached by `world.service(Engine)`."""

    def __init__(self, world: World) -> None:
        self.device = world.device
        self.defaults = world.defaults
        self.mesh = world.mesh
        self.transport = Transport(
            Streams(world.device), world.service(PeerGroups), world.service(Ledger)
        )
        self.schedule: Schedule[Residence] = Schedule()
        self.backward = Backward(self.transport, self.begin_pass)
        self.replicated = Replicated(world.mesh.world, self.transport.ledger, self.backward)
        # Ties gathered views to the graph. All gathers share it, because nothing is ever
        # accumulated into it. It is on the CPU, where autograd attaches no stream to its node.
        self.leaf = torch.zeros((), device="cpu", requires_grad=True)
        # Weak: the engine lives as long as the run and must not keep dropped models alive.
        self.residences: weakref.WeakSet[Residence] = weakref.WeakSet()
        self.num_registered = 0
        world.service(Sameness)  # refuses wrappers that take over modules
        self.steps = Steps(self.transport.ledger, world.mesh.world, self.replicated)
        self._with_grad = True  # grad mode of the last forward pass
        self._num_turns = 0  # storages met in the pass

    def register(self, axis: Axis, slots: Sequence[Slot], dtype: torch.dtype) -> Label:
        """The label of the next storage, whose making is entered in the ledger."""
        label = Label(self.num_registered, axis, [slot.name for slot in slots])
        self.num_registered += 1
        self.steps.has_sharded = True
        shapes = " ".join(f"{slot.name} {slot.shape}" for slot in slots)
        self.transport.ledger.note(axis, f"the making of {label.text}: {dtype} {shapes}")
        return label

    def bring(self, residences: Sequence[Residence]) -> None:
        """Gather what is missing of `residences` as one, readable on the compute stream.

        Collective, with the same residences in the same order on all ranks.
        """
        missing = [each for each in residences if isinstance(each, Fixed) and not each.is_current]
        if missing:
            ready = self.transport.gather(*[each.missing(Phase.FORWARD) for each in missing])
            for each in missing:
                each.arrives(ready)
        for residence in residences:
            residence.bring()

    def bring_changed(self, residences: Sequence[Residence]) -> None:
        """`bring` between passes, without gathers of what no rank has written since the last one.

        That is seen by the values themselves. Collective, as `bring`.
        """
        self.rest()
        fixed = [each for each in residences if isinstance(each, Fixed)]
        if fixed:
            differ = torch.stack([each.differs() for each in fixed]).tolist()
            changed = largest(differ, self.mesh.world, "weights that were written")
            for each, is_changed in zip(fixed, changed, strict=True):
                if not is_changed:
                    each.keep()
        self.bring(residences)

    def acquire(self, residence: Residence, phase: Phase, *, with_grad: bool) -> torch.Tensor:
        """The full buffer of `residence`; starts the gather of its expected successor behind it.

        Parameters may change between a forward pass with gradients and one without, as those of a
        teacher that follows its student do. So a change of `with_grad` starts a new pass, and
        nothing is prefetched or kept across it.
        """
        if self.backward.task != NO_PASS:
            self.backward.abandon_if_dead()
        if isinstance(residence, Fixed):  # `bring` has gathered it, outside of the schedule
            return residence.acquire(phase)
        if phase is Phase.FORWARD:
            if self.schedule.begins_pass(residence, phase) or with_grad is not self._with_grad:
                self.begin_pass()
                # On a GPU the host does not wait for gathers: without this, ranks that part in a
                # forward pass would hang with no message. Once per pass, in the background.
                ledger = self.transport.ledger
                if not ledger.is_immediate:
                    ledger.compare_later(residence.label.axis)
            self._with_grad = with_grad
            residence.turn = self._num_turns
            self._num_turns += 1
        following = self.schedule.observe(residence, phase)
        # Wait for the values that the gather is about to read.
        residence.is_late = False
        residence.settle()
        full = residence.acquire(phase)
        # Backward gathers inside a pipeline only if a graph was retained. The successor may be
        # outside of it: the ranks of other stages reach that gather only after they have got
        # gradients from this rank, so a prefetch here would deadlock.
        is_apart = residence.is_pipelined and phase is Phase.BACKWARD
        if following is not None and not is_apart and not following.is_late:
            following.prefetch(phase)
        return full

    def rest(self) -> None:
        """Between passes: nothing stays in flight, and gathered values are forgotten.

        Called at the same place on all ranks.
        """
        if self.backward.task != NO_PASS:
            self.backward.abandon_if_dead()
        # Compiled code of whole models reads shards without asking for them.
        for residence in list(self.residences):
            residence.is_late = False
            residence.settle()
        # A capture that follows cannot wait for events of work that was issued before it.
        self.transport.streams.join()
        self.begin_pass()

    def fixed(self, residence: Residence) -> Residence:
        """The residence of the same values that stays where it is, for as long as it is held."""
        found = residence.fixed()
        self.residences.add(found)
        return found

    def begin_pass(self) -> None:
        """A pass is over: forget what was gathered, as shards may be written before the next."""
        self.schedule.restart()
        self._num_turns = 0
        for residence in self.residences:
            residence.forget()
