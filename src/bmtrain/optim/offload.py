"""AdamW with its state in host memory: the GPU holds weights and gradients only."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.kernels.adam import AdamSettings
from bmtrain.kernels.adam_compact import update_tensors
from bmtrain.kernels.blockwise import BLOCK
from bmtrain.optim.adam import AdamBase, Step
from bmtrain.optim.adam_state import AnyState, AnyTensors
from bmtrain.optim.runs import Run
from bmtrain.runtime import world
from bmtrain.runtime.arguments import known_keywords
from bmtrain.shard.layout import round_up

# Maximum number of elements per transfer. Launching a chunk costs the host half a millisecond, a
# tenth of a chunk's update at this length. The first download and the last upload, which nothing
# overlaps, take two milliseconds each.
CHUNK = 1 << 25


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a run whose gradient is being downloaded; without `staging` it stays in place."""

    tensors: AnyTensors
    master: torch.Tensor
    staging: Staging | None
    settings: AdamSettings


class Staging:
    """Buffers that one chunk passes through.

    Casts happen on the GPU, so that only fp32 crosses the bus and the CPU only updates.
    """

    def __init__(self, device: torch.device) -> None:
        self.host_grad = torch.empty(CHUNK, dtype=torch.float32, device="cpu", pin_memory=True)
        self.device_grad = torch.empty(CHUNK, dtype=torch.float32, device=device)
        self.device_weight = torch.empty(CHUNK, dtype=torch.float32, device=device)
        self.arrived = torch.cuda.Event()


