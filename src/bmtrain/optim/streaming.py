"""States in host memory, updated on the device: they come up in chunks, and go down again."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from bmtrain.errors import ParameterError
from bmtrain.kernels.adam import AdamSettings, AdamTensors, update_tensors
from bmtrain.kernels.blockwise import BLOCK
from bmtrain.optim.adam_state import UpdatePart
from bmtrain.runtime.world import World
from bmtrain.shard.engine import alias
from bmtrain.shard.layout import round_up

# Bytes of a chunk of states: enough that a copy takes far longer than its launch.
LOAD_BYTES = 1 << 27
# Chunks on the device: one comes up, one is updated, one goes down.
NUM_SLOTS = 3
# Of tensors in a slot, in bytes: the kernels' widest loads and stores.
ALIGNMENT = 256


class PendingUpdate:
    """The update of adjacent parameters, in host memory or on the device.

    A storage waits for it before its shard is read (`Storage.expect`).

    Args:
        streamer: that runs it, if its state is in host memory.
        part: what it updates. The gradient must not be written before `finish`.
        settings: of it.
        records: whether `deltas` are wanted.

    Attributes:
        tensors, verdict: what it reads and writes; None when the program's stream has waited.
            Before, the memory of the gradient and of the verdict would be given to later work.
        is_issued: whether all chunks of it are; False for ever if the step was broken off.
        failure: what has ended it.
        done: the event after the last chunk of it.
        deltas: of each chunk, sum and sum of squares of the changes of the weights, (2,) fp64.
    """

    def __init__(
        self, streamer: StateStreamer, part: UpdatePart, settings: AdamSettings, *, records: bool
    ) -> None:
        self._streamer, self.settings, self.records = streamer, settings, records
        self.span, self.piece = part.span, part.piece
        self.tensors: AdamTensors | None = part.tensors
        self.verdict: torch.Tensor | None = None
        self.is_issued = False
        self.failure: BaseException | None = None
        self.done: torch.Event | None = None
        self.deltas: list[torch.Tensor] = []

    def count_write(self) -> None:
        """Count the write now: versions do not depend on when the values come."""
        if self.tensors is not None:
            weight = self.tensors.weight
            self.tensors = self.tensors.with_weight(alias(weight), self.tensors.grad)
            if not weight.is_inference():
                torch.autograd.graph.increment_version(weight)

    def finish(self) -> None:
        """Later work on the current stream finds the weights. May be called again.

        Raises:
            ParameterError: if the step has been broken off, at every call.
        """
        if not self.is_issued:
            cause = "" if self.failure is None else f" by {type(self.failure).__name__}"
            raise ParameterError(
                f"an update of the AdamOffloadOptimizer was aborted{cause}: weights and states "
                "are partly from before the step and partly from after it, and unusable. Resume "
                "from a checkpoint."
            ) from self.failure
        self._streamer.wait_for(self.done)
        self.tensors = self.verdict = None


class ChunkPart(NamedTuple):
    """A part of an update, and whether it is its last one."""

    update: PendingUpdate
    tensors: AdamTensors
    is_last: bool


Chunk = list[ChunkPart]


class StateStreamer:
    """The way of states between host memory and the device; one per run.

    On a GPU three streams do it beside the program. On a CPU states are updated where they lie, in
    the step.
    """

    def __init__(self, world: World) -> None:
        self._device = world.device
        #: whether it goes on while the program computes
        self.is_beside = world.device.type != "cpu"
        self.chunk_bytes = LOAD_BYTES
        self._slots: list[Slot] = []
        if self.is_beside:
            self._up, self._down = (torch.cuda.Stream(world.device) for _ in range(2))
            # Before the program's kernels: what comes up and goes down waits for the small ones.
            self._update = torch.cuda.Stream(world.device, priority=-1)

    def make_slots(self) -> None:
        """Allocate what chunks need, if that is not there yet; before the first of them."""
        if self.is_beside and not self._slots:
            self._slots = [Slot(self.chunk_bytes, self._device) for _ in range(NUM_SLOTS)]

    @torch.no_grad()
    def update(
        self,
        here: Sequence[PendingUpdate],
        away: Sequence[PendingUpdate],
        verdict: torch.Tensor | None,
    ) -> None:
        """Issue the updates of a step; none is made if `verdict` is not finite.

        Args:
            here: whose states are on the device; together, on the current stream.
            away: whose states are in host memory; in this order.

        Raises:
            BaseException: what ends it, an interrupt for example; every update of which a chunk has
                not been issued then raises whenever it is waited for.
        """
        # The same slots for the same chunks at each step, so that tables of addresses are known.
        slots = itertools.cycle(self._slots)
        try:
            chunk = [ChunkPart(x, x.tensors, True) for x in here if x.tensors is not None]
            compute(chunk, verdict)
            for update in here:
                update.is_issued, update.tensors = True, None
            for update in away:
                update.verdict = verdict
            if self._slots:
                # The memory of new slots may be in use by earlier work; and states of the step
                # before must be down before they are read.
                self._up.wait_stream(torch.cuda.current_stream())
                self._up.wait_stream(self._down)
            for chunk in chunks_of(away, self.chunk_bytes):
                done = self.run(chunk, verdict, next(slots, None))
                for part in chunk:
                    part.update.done, part.update.is_issued = done, part.is_last
            for update in away:  # those without elements too
                update.is_issued = True
        except BaseException as error:
            for update in (*here, *away):
                update.failure = error
            raise

    def run(
        self, chunk: Chunk, verdict: torch.Tensor | None, slot: Slot | None
    ) -> torch.Event | None:
        """Update a chunk; the event after which its weights are there."""
        if slot is None:
            compute(chunk, verdict)
            return None
        slot.write_back()
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def take(state: torch.Tensor) -> torch.Tensor:
            locked, staged = slot.take(state)
            staged.copy_(locked, non_blocking=True)
            copies.append((locked, staged))
            return staged

        with torch.cuda.stream(self._up):
            if slot.free is not None:
                self._up.wait_event(slot.free)  # else this chunk would overwrite one going down
            chunk = [part._replace(tensors=part.tensors.placed(take)) for part in chunk]
        self._update.wait_stream(self._up)
        # Without it, updates would read gradients that are being computed and write weights that
        # are being read.
        self._update.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._update):
            compute(chunk, verdict)
            done = self._update.record_event()
        self._down.wait_event(done)
        with torch.cuda.stream(self._down):
            for locked, staged in copies:
                locked.copy_(staged, non_blocking=True)
            slot.free = self._down.record_event()
        return done

    def wait_for(self, done: torch.Event | None) -> None:
        """Later work on the current stream finds the weights of a chunk."""
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def wait(self) -> None:
        """Return when nothing copies from or to the states in host memory any more."""
        if self._slots:
            self._down.synchronize()
            for slot in self._slots:
                slot.write_back()


class Slot:
    """Device memory for the states of one chunk, and host memory for those that lie in files.

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

    def write_back(self) -> None:
        """Write what belongs into files: their pages, and what has come down for them. Then there
        is place for another chunk.
        """
        if self._written and self.free is not None:
            self.free.synchronize()  # else the host would read what is still on its way down
        for state, locked in self._written:
            state.copy_(locked)
        self._written, self._used = [], 0

    def take(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page-locked memory that holds a contiguous state, and device memory for it.

        That is the state itself, unless it lies in a file, whose pages no device copies by itself:
        then all threads of the host fetch it.
        """
        own = slice(self._used, self._used + state.nbytes)
        self._used += round_up(state.nbytes, ALIGNMENT)
        locked = state
        if not state.is_pinned():
            if self._locked is None:
                numel = self._memory.numel()
                self._locked = host_zeros(numel, torch.uint8, self._memory.device)
            locked = self._locked[own].view(state.dtype).copy_(state)
            self._written.append((state, locked))
        return locked, self._memory[own].view(state.dtype)


def chunks_of(updates: Sequence[PendingUpdate], num_bytes: int) -> Iterator[Chunk]:
    """Cut updates, in their order, into chunks whose states take at most so many bytes."""
    chunk, room = Chunk(), num_bytes
    for update in updates:
        whole = update.tensors
        if whole is None:
            continue  # it is over
        begin, numel = 0, whole.grad.numel()
        while begin < numel:
            # as many whole blocks as there is room for
            block = sum(-(-x.nbytes * BLOCK // numel) for x in whole.state)
            length = max(0, room - len(whole.state) * ALIGNMENT) // max(block, 1) * BLOCK
            if length == 0 and chunk:
                yield chunk
                chunk, room = Chunk(), num_bytes
                continue
            end = min(begin + max(length, BLOCK), numel)
            tensors = whole if end - begin == numel else whole.part(begin, end)
            chunk.append(ChunkPart(update, tensors, end == numel))
            room -= sum(round_up(x.nbytes, ALIGNMENT) for x in tensors.state)
            begin = end
    if chunk:
        yield chunk


def compute(chunk: Chunk, verdict: torch.Tensor | None) -> None:
    """Update a chunk with few kernels.

    What is recorded are changes of the weights in as many bits as there are in one tensor.
    """
    watched, by_settings = [], dict[AdamSettings, list[AdamTensors]]()
    for update, own, _ in chunk:
        by_settings.setdefault(update.settings, []).append(own)
        if update.records:
            master = own.master
            values = own.weight if master is None or not master.is_floating_point() else master
            watched.append((update, values, values.clone()))
    for settings, members in by_settings.items():
        update_tensors(members, settings, verdict)
    for update, values, before in watched:
        change = (values - before).double()
        update.deltas.append(torch.stack([change.sum(), change.square().sum()]))


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros (numel,) in memory that `device` copies into and from, page-locked if it is a GPU.

    torch's own pinned allocations are rounded up to powers of two, which would waste up to half.
    """
    if device.type == "cpu" or numel == 0:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    # Pages of its own: one that two buffers share could be locked for the first of them only.
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
        pages.madvise(mmap.MADV_HUGEPAGE)
    # Written before they are locked: the driver would fetch page after page, at 2.6 GB/s.
    buffer = torch.frombuffer(pages, dtype=dtype).zero_()
    address = buffer.data_ptr()

    def unpin() -> None:
        torch.cuda.synchronize()  # the copies of the last step may still use it
        torch.cuda.cudart().cudaHostUnregister(address)

    if int(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, 0)) == 0:
        weakref.finalize(buffer, unpin)
    return buffer


def file_zeros(numel: int, dtype: torch.dtype, folder: str) -> torch.Tensor:
    """Zeros (numel,) in a file without a name, which goes with the process.

    Raises:
        OSError: if the folder cannot be written to, or has no room.
    """
    if numel == 0:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    with tempfile.TemporaryFile(dir=folder) as file:
        # All of it now: of a disk that is full later, a write to the pages would know by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
        pages = mmap.mmap(file.fileno(), numel * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype)
