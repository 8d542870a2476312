"""Updates on the CPU beside the program: gradients go down, the CPU updates, weights come up."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterator

import torch

from bmtrain.kernels.adam import AdamSettings
from bmtrain.kernels.adam_compact import update_tensors
from bmtrain.kernels.blockwise import BLOCK
from bmtrain.optim.adam_state import AnyTensors
from bmtrain.optim.worker import Job, Worker
from bmtrain.shard.layout import round_up
from bmtrain.shard.residence import alias

# Number of elements that the CPU updates at a time: few enough for its caches, so that the fp32
# gradients, which are made of 16-bit ones, and the weights, which are rounded, cost no trip to
# memory; enough for the threads that share them.
CHUNK = 1 << 21


class Bus:
    """Copies between a device and host memory, both ways at once. On a CPU plain copies."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type != "cpu"
        self._down = torch.cuda.Stream(device) if is_gpu else None
        self._up = torch.cuda.Stream(device) if is_gpu else None

    def begin(self) -> None:
        """Gradients are final, and weights may be written, after what has been issued so far."""
        if self._down is not None and self._up is not None:
            # Without these waits, downloads could read gradients that are still being computed, and
            # uploads write weights that are still being read.
            self._down.wait_stream(torch.cuda.current_stream())
            self._up.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        """The gradients are the program's again: later work may write or free them."""
        if self._down is not None:
            torch.cuda.current_stream().wait_stream(self._down)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Copy into host memory; the event after it."""
        return _copy(target, source, self._down)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Copy to the device; the event after it."""
        return _copy(target, source, self._up)


def _copy(
    target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None
) -> torch.Event | None:
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return None if stream is None else stream.record_event()


def host_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory (numel,) that a device copies into and from, page-locked if it is a GPU.

    torch's own pinned allocations are rounded up to powers of two, which would waste up to half.
    """
    buffer = torch.empty(numel, dtype=dtype, device="cpu")
    if device.type != "cpu" and buffer.nbytes:
        runtime = torch.cuda.cudart()
        address = buffer.data_ptr()
        if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) == 0:
            weakref.finalize(buffer, _unpin, address)
    return buffer


def _unpin(address: int) -> None:
    """Unregister pinned memory, after the copies of the last step, which may still use it."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


class Series:
    """The updates of one step, in the order in which they are computed.

    Args:
        bus: begun.
        worker: computes them.
    """

    def __init__(self, bus: Bus, worker: Worker) -> None:
        self.bus, self.worker = bus, worker
        self.updates: list[HostUpdate] = []
        self._num_uploaded = 0

    def begin(
        self, tensors: AnyTensors, settings: AdamSettings, buffer: torch.Tensor, *, records: bool
    ) -> HostUpdate:
        """Start another update; see `HostUpdate`."""
        self.updates.append(HostUpdate(self, tensors, settings, buffer, records=records))
        self.worker.submit(self.updates[-1].job)
        return self.updates[-1]

    def upload_computed(self) -> None:
        """Send up what is computed, beside the program's kernels, before it is asked for."""
        rest = itertools.islice(self.updates, self._num_uploaded, None)
        for update in itertools.takewhile(_is_computed, rest):
            update.upload()
            self._num_uploaded += 1


class HostUpdate:
    """One update of adjacent parameters whose state is in host memory.

    Args:
        series: of the step.
        tensors: what it reads and writes. The weights are not touched before `upload`. The gradient
            must live until `Bus.end`.
        settings: of the step.
        buffer: (n,) host memory in the dtype of the weights, of this update alone: gradients go
            down into it, weights up from it.
        records: whether `delta` is wanted.
    """

    def __init__(
        self,
        series: Series,
        tensors: AnyTensors,
        settings: AdamSettings,
        buffer: torch.Tensor,
        *,
        records: bool,
    ) -> None:
        if tensors.master is None:
            raise ValueError("weights without masters cannot be updated on another device")
        self._series, self._settings, self._buffer = series, settings, buffer
        self._records, self._is_own_master = records, tensors.is_exact
        # With a version of its own: the write was counted when the step was taken.
        self._weight: torch.Tensor | None = alias(tensors.weight)
        self._uploaded: torch.Event | None = None
        #: sum and sum of squares of the changes of the weights, once it is computed
        self.delta = torch.zeros(2, dtype=torch.float64, device="cpu")
        grads = (
            buffer
            if tensors.grad.dtype == buffer.dtype
            else torch.empty_like(tensors.grad, device="cpu")
        )
        self._arrived = series.bus.download(grads, tensors.grad)
        here = tensors.beside(tensors.master, grads)
        self.job = Job(lambda: self._compute(here))

    @torch.no_grad()
    def _compute(self, tensors: AnyTensors) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()  # else the CPU would read a gradient still in flight
        length, begin = round_up(CHUNK, BLOCK), 0
        parts: Iterator[AnyTensors] = tensors.parts(length)
        for part in parts:
            self._update(part, self._buffer[begin : begin + length])
            begin += length

    def _update(self, part: AnyTensors, target: torch.Tensor) -> None:
        """Update a chunk; `target` gets the weights."""
        # Weights in use are not written here: the program may be reading them.
        master = part.weight.clone() if self._is_own_master else part.weight
        before = master.clone() if self._records else None
        grad = part.grad
        if grad.dtype != master.dtype:
            grad = self._series.worker.scratch(grad.numel(), master.dtype).copy_(grad)
        if self._settings.scale != 1.0:
            grad.div_(self._settings.scale)
        settings = dataclasses.replace(self._settings, scale=1.0)
        update_tensors([part.beside(master, grad)], settings)
        target.copy_(master)
        if before is not None:
            self.delta += sums_of_change(master, before)

    def finish(self) -> None:
        """Wait for the weights and write them; later work on the current stream finds them.

        May be called again.

        Raises:
            BaseException: what the worker has met, at every call.
        """
        self._series.worker.wait(self.job)
        self.upload()
        self._series.upload_computed()
        if self._uploaded is not None:
            torch.cuda.current_stream().wait_event(self._uploaded)

    @torch.no_grad()
    def upload(self) -> None:
        """Send up the weights, which are computed, unless that has been done."""
        weight, self._weight = self._weight, None
        if weight is not None:
            self._uploaded = self._series.bus.upload(weight, self._buffer)


def _is_computed(update: HostUpdate) -> bool:
    """Whether the weights are in host memory. Ranks may differ in it."""
    return update.job.done.done() and update.job.done.exception() is None


def sums_of_change(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares of the changes: (2,) fp64."""
    change = (after - before).double()
    return torch.stack([change.sum(), change.square().sum()])
