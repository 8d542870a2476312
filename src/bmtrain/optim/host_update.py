"""Updates on the CPU beside the program: gradients go down, the CPU updates, weights come up."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import torch

from bmtrain.kernels.adam import AdamSettings
from bmtrain.kernels.adam_compact import update_tensors
from bmtrain.optim.adam_state import AnyTensors
from bmtrain.optim.worker import Job, Worker
from bmtrain.shard.residence import alias

# Elements that the CPU updates at a time, a multiple of the blocks of 8-bit moments: few enough for
# its last cache, so that the fp32 gradients, which are made of 16-bit ones, cost no trip to memory;
# enough for the threads that share them, which start and meet at each operator.
CHUNK = 1 << 22
# Elements of which the device holds the fp32 values before it rounds them.
STAGED = 1 << 24


class Bus:
    """Copies between a device and host memory, both ways at once. On a CPU plain copies."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type != "cpu"
        self._down = torch.cuda.Stream(device) if is_gpu else None
        self._up = torch.cuda.Stream(device) if is_gpu else None
        self._staging: dict[torch.dtype, torch.Tensor] = {}

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
        with _on(self._down):
            target.copy_(source, non_blocking=True)
            return None if self._down is None else self._down.record_event()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Copy to the device, which rounds to the dtype of `target`; the event after it."""
        with _on(self._up):
            if self._up is None or source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
            else:
                # Else torch would round on the host, and block it.
                for begin in range(0, target.numel(), STAGED):
                    part = target[begin : begin + STAGED]
                    staged = self._staged(part, source.dtype)
                    staged.copy_(source[begin : begin + STAGED], non_blocking=True)
                    part.copy_(staged)
            return None if self._up is None else self._up.record_event()

    def wait(self) -> None:
        """Return when nothing copies up from host memory any more: it may be written."""
        if self._up is not None:
            self._up.synchronize()

    def _staged(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory like `part` of another dtype; the same at each call, as uploads are in order."""
        if dtype not in self._staging:
            with torch.inference_mode(False):  # it outlives an evaluation that needs it first
                self._staging[dtype] = torch.empty(STAGED, dtype=dtype, device=part.device)
        return self._staging[dtype][: part.numel()]


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


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
        self, tensors: AnyTensors, settings: AdamSettings, grad: torch.Tensor, *, records: bool
    ) -> HostUpdate:
        """Start another update; see `HostUpdate`."""
        self.updates.append(HostUpdate(self, tensors, settings, grad, records=records))
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
        tensors: what it reads and writes. The weights are not touched before `upload`, which sends
            the masters up. The gradient must live until `Bus.end`.
        settings: of the step.
        grad: (n,) host memory that the gradient goes down into, in its dtype, of this update alone.
        records: whether `delta` is wanted.
    """

    def __init__(
        self,
        series: Series,
        tensors: AnyTensors,
        settings: AdamSettings,
        grad: torch.Tensor,
        *,
        records: bool,
    ) -> None:
        if tensors.master is None:
            raise ValueError("weights without masters cannot be updated on another device")
        self._series, self._records = series, records
        self._scale, self._settings = settings.scale, dataclasses.replace(settings, scale=1.0)
        # Weights that are their own masters may be in use: the program may be reading them.
        values = tensors.weight.clone() if tensors.is_exact else tensors.master
        # Weights with a version of their own, as the write was counted when the step was taken, and
        # what they become; until that has been sent up.
        self._both: tuple[torch.Tensor, torch.Tensor] | None = alias(tensors.weight), values
        self._uploaded: torch.Event | None = None
        #: sum and sum of squares of the changes of the weights, once it is computed
        self.delta = torch.zeros(2, dtype=torch.float64, device="cpu")
        self._arrived = series.bus.download(grad, tensors.grad)
        here = tensors.beside(values, grad)
        self.job = Job(lambda: self._compute(here))

    @torch.no_grad()
    def _compute(self, tensors: AnyTensors) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()  # else the CPU would read a gradient still in flight
        parts: Iterator[AnyTensors] = tensors.parts(CHUNK)
        for part in parts:
            self._update(part)

    def _update(self, part: AnyTensors) -> None:
        """Update a chunk, whose gradient may be written: it is a copy."""
        master, grad = part.weight, part.grad
        before = master.clone() if self._records else None
        if grad.dtype != master.dtype:
            grad = self._series.worker.scratch(grad.numel(), master.dtype).copy_(grad)
        if self._scale != 1.0:
            grad.div_(self._scale)
        update_tensors([part.beside(master, grad)], self._settings)
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
        both, self._both = self._both, None
        if both is not None:
            self._uploaded = self._series.bus.upload(*both)


def _is_computed(update: HostUpdate) -> bool:
    """Whether the weights are in host memory. Ranks may differ in it."""
    return update.job.done.done() and update.job.done.exception() is None


def sums_of_change(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares of the changes: (2,) fp64."""
    change = (after - before).double()
    return torch.stack([change.sum(), change.square().sum()])