class AdamOffloadOptimizer(AdamBase):
    """AdamW with master weights and moments in host memory, updated on the CPU.

    They are fp32 (fp64 for fp64 parameters). Within a step, chunks go through a pipeline: gradients
    are downloaded, the CPU updates, weights are uploaded. Same arithmetic as AdamOptimizer.

    Args:
        params, lr, betas, eps, weight_decay, hold_steps, maximize, scale*, moments: as
            AdamOptimizer.
        record_delta: after each step, `get_avg_delta()` and `get_var_delta()` return mean and
            variance of the change of all weights on all ranks (collective).
    """

    DEPTH = 4  # chunks in flight: two downloads, one update, one upload

    @known_keywords
    def __init__(  # noqa: PLR0913 (BMTrain's arguments)
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        maximize: bool = False,
        scale: float | None = None,
        scale_factor: float | None = None,
        scale_steps: int | None = None,
        moments: str = "fp32",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            hold_steps,
            maximize=maximize,
            scale=scale,
            scale_factor=scale_factor,
            scale_steps=scale_steps,
            moments=moments,
        )
        self._record_delta = record_delta
        # count, sum and sum of squares of the weight changes in the last step
        self._sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        self._pipeline: collections.deque[Chunk] = collections.deque()
        device = self._engine.device
        self._on_gpu = device.type != "cpu"
        self._stagings = itertools.cycle(
            [Staging(device) for _ in range(self.DEPTH)] if self._on_gpu else [None]
        )
        self._down = torch.cuda.Stream(device) if self._on_gpu else None
        self._up = torch.cuda.Stream(device) if self._on_gpu else None

    def get_avg_delta(self) -> float:
        """Mean change of a weight in the last step, over all ranks. Collective."""
        count, total, _ = self._global_sums()
        return total / max(count, 1.0)

    def get_var_delta(self) -> float:
        """Variance of the change of a weight in the last step, over all ranks. Collective."""
        count, total, squares = self._global_sums()
        return squares / max(count, 1.0) - (total / max(count, 1.0)) ** 2

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        """As AdamOptimizer.step; later work on the compute stream waits for the new weights."""
        self._sums.zero_()
        with _all_cores():
            return super().step(closure, scale)

    def _state_device(self) -> torch.device:
        return torch.device("cpu")

    def _make_state(self, run: Run, number: int) -> AnyState:
        state = super()._make_state(run, number)
        if self._on_gpu and state.master is not None:
            _pin(state, state.master)
        return state

    def _apply(self, steps: Sequence[Step], verdict: torch.Tensor | None) -> None:
        if self._down is not None:
            # After the closure and the reduction of deferred gradients. Without this wait, the
            # downloads could read gradients that are still being computed.
            self._down.wait_stream(torch.cuda.current_stream())
        for update, settings in steps:
            self._sums[0] += update.cohort.numel
            for tensors in (part for whole in update.tensors for part in _cut(whole)):
                master = _master_of(tensors)
                staging = next(self._stagings) if master.dtype == torch.float32 else None
                chunk = Chunk(tensors, master, staging, settings)
                self._fetch(chunk)
                self._pipeline.append(chunk)
                if len(self._pipeline) >= self.DEPTH - 1:
                    self._compute(self._pipeline.popleft())
        while self._pipeline:
            self._compute(self._pipeline.popleft())
        if self._up is not None:
            # Without this wait, the next forward pass could read weights that are still being
            # uploaded.
            torch.cuda.current_stream().wait_stream(self._up)

    def _fetch(self, chunk: Chunk) -> None:
        """Start downloading the gradient."""
        if chunk.staging is None:
            return
        grad = chunk.tensors.grad
        with torch.cuda.stream(self._down):
            exact = chunk.staging.device_grad[: grad.numel()]
            torch.mul(grad, 1.0 / chunk.settings.scale, out=exact)
            chunk.staging.host_grad[: grad.numel()].copy_(exact, non_blocking=True)
            # `_compute` waits for it before the step returns and the gradient may be freed.
            chunk.staging.arrived.record()

    def _compute(self, chunk: Chunk) -> None:
        """Wait for the gradient, update on the CPU, start uploading the weights."""
        t, master, staging = chunk.tensors, chunk.master, chunk.staging
        before = master.clone() if self._record_delta else None
        if staging is None:  # no pipeline: the state is on the rank's device, or in fp64
            here = (
                t
                if t.weight.device == master.device
                else t.beside(master, t.grad.to(master.device))
            )
            update_tensors([here], chunk.settings)
            if here is not t:
                t.weight.copy_(master)
        else:
            staging.arrived.synchronize()  # else the CPU would read a gradient still in flight
            here = t.beside(master, staging.host_grad[: t.grad.numel()])
            # the gradient was divided by `scale` on the GPU
            update_tensors([here], dataclasses.replace(chunk.settings, scale=1.0))
            with torch.cuda.stream(self._up):
                arriving = staging.device_weight[: t.weight.numel()]
                arriving.copy_(master, non_blocking=True)
                t.weight.copy_(arriving)
        if before is not None:
            delta = (master - before).double()
            self._sums[1:] += torch.stack([delta.sum(), delta.square().sum()])

    def _global_sums(self) -> tuple[float, float, float]:
        sums = self._sums.clone()
        collectives.all_reduce_(sums, "sum", world.current("record_delta").mesh.world)
        count, total, squares = sums.tolist()
        return count, total, squares


def _cut(whole: AnyTensors) -> Iterator[AnyTensors]:
    """Equal parts of at most CHUNK elements, of whole blocks of quantised moments."""
    numel = whole.weight.numel()
    length = -(-numel // max(1, -(-numel // CHUNK)))
    return iter(whole.parts(round_up(max(length, 1), BLOCK)))


def _master_of(tensors: AnyTensors) -> torch.Tensor:
    if tensors.master is None:
        raise ValueError("weights without masters cannot be updated on another device")
    return tensors.master


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Use this rank's share of the host's cores in the body.

    Launchers give every rank a single thread, enough to feed a GPU; here the CPU does the work.
    """
    current = world.current("AdamOffloadOptimizer")
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, world.num_cores() // current.local_size))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pin(state: AnyState, master: torch.Tensor) -> None:
    """Page-lock the master weights of a state in place.

    torch's own pinned allocations are rounded up to powers of two, which would waste up to half.
    """
    runtime = torch.cuda.cudart()
    address, size = master.data_ptr(), master.nbytes
    if size and int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(state, _unpin, address)


def _unpin(address: int) -> None:
    """Unregister pinned memory, after the uploads of the last step, which may still read it."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
