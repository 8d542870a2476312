"""AdamW whose state lives in host memory: the GPU keeps weights and gradients only."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.kernels.adam import AdamSettings, adamw_update
from bmtrain.optim.adam import AdamBase, RunState
from bmtrain.optim.runs import Run
from bmtrain.runtime import world

# Elements of one transfer. The fp32 working copy of a chunk stays in the processor's cache between its three passes, and
# the last chunk, whose way back nothing hides, is short.
CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a parameter run whose gradient is on its way to the host."""

    weight: torch.Tensor
    master: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    staging: Staging
    settings: AdamSettings


class Staging:
    """Pinned memory that one chunk passes through: its gradient down, its new weights up."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        pin = device.type != "cpu"
        self.grad = torch.empty(CHUNK, dtype=dtype, pin_memory=pin)
        self.weight = torch.empty(CHUNK, dtype=dtype, pin_memory=pin)
        self.arrived = torch.cuda.Event() if pin else None
        self.sent = torch.cuda.Event() if pin else None


class AdamOffloadOptimizer(AdamBase):
    """AdamW with fp32 weights and moments in host memory and the update on the CPU.

    Within a step, gradients come down, the CPU updates, and weights go up in a pipeline of chunks through pinned memory.
    Only those chunks are pinned: the state itself never crosses the bus. Same arithmetic and same
    arguments as AdamOptimizer. `record_delta` additionally measures the updates: after each step `get_avg_delta()` and
    `get_var_delta()` are mean and variance of the change of all weights on all ranks (collective).
    """

    DEPTH = 4  # chunks in the pipeline: one coming down, one on the CPU, one going up, one to spare

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
        hold_steps: int = 0, record_delta: bool = False, *, maximize: bool = False, scale: float | None = None,
        scale_factor: float = 2, scale_steps: int = 1024,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps, maximize, scale, scale_factor, scale_steps)
        self._record_delta = record_delta
        self._sums = torch.zeros(3, dtype=torch.float64)  # count, sum and sum of squares of the last step's changes
        self._pipeline: collections.deque[Chunk] = collections.deque()
        self._stagings: dict[torch.dtype, itertools.cycle[Staging]] = {}
        cuda = self._engine.device.type != "cpu"
        self._down = torch.cuda.Stream(self._engine.device) if cuda else None
        self._up = torch.cuda.Stream(self._engine.device) if cuda else None

    def get_avg_delta(self) -> float:
        """Mean change of a weight in the last step, over all ranks. Collective."""
        count, total, _ = self._global_sums()
        return total / max(count, 1.0)

    def get_var_delta(self) -> float:
        """Variance of the change of a weight in the last step, over all ranks. Collective."""
        count, total, squares = self._global_sums()
        return squares / max(count, 1.0) - (total / max(count, 1.0)) ** 2

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        """As AdamOptimizer.step; returns when the new weights are ordered before later work on the compute stream."""
        self._sums.zero_()
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream())  # gradients are computed there
        return super().step(closure, scale)

    def _state_device(self) -> torch.device:
        return torch.device("cpu")

    def _update(self, group: dict[str, Any], run: Run, state: RunState, piece: Run, grad: torch.Tensor, scale: float) -> None:
        settings = self._settings(group, piece, scale)
        base = piece.begin - run.begin
        weight = piece.values
        for start in range(0, piece.numel, CHUNK):
            stop = min(start + CHUNK, piece.numel)
            own = slice(base + start, base + stop)
            part = weight[start:stop]
            master = part if state.is_exact else state.master[own]
            chunk = Chunk(part, master, state.mean[own], state.square[own], self._staging(weight.dtype), settings)
            self._pipeline.append(chunk)
            self._fetch(chunk, grad[start:stop])
            if len(self._pipeline) >= self.DEPTH - 1:
                self._compute(self._pipeline.popleft())

    def _finish(self) -> None:
        while self._pipeline:
            self._compute(self._pipeline.popleft())
        if self._up is not None:
            torch.cuda.current_stream().wait_stream(self._up)
        if any(run.storage is not None for _, run, _ in self._runs):
            self._engine.transport.fence()

    def _staging(self, dtype: torch.dtype) -> Staging:
        if dtype not in self._stagings:
            self._stagings[dtype] = itertools.cycle([Staging(dtype, self._engine.device) for _ in range(self.DEPTH)])
        return next(self._stagings[dtype])

    def _fetch(self, chunk: Chunk, grad: torch.Tensor) -> None:
        """Start the gradient's way to the host."""
        room, staging = chunk.staging.grad[: grad.numel()], chunk.staging
        if self._down is None or staging.arrived is None:
            room.copy_(grad)
            return
        with torch.cuda.stream(self._down):
            room.copy_(grad, non_blocking=True)
            staging.arrived.record()

    def _compute(self, chunk: Chunk) -> None:
        """Wait for the gradient, update on the CPU, start the weights' way back."""
        staging, count = chunk.staging, chunk.weight.numel()
        if staging.arrived is not None and staging.sent is not None:
            staging.arrived.synchronize()
            staging.sent.synchronize()  # the last chunk that used this staging has left it
        before = chunk.master.clone() if self._record_delta else None
        if chunk.weight.device.type == "cpu":
            adamw_update(chunk.weight, staging.grad[:count], chunk.master, chunk.mean, chunk.square, chunk.settings)
        else:
            ready = staging.weight[:count]
            adamw_update(ready, staging.grad[:count], chunk.master, chunk.mean, chunk.square, chunk.settings)
            self._send(chunk, ready)
        if before is not None:
            delta = (chunk.master - before).double()
            self._sums += torch.stack([torch.tensor(float(count), dtype=torch.float64), delta.sum(), delta.square().sum()])

    def _send(self, chunk: Chunk, ready: torch.Tensor) -> None:
        if self._up is None or chunk.staging.sent is None:
            return
        with torch.cuda.stream(self._up):
            chunk.weight.copy_(ready, non_blocking=True)
            chunk.staging.sent.record()

    def _global_sums(self) -> tuple[float, float, float]:
        sums = self._sums.clone()
        collectives.all_reduce_(sums, "sum", world.current("record_delta").mesh.zero)
        count, total, squares = sums.tolist()
        return count, total, squares
