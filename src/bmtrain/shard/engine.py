"""What all storages of a run share: streams, rings, the gather schedule and the current backward
pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import torch

from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.peers import PeerGroups
from bmtrain.distributed.transport import Transport, make_streams
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.shard.backward import NO_PASS, Backward, HostSteps
from bmtrain.shard.gradient import Gradient
from bmtrain.shard.label import Label, Phase
from bmtrain.shard.parting import Sameness
from bmtrain.shard.replicated import Replicated
from bmtrain.shard.residence import Residence, Ring
from bmtrain.shard.steps import Steps
from bmtrain.torch_internals import in_backward

Item = TypeVar("Item", bound=Hashable)


class Schedule(Generic[Item]):
    """Learns which item is gathered after which, per phase; before it knows, backward is forward
    reversed.

    A wrong guess costs one gather, once: a successor that did not come is forgotten. Items met
    again within one pass start a new pass, so that the last item of one forward is never followed
    by the first of the next: parameters may change in between. Items are kept alive on purpose: all
    ranks must guess alike, whenever each of them drops a model.
    """

    def __init__(self) -> None:
        self._next: dict[Phase, dict[Item, Item]] = {phase: {} for phase in Phase}
        self._previous: dict[Item, Item] = {}
        self._last: Item | None = None
        self._seen: set[Item] = set()
        self._phase = Phase.FORWARD

    def plan(self, order: Sequence[Item]) -> None:
        """Tell the forward order of some items before the first pass."""
        for item, following in itertools.pairwise(order):
            self._learn(Phase.FORWARD, item, following)

    def begins_pass(self, item: Item, phase: Phase) -> bool:
        """True if gathering `item` now starts another pass over the model."""
        return phase is not self._phase or item in self._seen or not self._seen

    def observe(self, item: Item, phase: Phase) -> Item | None:
        """`item` is gathered now: the item to gather next, if one is known."""
        if self.begins_pass(item, phase):
            self.restart(phase)
        if self._last is not None:
            self._learn(phase, self._last, item)
        self._last = item
        self._seen.add(item)
        return self.following(item, phase)

    def following(self, item: Item, phase: Phase) -> Item | None:
        """What `item` is expected to be followed by."""
        known = self._next[phase].get(item)
        return self._previous.get(item) if known is None and phase is Phase.BACKWARD else known

    def interrupt(self) -> None:
        """What is gathered next must not be gathered early: it does not follow what came last.

        Other ranks may have to receive something from this one before they come to that gather.
        """
        self._last = None

    def restart(self, phase: Phase = Phase.FORWARD) -> None:
        """The next item begins a pass; nothing came after the last of the pass before."""
        if self._last is not None:
            following = self._next[self._phase].pop(self._last, None)
            if following is not None and self._previous.get(following) is self._last:
                del self._previous[following]
        self._phase, self._last = phase, None
        self._seen.clear()

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
            make_streams(world.device), world.service(PeerGroups), world.service(Ledger)
        )
        self.schedule: Schedule[Residence] = Schedule()
        self.host = HostSteps(self.transport.ledger)
        self.backward = Backward(self.transport, self.host, self._end_of_backward)
        self.replicated = Replicated(world.mesh.world, self.host, self.backward)
        # Ties gathered views to the graph; every gather may share it because nothing is ever
        # accumulated into it. On the CPU it belongs to no stream: a graph of an earlier pass that
        # is still alive must not tie a captured pass to that one's stream.
        self.leaf = torch.zeros((), device="cpu", requires_grad=True)
        self._rings: dict[tuple[int, torch.dtype], Ring] = {}
        self._residences: weakref.WeakSet[Residence] = weakref.WeakSet()
        self._gradients: weakref.WeakSet[Gradient] = weakref.WeakSet()
        self.num_registered = 0
        world.service(Sameness)  # watches what takes over modules
        self._steps = Steps(
            self.transport.ledger, world.mesh.world, self.replicated, self._gradients
        )
        self._with_grad = True  # of the forward pass that was last begun

    def ring(self, numel: int, dtype: torch.dtype) -> Ring:
        """The ring of all ZeRO-3 storages whose full buffer has this size."""
        if (numel, dtype) not in self._rings:
            self._rings[numel, dtype] = Ring(numel, dtype, self.device, self.defaults.num_buffers)
        return self._rings[numel, dtype]

    def new_label(self, axis: Axis, names: Sequence[str]) -> Label:
        """What the next storage is called."""
        self.num_registered += 1
        return Label(self.num_registered - 1, axis, names)

    def register(self, residence: Residence, gradient: Gradient) -> None:
        """Take part in the schedule and in backward passes."""
        self._residences.add(residence)
        self._gradients.add(gradient)
        residence.rename(gradient.label)
        shapes = " ".join(f"{slot.name} {slot.shape}" for slot in gradient.layout.slots)
        self.transport.ledger.note(
            gradient.axis, f"the making of {gradient.label.text}: {gradient.policy.dtype} {shapes}"
        )

    @property
    def num_alive(self) -> int:
        """Storages that are in use."""
        return len(self._gradients)

    def acquire(self, residence: Residence, phase: Phase, *, with_grad: bool) -> torch.Tensor:
        """The full buffer of `residence`, with the gather of its expected successor started behind
        it.

        Between forward passes with and without gradient parameters may change, as those of a
        teacher that follows its student do: they are passes of their own (`with_grad`).
        """
        self._abandon_dead_pass()
        if phase is Phase.FORWARD:
            if self.schedule.begins_pass(residence, phase) or with_grad is not self._with_grad:
                self.schedule.restart()
                self._begin_forward()
                self._compare_passes(residence)
            elif not residence.is_coming():
                self.transport.fence()  # nobody expected it: the program may just have written it
            self._with_grad = with_grad
        following = self.schedule.observe(residence, phase)
        full = residence.acquire(phase)
        # Backward seldom gathers inside a pipeline (a graph that was retained). What follows may be
        # outside, where the ranks of other stages do not come before they have got gradients from
        # this one.
        if following is not None and not (residence.is_pipelined and phase is Phase.BACKWARD):
            following.prefetch(phase)
        return full

    def replicate(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Keep ordinary parameters the same on all ranks: rank 0's values, gradients summed."""
        self.replicated.add(params)

    def rest(self) -> None:
        """Between passes: nothing is under way, and no gathered value counts as known.

        Called alike on all ranks.
        """
        self._abandon_dead_pass()
        self.transport.streams.join()
        self.schedule.restart()
        self._begin_forward()

    def settle_gradients(self) -> list[tuple[Gradient | Replicated, tuple[bool, ...]]]:
        """Between passes: all gradients move to the fixed places where passes leave them; which
        parameters have one.
        """
        everything: list[Gradient | Replicated] = [self.replicated, *self._gradients]
        return [(gradient, gradient.settle()) for gradient in everything]

    def ring_buffers(self) -> list[torch.Tensor]:
        """The memory of all rings, which a graph must keep."""
        return [tensor for ring in self._rings.values() for tensor in ring.tensors]

    def num_ring_buffers(self) -> int:
        """Full buffers allocated in all rings."""
        return sum(ring.num_buffers for ring in self._rings.values())

    def _compare_passes(self, residence: Residence) -> None:
        """Where the host does not wait for gathers, hear at every pass what the other ranks have
        done up to the one before.
        """
        ledger = self.transport.ledger
        if residence.label is not None and not ledger.is_immediate and self.host.tape is None:
            ledger.compare_later(residence.label.axis)

    def _abandon_dead_pass(self) -> None:
        """Forget a backward pass that an exception has ended: outside of one none can be open."""
        if self.backward.task != NO_PASS and not in_backward():
            self.backward.abandon()

    def _begin_forward(self) -> None:
        self.transport.fence()
        for residence in self._residences:
            residence.forget()

    def _end_of_backward(self) -> None:
        self.schedule.restart()
        self._begin_forward()
