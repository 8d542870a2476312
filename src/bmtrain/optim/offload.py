"""AdamW with its state in host memory: the GPU holds weights and gradients only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.distributed import collectives
from bmtrain.kernels.adam import AdamSettings
from bmtrain.kernels.adam_compact import update_tensors
from bmtrain.optim.adam import AdamBase, Step
from bmtrain.optim.adam_state import AdamLayout, AnyTensors
from bmtrain.optim.clip import parameters_of
from bmtrain.optim.form import StateForm, bytes_of
from bmtrain.optim.host_memory import host_buffer
from bmtrain.optim.host_update import Bus, HostUpdate, Series, sums_of_change
from bmtrain.optim.runs import Run, contiguous_runs
from bmtrain.optim.worker import Worker
from bmtrain.runtime import world
from bmtrain.runtime.arguments import COUNT, FLAG, check, known_keywords
from bmtrain.shard.slices import Slices


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
        device_bytes: of this rank's GPU that states may take: those that fit are updated there.
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
        device_bytes: int = 0,
    ) -> None:
        check(type(self).__name__, overlap=(overlap, FLAG), device_bytes=(device_bytes, COUNT))
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
        self._record_delta, self._overlap, self._device_bytes = record_delta, overlap, device_bytes
        self._resident: set[int] = set()  # owners whose states are on the device
        self._deltas: list[torch.Tensor] = []  # of states on the device, in the last step
        self._updates: list[HostUpdate] = []  # of the last step
        self._numel = 0  # of the parameters in the last step
        # by id of the run, and dtype: what its gradients go down into
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}
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
        # Without it, the caller could write states that are still being sent up.
        self._bus.wait()

    def _state_device(self, run: Run) -> torch.device:
        return self._engine.device if run.owner in self._resident else torch.device("cpu")

    def _new_layout(self) -> AdamLayout:
        self._buffers = {}
        params = parameters_of(self.param_groups)
        self._resident = resident_owners(contiguous_runs(params), self._device_bytes, self._form)
        return super()._new_layout()

    def _wait_for_copies(self) -> None:
        self._bus.wait()

    def _prepare(self, layout: AdamLayout) -> None:
        self._held = layout.held_owners()

    def _apply(self, steps: Sequence[Step], verdict: torch.Tensor | None) -> None:
        self._note_step()
        items = [
            Item(run, piece, tensors, settings)
            for update, settings in steps
            for (run, piece), tensors in zip(update.places, update.tensors, strict=True)
        ]
        away = [item for item in items if item.run.owner not in self._resident]
        for item in away:
            self._buffer(item)  # page-locking takes its time: not between two downloads
        self._numel = sum(update.cohort.numel for update, _ in steps)
        self._update_here([item for item in items if item.run.owner in self._resident])
        away.sort(key=self._order)
        self._updates.clear()  # they and their series refer to each other
        self._bus.begin()
        series = Series(self._bus, world.current(type(self).__name__).service(Worker))
        self._updates = series.updates
        for item in away:
            self._begin(item, series)
        # Gradients may be written and freed from here on; `steps` has kept them until now.
        self._bus.end()
        if not self._overlap:
            self.settle()
        now = [
            update
            for item, update in zip(away, self._updates, strict=True)
            if not self._can_wait(item)
        ]
        for update in now:
            update.finish()
        if now:  # the program may write these states without asking
            self._bus.wait()

    def _note_step(self) -> None:
        """Enter in the ledger what decides the order of gathers and where states are."""
        if any(isinstance(param, Slices) for param in parameters_of(self.param_groups)):
            self._engine.transport.ledger.note(
                self._engine.mesh.world,
                f"{type(self).__name__}(overlap={self._overlap}, device_bytes="
                f"{self._device_bytes})",
            )

    def _update_here(self, items: Sequence[Item]) -> None:
        """Update states that are on the device."""
        by_settings: dict[AdamSettings, list[AnyTensors]] = {}
        for item in items:
            by_settings.setdefault(item.settings, []).append(item.tensors)
        masters = [
            item.tensors.master
            for item in items
            if self._record_delta and item.tensors.master is not None
        ]
        before = [master.clone() for master in masters]
        for settings, tensors in by_settings.items():
            update_tensors(tensors, settings)
        self._deltas = list(map(sums_of_change, masters, before))

    def _order(self, item: Item) -> tuple[bool, int]:
        """What cannot be done later first; the rest as the next forward pass needs it."""
        storage = item.piece.storage
        return self._can_wait(item), 0 if storage is None else storage.residence.turn

    def _can_wait(self, item: Item) -> bool:
        return item.piece.storage is not None and item.piece.owner not in self._held

    def _begin(self, item: Item, series: Series) -> None:
        weight = item.tensors.weight
        if not weight.is_inference():
            # Now, so that versions do not depend on when the values come.
            torch.autograd.graph.increment_version(weight)
        update = series.begin(
            item.tensors, item.settings, self._buffer(item), records=self._record_delta
        )
        if item.piece.storage is not None and self._overlap:
            item.piece.storage.expect(update)

    def _buffer(self, item: Item) -> torch.Tensor:
        """The host memory that the gradient of a piece goes down into."""
        key = id(item.run), item.tensors.grad.dtype
        if key not in self._buffers:
            self._buffers[key] = host_buffer(item.run.numel, key[1], self._engine.device)
        return item.run.cut(self._buffers[key], item.piece)

    def _uncopied(self) -> dict[str, Any]:
        own = {"_updates": [], "_buffers": {}, "_held": set(), "_bus": self._bus}
        return {**super()._uncopied(), **own}

    def _global_sums(self) -> tuple[float, float, float]:
        self.settle()
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        sums[0] = self._numel
        for delta in (*self._deltas, *(update.delta for update in self._updates)):
            sums[1:] += delta.cpu()
        collectives.all_reduce_(sums, "sum", world.current("record_delta").mesh.world)
        count, total, squares = sums.tolist()
        return count, total, squares


class Item(NamedTuple):
    """What a step does to a piece of a run."""

    run: Run
    piece: Run
    tensors: AnyTensors
    settings: AdamSettings


def resident_owners(runs: Iterable[Run], room: int, form: StateForm) -> set[int]:
    """Ids of the owners whose states are on the device: the first that fit into `room` bytes.

    First, because the forward pass needs them first, while the CPU updates the others. The same on
    all ranks: storages count with the shard's size, whatever this rank's slices in it.
    """
    found: set[int] = set()
    for run in runs:
        numel = run.numel if run.storage is None else run.storage.layout.shard_numel
        size = numel * bytes_of(form, run.params[0].dtype)
        if run.owner not in found and size <= room:
            found.add(run.owner)
            room -= size
    return found
