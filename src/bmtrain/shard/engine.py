"""Where and when full values are gathered; what all storages of a run share."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch

from bmtrain.distributed.agreement import largest
from bmtrain.distributed.ledger import Ledger
from bmtrain.distributed.peers import PeerGroups
from bmtrain.distributed.transport import Gather, ShardSource, Streams, Transport
from bmtrain.errors import ParameterError, StaleParameterError
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.shard.gradient import Backward
from bmtrain.shard.label import Label, Phase
from bmtrain.shard.layout import Slot
from bmtrain.shard.parting import Sameness
from bmtrain.shard.replicated import Replicated
from bmtrain.shard.steps import Steps
from bmtrain.torch_internals import (
    NO_PASS,
    StorageWeakRef,
    num_users,
    plain_functions,
    tensors_over,
    version_of,
)


def num_references(tensor: torch.Tensor) -> int:
    """Tensors and other objects that share the memory of this one."""
    count: int = num_users(tensor.untyped_storage())
    return count


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of the contiguous `tensor`, apart from its version and graph."""
    out = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    out.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return out


# What is known of a tensor (`__get__`: `.shape`, `.data`, `.T`), and what recomputation asks for.
_READS_NO_VALUES = ("__get__", "detach", "is_inference", "requires_grad_")


class Stale(torch.Tensor):
    """A tensor in gathered memory of parameters that have changed since.

    Raises:
        StaleParameterError: when it is read or written.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _READS_NO_VALUES:
            raise StaleParameterError(
                "a parameter that a forward pass has kept (in an attribute, a list, a closure or "
                "the like), or a view of one, was used after the parameter had changed: it is a "
                "gathered copy of earlier values. Take it from its module again where it is used."
            )
        with plain_functions():
            out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            out.__class__ = Stale
        return out


class Residence:
    """The full buffer of a storage: where it lies, and who holds it.

    This class is that of a rank alone on its axis, whose shard is the full buffer. `release` ends
    what `acquire` has begun; a holder that is dropped without it has none since `forget`.
    """

    #: whether backward reads the buffer of forward; if not, saved views are packed and looked up
    #: after another gather
    survives_forward: bool = True
    #: whether only the ranks of one pipeline stage have the storage
    is_pipelined: bool = False
    #: version of the parameters when the last gather was started; None where nothing is gathered
    version: int | None = None
    #: place in the last pass that gathered it
    turn: int = 0
    #: whether an update may still be under way: prefetching would make the host wait too early. The
    #: same on all ranks, whichever of them has waited already.
    is_late: bool = False
    #: gives what waits for updates of the shard; weak, as updates hold the shard
    updates: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)

    def __init__(self, source: ShardSource, label: Label) -> None:
        self._source, self.label = source, label
        #: memory of the shard's present values that the program may have kept; see `mark_stale`
        self.handed_out: list[StorageWeakRef] = []
        self._released: list[tuple[weakref.ref[torch.Tensor], int]] = []  # with their versions

    def wait_for_updates(self) -> None:
        """Wait for updates of the shard that are under way, if its storage is alive."""
        self.is_late = False
        wait = self.updates()
        if wait is not None:
            wait()

    def prefetch(self, phase: Phase) -> None:
        """Start the gather, unless the values are resident or in flight."""

    def acquire(self) -> torch.Tensor:
        """The full buffer (layout.numel,), readable on the compute stream, after `prefetch`."""
        return alias(self._source.get())

    def release(self, full: torch.Tensor) -> None:
        """The holder of `full` has issued its last read."""

    @property
    def memory(self) -> torch.Tensor:
        """The full buffer of a residence that never moves, whatever it holds now."""
        return self._source.get()

    def refuse_written(self) -> None:
        """ParameterError if the program has written into a view of what was released."""
        released, self._released = self._released, []
        for reference, version in released:
            full = reference()  # alive, if a view of it is
            if full is not None and version_of(full) != version:
                raise ParameterError(
                    f"a view of gathered parameters ({self.label.text}) that a forward pass has "
                    "kept was written after the pass: the write is lost. Write to the parameter "
                    "itself, module.weight, between passes."
                )
            if full is not None:
                self._released.append((reference, version))

    def mark_stale(self) -> None:
        """The shard was written: refuse what the program has kept of gathered memory."""
        if self.handed_out:
            handed_out, self.handed_out = self.handed_out, []
            for tensor in tensors_over(handed_out):
                tensor.__class__ = Stale

    def forget(self) -> None:
        """Parameters may change now: the next `acquire` gathers them anew.

        Called at the same places of the program on every rank. Whether to gather must never depend
        on what can differ between ranks: versions of parameters (a rank whose slice is empty sees
        no change), or which old graphs are still alive. Ranks that decide differently hang.
        """


class Absent(Residence):
    """A block of another pipeline stage: this rank has no values and takes part in no gather."""

    def acquire(self) -> torch.Tensor:
        raise ParameterError(
            "this parameter belongs to another stage of the pipeline and has no values "
            "on this rank: use it through the "
            "PipelineTransformerBlockList, or read it with bmtrain.save, state_dict() "
            "or bmtrain.inspect."
        )


class Gathered(Residence):
    """Several ranks: each gather fills a new buffer, which its last holder drops, or `forget`.

    The gather waits for all that was issued on the compute stream before it, and so for the last
    reader of the memory that the allocator has handed out again. Holders in the same pass share a
    buffer. What a program keeps of a buffer (a weight that a block returned, a view in an
    attribute) keeps the memory, whose values never change: once the shard is written it is `Stale`.

    Args:
        source: the shard.
        survives_forward: ZeRO-2: the buffer stays for backward.
    """

    def __init__(
        self, source: ShardSource, label: Label, transport: Transport, *, survives_forward: bool
    ) -> None:
        super().__init__(source, label)
        self._transport, self.survives_forward = transport, survives_forward
        self._full: torch.Tensor | None = None
        self._arrived: torch.Event | None = None
        self._num_holders = 0
        # Weak: the memory lives as long as the graphs that read it.
        self._fixed: weakref.ref[Fixed] | None = None

    def fixed(self) -> Fixed:
        """One of the same values whose full buffer never moves: a CUDA graph reads its address."""
        found = None if self._fixed is None else self._fixed()
        if found is None:
            found = Fixed(self._source, self.label, self._transport)
            self._fixed = weakref.ref(found)
        return found

    def prefetch(self, phase: Phase) -> None:
        if self._full is None:
            self.refuse_written()
            axis, version = self.label.axis, version_of(self._source.get())
            if version != self.version:  # a write to `param.local` is not reported
                self.mark_stale()
            self._full, self.version = self._source.new_full(axis.size), version
            alive = itertools.filterfalse(StorageWeakRef.expired, self.handed_out)
            self.handed_out = [*alive, StorageWeakRef(self._full.untyped_storage())]
            self._arrived = self._transport.gather(
                Gather(self._full, self._source, axis, self.label.places[phase])
            )

    def acquire(self) -> torch.Tensor:
        self._num_holders += 1
        # Without this wait, the module would read the buffer before the gather has filled it.
        self._transport.streams.compute_waits(self._arrived)
        return cast(torch.Tensor, self._full)

    def release(self, full: torch.Tensor) -> None:
        if full is not self._full:
            return  # a holder from before `forget`
        self._num_holders -= 1
        if self._num_holders == 0:
            self._released.append((weakref.ref(full), version_of(full)))
            self._full = None  # back to the allocator, behind the last read on the compute stream

    def forget(self) -> None:
        # A prefetched buffer may have no holder, so that nothing has waited for its gather: without
        # this wait, the allocator could hand its memory to compute kernels while the gather still
        # writes it.
        self._transport.streams.compute_waits(self._arrived)
        if self._full is not None:
            self._released.append((weakref.ref(self._full), version_of(self._full)))
        self._full, self._arrived, self._num_holders = None, None, 0


class Values(enum.Enum):
    """What a fixed buffer holds.

    A gather makes NONE and PAST to CURRENT; `forget` makes CURRENT to PAST, and `keep` takes that
    back; `lose` ends with NONE.
    """

    NONE = enum.auto()
    #: those of the last gather, since which shards may have been written
    PAST = enum.auto()
    CURRENT = enum.auto()


class Fixed(Residence):
    """A buffer whose address never changes, gathered once between two calls of `forget`.

    It stays allocated for as long as this object lives. Each gather waits for all that was issued
    on the compute stream before it: holders need not say when they have read the buffer.
    """

    def __init__(self, source: ShardSource, label: Label, transport: Transport) -> None:
        super().__init__(source, label)
        self._transport = transport
        self._full: torch.Tensor | None = None
        # What holders of the last gather's values get, and its version, which counts what they
        # write.
        self._shown: torch.Tensor | None = None
        self._shown_version = 0
        self._ready: torch.Event | None = None
        self.values = Values.NONE

    def prefetch(self, phase: Phase) -> None:
        if self.values is not Values.CURRENT:
            self.arrives(self._transport.gather(self.missing()))

    def missing(self) -> Gather:
        """The gather that brings the values; `arrives` says that it was started."""
        axis = self.label.axis
        if self._full is None:
            self._full = self._source.new_full(axis.size)
        self.values, self.version = Values.NONE, version_of(self._source.get())
        return Gather(self._full, self._source, axis, self.label.places[Phase.FORWARD])

    def arrives(self, ready: torch.Event | None) -> None:
        """The values are there after `ready`."""
        with torch.inference_mode(False):  # which counts no writes
            self._shown = alias(self.memory)
        self._shown_version = version_of(self._shown)
        self._ready, self.values = ready, Values.CURRENT

    @property
    def memory(self) -> torch.Tensor:
        if self._full is None:
            raise RuntimeError("a fixed buffer was read before its first gather")
        return self._full

    def bring(self) -> None:
        """Make the values readable on the compute stream."""
        self.prefetch(Phase.FORWARD)
        # Without this wait, the module would read the buffer before the gather has filled it.
        self._transport.streams.compute_waits(self._ready)

    def acquire(self) -> torch.Tensor:
        self.bring()
        if self._shown is None:
            raise RuntimeError("a gather left no buffer")
        return self._shown

    def forget(self) -> None:
        # Nobody may have waited for the gather: without this wait, what follows on the compute
        # stream could write the shard while a peer still copies from it.
        self._transport.streams.compute_waits(self._ready)
        if self.values is Values.CURRENT:
            self.values = Values.PAST

    def differs(self) -> torch.Tensor:
        """Whether this rank's part of the buffer is other than its shard; bool (), on the device.

        The bits are compared: versions do not count what is written past torch, by replays of
        graphs for example. True where there are no values. If it is False on all ranks, the whole
        buffer is on each what another gather would make it.
        """
        shard, shown = self._source.get(), self._shown
        is_intact = shown is not None and version_of(shown) == self._shown_version
        if self._full is None or self.values is Values.NONE or not is_intact:
            return torch.ones((), dtype=torch.bool, device=shard.device)
        axis = self.label.axis
        own = self._full.chunk(axis.size)[axis.index]
        return (own.view(torch.int64) != shard.view(torch.int64)).any()

    def keep(self) -> None:
        """After `forget`: the values of the last gather are right. All ranks say so, or none."""
        if self.values is not Values.PAST:
            raise RuntimeError("there are no values of an earlier gather")
        self.values, self.version = Values.CURRENT, version_of(self._source.get())

    def lose(self) -> None:
        """Somebody may have written the buffer: the next gather must come."""
        self.values = Values.NONE


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
        self.backward = Backward(self.transport, self.forget_gathered)
        self.replicated = Replicated(world.mesh.world, self.transport.ledger, self.backward)
        # Ties gathered views to the graph. All gathers share it, because nothing is ever
        # accumulated into it. It is on the CPU, where autograd attaches no stream to its node.
        self.leaf = torch.zeros((), device="cpu", requires_grad=True)
        # Weak: the engine lives as long as the run and must not keep dropped models alive.
        self.residences: weakref.WeakSet[Residence] = weakref.WeakSet()
        self.num_registered = 0
        world.service(Sameness)  # refuses wrappers that take over modules
        self.steps = Steps(
            self.transport.ledger, world.mesh.world, self.replicated, self.backward, self.residences
        )
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
        fixed = [each for each in residences if isinstance(each, Fixed)]
        missing = [each for each in fixed if each.values is not Values.CURRENT]
        if missing:
            ready = self.transport.gather(*[each.missing() for each in missing])
            for each in missing:
                each.arrives(ready)
        for each in fixed:
            each.bring()

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
        if self.backward.pass_number != NO_PASS:
            self.backward.abandon_if_dead()
        if isinstance(residence, Fixed):  # `bring` has gathered it, outside of the schedule
            return residence.acquire()
        if phase is Phase.FORWARD:
            if self.schedule.begins_pass(residence, phase) or with_grad is not self._with_grad:
                self.forget_gathered()
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
        residence.wait_for_updates()
        residence.prefetch(phase)
        full = residence.acquire()
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
        self.backward.abandon_if_dead()
        # Compiled code of whole models reads shards without asking for them.
        for residence in list(self.residences):
            residence.wait_for_updates()
        # A capture that follows cannot wait for events of work that was issued before it.
        self.transport.streams.join()
        self.forget_gathered()

    def fixed(self, residence: Residence) -> Residence:
        """The residence of the same values that stays where it is, for as long as it is held."""
        found = residence.fixed() if isinstance(residence, Gathered) else residence
        self.residences.add(found)
        return found

    def forget_gathered(self) -> None:
        """A pass is over: forget what was gathered, as shards may be written before the next."""
        self.schedule.restart()
        self._num_turns = 0
        for residence in self.residences:
            residence.forget()
