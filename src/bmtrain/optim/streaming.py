"""States in host memory, updated on the device: they come up in loads, and go down again."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from bmtrain.errors import ParameterError
from bmtrain.kernels.adam import AdamSettings
from bmtrain.kernels.adam_compact import update_tensors
from bmtrain.kernels.blockwise import BLOCK
from bmtrain.optim.adam_state import AnyTensors
from bmtrain.optim.host_memory import host_zeros
from bmtrain.runtime.world import World
from bmtrain.shard.residence import alias

# Bytes of states that are updated at a time: enough that a copy takes far longer than its launch.
LOAD_BYTES = 1 << 27
# Loads on the device: one comes up, one is updated, one goes down.
NUM_SLOTS = 3
# Of tensors in a slot, in bytes: the kernels' widest loads and stores.
ALIGNMENT = 256


class Slot:
    """Device memory for the states of one load, and host memory for those that lie in files.

    Attributes:
        free: after the last copy out of it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # it outlives an evaluation that needs it first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._locked: torch.Tensor | None = None
        self._used = 0
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.free: torch.Event | None = None

    def settle(self) -> None:
        """Write what belongs into files: their pages, and what has come down for them."""
        if self._written and self.free is not None:
            self.free.synchronize()  # else the host would read what is still on its way down
        for state, locked in self._written:
            state.copy_(locked)
        self._written = []

    def clear(self) -> None:
        """Make place for another load."""
        self.settle()
        self._used = 0

    def take(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page-locked memory that holds a contiguous state, and device memory for it.

        That is the state itself, unless it lies in a file, whose pages no device copies by itself:
        then all threads of the host fetch it.
        """
        own = slice(self._used, self._used + state.nbytes)
        self._used += padded(state.nbytes)
        locked = state
        if not state.is_pinned():
            if self._locked is None:
                numel = self._memory.numel()
                self._locked = host_zeros(numel, torch.uint8, self._memory.device)
            locked = self._locked[own].view(state.dtype).copy_(state)
            self._written.append((state, locked))
        return locked, self._memory[own].view(state.dtype)


class Passage:
    """The way of states between host memory and the device; one per run.

    On a GPU three streams do it beside the program. On a CPU states are updated where they lie.
    """

    def __init__(self, world: World) -> None:
        self._device = world.device
        #: whether it goes on while the program computes
        self.is_beside = world.device.type != "cpu"
        self.load_bytes = LOAD_BYTES
        self._slots: list[Slot] = []
        self._turns: Iterator[Slot] = iter(())
        if self.is_beside:
            self._up, self._down = (torch.cuda.Stream(world.device) for _ in range(2))
            # Before the program's kernels: what comes up and goes down waits for the small ones.
            self._update = torch.cuda.Stream(world.device, priority=-1)

    def make_slots(self) -> None:
        """Allocate what loads need, if that is not there yet; before the first of them."""
        if self.is_beside and not self._slots:
            self._slots = [Slot(self.load_bytes, self._device) for _ in range(NUM_SLOTS)]

    def begin(self) -> None:
        """Begin a step."""
        if not self.is_beside:
            return
        # The same slots for the same loads at each step, so that tables of addresses are known.
        self._turns = itertools.cycle(self._slots)
        # The memory of new slots may be in use by earlier work; and states of the step before must
        # be down before they are read.
        self._up.wait_stream(torch.cuda.current_stream())
        self._up.wait_stream(self._down)

    @torch.no_grad()
    def run(self, load: Load, verdict: torch.Tensor | None) -> torch.Event | None:
        """Update the members of a load; the event after which their weights are there."""
        if not self.is_beside:
            _compute(load, [member.tensors for member in load], verdict)
            return None
        slot = next(self._turns)
        slot.clear()
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def take(state: torch.Tensor) -> torch.Tensor:
            locked, staged = slot.take(state)
            staged.copy_(locked, non_blocking=True)
            copies.append((locked, staged))
            return staged

        with torch.cuda.stream(self._up):
            if slot.free is not None:
                self._up.wait_event(slot.free)  # else this load would overwrite one on its way down
            here = [member.tensors.placed(take) for member in load]
        self._update.wait_stream(self._up)
        # Without it, updates would read gradients that are being computed and write weights that
        # are being read.
        self._update.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._update):
            _compute(load, here, verdict)
            done = self._update.record_event()
        self._down.wait_event(done)
        with torch.cuda.stream(self._down):
            for locked, staged in copies:
                locked.copy_(staged, non_blocking=True)
            slot.free = self._down.record_event()
        return done

    def wait(self) -> None:
        """Return when nothing copies from or to the states in host memory any more."""
        if self.is_beside:
            self._down.synchronize()
            for slot in self._slots:
                slot.settle()


class Member(NamedTuple):
    """A part of an update."""

    tensors: AnyTensors
    settings: AdamSettings
    update: StreamedUpdate


Load = list[Member]


class Series:
    """The updates of one step, in the order in which they are computed.

    On a GPU a load begins as soon as it is full; on a CPU when it is waited for.

    Args:
        passage: that they take.
        verdict: 0-dim fp64 on the device; if it is NaN or infinite, nothing is updated.
    """

    def __init__(self, passage: Passage, verdict: torch.Tensor | None) -> None:
        self._passage, self._verdict = passage, verdict
        self._open: Load = []
        self._room = passage.load_bytes
        self._loads: collections.deque[Load] = collections.deque()  # full, not begun
        self._is_broken = False
        self._failure: BaseException | None = None
        passage.begin()

    def add(self, update: StreamedUpdate, tensors: AnyTensors, settings: AdamSettings) -> None:
        """Compute an update of this series, behind those that were added before.

        The gradient must not be written before `finish` of the update.
        """
        # With a version of its own: the write was counted when the step was taken.
        own = tensors.with_weight(alias(tensors.weight), tensors.grad)
        update.grad = own.grad
        begin, numel = 0, own.grad.numel()
        while begin < numel:
            length = fitting(own, self._room)
            if length == 0 and self._open:
                self.close()
                continue
            end = min(begin + max(length, BLOCK), numel)
            part = own if end - begin == numel else own.part(begin, end)
            self._open.append(Member(part, settings, update))
            self._room -= size_of(part)
            update.num_left += 1
            begin = end
        update.num_left -= 1

    def close(self) -> None:
        """What has been added last may begin."""
        if self._open:
            self._loads.append(self._open)
            self._open, self._room = [], self._passage.load_bytes
        while self._loads and self._passage.is_beside:
            self.run_next()

    def run_next(self) -> None:
        """Update the next load.

        Raises:
            BaseException: what ends it, an interrupt for example.
            ParameterError: at every later call.
        """
        if self._is_broken or not self._loads:  # the step has not come to its end
            cause = "" if self._failure is None else f" by {type(self._failure).__name__}"
            raise ParameterError(
                f"an update of the AdamOffloadOptimizer was broken off{cause}: weights and states "
                "are partly those before the step and partly those after it, and cannot be used "
                "any more. Start anew from a checkpoint."
            ) from self._failure
        try:
            self._is_broken = True  # until all is done: an interrupt can come anywhere
            load = self._loads[0]
            done = self._passage.run(load, self._verdict)
            self._loads.popleft()
            for member in load:
                member.update.num_left -= 1
                member.update.done = done
        except BaseException as error:
            self._failure = error
            raise
        self._is_broken = False


class StreamedUpdate:
    """The update of adjacent parameters whose state is in host memory.

    Args:
        series: of the step, which it is to be added to.
        records: whether `deltas` are wanted.

    Attributes:
        grad: what it reads, until the program's stream has waited: else its memory would be given
            to later work.
        num_left: parts of it that are not issued yet; all of it is one until it is added.
        done: after the last part that is.
        deltas: of each part, sum and sum of squares of the changes of the weights, (2,) fp64.
    """

    def __init__(self, series: Series, *, records: bool) -> None:
        self._series = series
        self.grad: torch.Tensor | None = None
        self.records = records
        self.num_left = 1
        self.done: torch.Event | None = None
        self.deltas: list[torch.Tensor] = []

    def finish(self) -> None:
        """Later work on the current stream finds the weights. May be called again.

        Raises:
            BaseException: what ends an update.
            ParameterError: if one has been broken off, at every call.
        """
        while self.num_left:
            self._series.run_next()
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.grad = None


def _compute(load: Load, tensors: list[AnyTensors], verdict: torch.Tensor | None) -> None:
    """Update a load whose states are here."""
    settings = [member.settings for member in load]
    deltas = update_together(tensors, settings, verdict, records=load[0].update.records)
    for member, delta in zip(load, deltas, strict=False):  # no deltas, or one for each
        member.update.deltas.append(delta)


def update_together(
    tensors: Sequence[AnyTensors],
    settings: Sequence[AdamSettings],
    verdict: torch.Tensor | None,
    *,
    records: bool,
) -> list[torch.Tensor]:
    """Update each with its settings, with few kernels; `sums_of_change` of each, if wanted."""
    watched = tensors if records else []
    before = [values_of(one).clone() for one in watched]
    by_settings: dict[AdamSettings, list[AnyTensors]] = {}
    for one, own in zip(tensors, settings, strict=True):
        by_settings.setdefault(own, []).append(one)
    for own, members in by_settings.items():
        update_tensors(members, own, verdict)
    return list(map(sums_of_change, map(values_of, watched), before))


def values_of(tensors: AnyTensors) -> torch.Tensor:
    """The weights in as many bits as there are in one tensor."""
    master = tensors.master
    return master if master is not None and master.is_floating_point() else tensors.weight


def sums_of_change(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares of the changes: (2,) fp64."""
    change = (after - before).double()
    return torch.stack([change.sum(), change.square().sum()])


def padded(num_bytes: int) -> int:
    """Bytes that a tensor takes in a slot."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def size_of(tensors: AnyTensors) -> int:
    """Bytes that the state of an update takes in a slot."""
    return sum(padded(x.nbytes) for x in tensors.state)


def fitting(tensors: AnyTensors, room: int) -> int:
    """Elements, whole blocks of them, whose state fits into so many bytes."""
    state, numel = tensors.state, tensors.grad.numel()
    block = sum(-(-x.nbytes * BLOCK // numel) for x in state)
    return max(0, room - len(state) * ALIGNMENT) // max(block, 1) * BLOCK
