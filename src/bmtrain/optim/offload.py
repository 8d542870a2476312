"""AdamW with its state in host memory: the GPU holds weights and gradients only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.kernels.adam import AdamSettings
from bmtrain.optim.adam import AdamBase, Step
from bmtrain.optim.adam_state import AdamLayout, AnyTensors
from bmtrain.optim.host_update import Bus, HostUpdate, Series, host_buffer
from bmtrain.optim.runs import Run
from bmtrain.optim.worker import Worker
from bmtrain.runtime import world
from bmtrain.runtime.arguments import FLAG, check, known_keywords
from bmtrain.shard.storage import Storage


class AdamOffloadOptimizer(AdamBase):
    """AdamW with master weights and moments in host memory, updated on the CPU.

    They are fp32 (fp64 for fp64 parameters). A step sends the gradients down and returns. A thread
    updates block by block, in the order of the next forward pass, which waits for each block when
    it comes to it; so does everything else that reads or writes weights or states. The values do
    not depend on it. Same arithmetic as AdamOptimizer.

    Args:
        params, lr, betas, eps, weight_decay, hold_steps, maximize, scale*, moments: as
            AdamOptimizer.
        record_delta: after each step, `get_avg_delta()` and `get_var_delta()` return mean and
            variance of the change of all weights on all ranks (collective).
        overlap: whether `step` returns before the update is done. Parameters that are not sharded,
            and those of which the program holds memory (`param.local`), are updated before.
    """

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
        overlap: bool = True,
    ) -> None:
        check(type(self).__name__, overlap=(overlap, FLAG))
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
        self._record_delta, self._overlap = record_delta, overlap
        self._updates: list[HostUpdate] = []  # of the last step
        self._numel = 0  # of the parameters in the last step
        # by id of the run: what its gradients and weights pass through
        self._buffers: dict[int, torch.Tensor] = {}
        self._held: set[int] = set()  # owners that cannot be updated later
        self._bus = Bus(self._engine.device)

    def get_avg_delta(self) -> float:
        """Mean change of a weight in the last step, over all ranks. Collective."""
        count, total, _ = self._global_sums()
        return total / max(count, 1.0)

    def get_var_delta(self) -> float:
        """Variance of the change of a weight in the last step, over all ranks. Collective."""
        count, total, squares = self._global_sums()
        return squares / max(count, 1.0) - (total / max(count, 1.0)) ** 2

    def settle(self) -> None:
        for update in self._updates:
            update.finish()

    def _state_device(self) -> torch.device:
        return torch.device("cpu")

    def _new_layout(self) -> AdamLayout:
        self._buffers = {}
        return super()._new_layout()

    def _prepare(self, layout: AdamLayout) -> None:
        self._held = layout.held_owners()

    def _apply(self, steps: Sequence[Step], verdict: torch.Tensor | None) -> None:
        self._numel = sum(update.cohort.numel for update, _ in steps)
        found = [
            Item(run, piece, tensors, settings)
            for update, settings in steps
            for (run, piece), tensors in zip(update.places, update.tensors, strict=True)
        ]
        found.sort(key=self._order)
        self._bus.begin()
        series = Series(self._bus, world.current(type(self).__name__).service(Worker))
        for item in found:
            _count_write(item.tensors.weight)
            if item.tensors.weight.numel():
                self._begin(item, series)
        # Gradients may be written and freed from here on; `steps` has kept them until now.
        self._bus.end()
        self._updates = series.updates
        if self._overlap:
            self._announce(found)
        else:
            self.settle()

    def _order(self, item: Item) -> tuple[bool, int]:
        """What cannot be done later first; the rest as the next forward pass needs it."""
        storage = item.piece.storage
        return self._can_wait(item), 0 if storage is None else storage.residence.turn

    def _can_wait(self, item: Item) -> bool:
        return item.piece.storage is not None and item.piece.owner not in self._held

    def _begin(self, item: Item, series: Series) -> None:
        if id(item.run) not in self._buffers:
            dtype, device = item.tensors.weight.dtype, self._engine.device
            self._buffers[id(item.run)] = host_buffer(item.run.numel, dtype, device)
        buffer = item.run.cut(self._buffers[id(item.run)], item.piece)
        item.update = series.begin(item.tensors, item.settings, buffer, records=self._record_delta)

    def _announce(self, items: Sequence[Item]) -> None:
        """Tell storages of their updates; finish those that cannot wait."""
        by_storage: dict[Storage, list[HostUpdate]] = {}
        for item in items:
            if item.piece.storage is not None:
                own = by_storage.setdefault(item.piece.storage, [])
                own += [] if item.update is None else [item.update]
        for storage, updates in by_storage.items():
            storage.expect(updates)
        for item in items:
            if item.update is not None and not self._can_wait(item):
                item.update.finish()

    def _uncopied(self) -> dict[str, Any]:
        own = {"_updates": [], "_buffers": {}, "_held": set(), "_bus": self._bus}
        return {**super()._uncopied(), **own}

    def _global_sums(self) -> tuple[float, float, float]:
        self.settle()
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        sums[0] = self._numel
        for update in self._updates:
            sums[1:] += update.delta
        collectives.all_reduce_(sums, "sum", world.current("record_delta").mesh.world)
        count, total, squares = sums.tolist()
        return count, total, squares


@dataclasses.dataclass(eq=False)
class Item:
    """What a step does to a piece of a run."""

    run: Run
    piece: Run
    tensors: AnyTensors
    settings: AdamSettings
    update: HostUpdate | None = None


def _count_write(weight: torch.Tensor) -> None:
    """Before the values come, so that versions do not depend on when they do."""
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)
