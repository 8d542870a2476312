"""AdamW with its state in host memory: the GPU holds weights and gradients only."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt, largest
from bmtrain.distributed.memory import DeviceMemory, Peak
from bmtrain.errors import ConfigurationError
from bmtrain.kernels.adam import AdamSettings
from bmtrain.optim.adam import AdamBase, Step
from bmtrain.optim.adam_state import AdamLayout, AnyTensors, Update
from bmtrain.optim.clip import parameters_of
from bmtrain.optim.form import StateForm
from bmtrain.optim.host_memory import Make, file_zeros, host_zeros
from bmtrain.optim.runs import Run, contiguous_runs
from bmtrain.optim.streaming import NUM_SLOTS, Passage, Series, StreamedUpdate, update_together
from bmtrain.recompute.memory import memory_of
from bmtrain.runtime import world
from bmtrain.runtime.arguments import COUNT, FLAG, Rule, check, known_keywords
from bmtrain.shard.slices import Slices
from bmtrain.shard.storage import Storage

AUTO = "auto"
ROOM = Rule('bytes, or "auto"', lambda value: value == AUTO or COUNT.holds(value))
LIMIT = Rule("bytes, or None", lambda value: value is None or COUNT.holds(value))
# Of the GPU's limit, what "auto" leaves to batches that take more than the first.
MARGIN = 0.05
GIB = 2**30


class AdamOffloadOptimizer(AdamBase):
    """AdamW with master weights and moments in host memory, updated on the device.

    The states of one block after the other are copied to the GPU, updated by the kernels of
    AdamOptimizer, and copied back, in the order of the next forward pass, which waits for each
    block when it comes to it; so does everything else that reads or writes weights or states. The
    values are bit for bit those of AdamOptimizer.

    Args:
        params, lr, betas, eps, weight_decay, hold_steps, maximize, scale*: as AdamOptimizer.
        moments, master_weights: as AdamOptimizer.
        record_delta: after each step, `get_avg_delta()` and `get_var_delta()` return mean and
            variance of the change of all weights on all ranks (collective).
        overlap: whether the program goes on while states are updated. Their gradients are copied
            for it, on the GPU, until the forward pass comes to their block: of the last blocks, as
            many as the GPUs have room for in the first step. The others are updated before, as are
            parameters that are not sharded and those of which the program holds memory
            (`param.local`).
        device_bytes: of this rank's GPU that states may take: those that fit stay there. "auto"
            for what the first step, forward and backward, leaves free on all ranks, less a margin;
            until then all states are in host memory.
        host_bytes: of host memory that states of this rank may take; None for no limit.
        folder: of a disk, for states beyond `host_bytes`, in files without names that go with the
            process. All threads copy them to and from page-locked memory while `step` goes on.

    Raises:
        ParameterError: for parameters on a device other than the rank's.
        ConfigurationError: for hyperparameters out of range; on all ranks when states are laid out,
            before any of it is allocated, if they need more than `host_bytes` and there is no
            folder, or it has no room for the rest.
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
        master_weights: str = "fp32",
        overlap: bool = True,
        device_bytes: int | str = 0,
        host_bytes: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        check(
            type(self).__name__,
            overlap=(overlap, FLAG),
            device_bytes=(device_bytes, ROOM),
            host_bytes=(host_bytes, LIMIT),
        )
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
            master_weights=master_weights,
        )
        self._record_delta, self._overlap = record_delta, overlap
        self._device_bytes, self._host_bytes, self._folder = device_bytes, host_bytes, folder
        #: bytes of the GPU for states, once that is known
        self._room = None if isinstance(device_bytes, str) else device_bytes
        self._copy_room: int | None = None  # the same for copies of gradients
        # owners whose states are on the device, and in files
        self._resident: set[int] = set()
        self._filed: set[int] = set()
        self._deltas: list[torch.Tensor] = []  # of states on the device, in the last step
        self._updates: list[StreamedUpdate] = []  # of the last step
        self._numel = 0  # of the parameters in the last step
        self._held: set[int] = set()  # owners that cannot be updated later on this rank
        self._hidden: set[int] = set()  # those that may be, on all ranks
        self._num_checked = 0  # parameters for which the host has room
        current = world.current(type(self).__name__)
        self._passage = current.service(Passage)
        self._peak: Peak | None = None
        if self._room is None and current.device.type != "cpu":
            self._peak = current.service(DeviceMemory).new_peak()

    @property
    def skips_on_device(self) -> bool:
        return not self._record_delta and super().skips_on_device

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
        # Without it, the caller could read or write states that are still on their way.
        self._passage.wait()

    def _memory_of(self, run: Run) -> Make:
        if run.owner in self._resident:
            return self._on_device
        if run.owner in self._filed and self._folder is not None:
            return functools.partial(file_zeros, folder=os.fspath(self._folder))
        return functools.partial(host_zeros, device=self._engine.device)

    def _new_layout(self) -> AdamLayout:
        self._copy_room = None
        self._place()
        return super()._new_layout()

    def _place(self) -> None:
        """Decide where states will be.

        Raises:
            ConfigurationError: if there is no room for them.
        """
        runs = self._runs()
        self._resident = first_owners(runs, self._room or 0, self._form)
        away = [run for run in runs if run.owner not in self._resident]
        self._filed = set()
        if self._host_bytes is not None:
            hosted = first_owners(away, self._host_bytes, self._form)
            rest = [run for run in away if run.owner not in hosted]
            self._filed = {run.owner for run in rest}
            self._check_room(away, rest)

    def _check_room(self, away: Iterable[Run], rest: Iterable[Run]) -> None:
        """Refuse states for which there is no room, of all that are not on the device."""
        needed, beyond = (
            sum(bytes_of_state(run, self._form) for run in runs) for runs in (away, rest)
        )
        if not beyond:
            return
        said = f"{type(self).__name__}: the states take {needed / GIB:.1f} GiB of host memory on "
        said += f"each rank, host_bytes allows {(self._host_bytes or 0) / GIB:.1f}"
        if self._folder is None:
            raise ConfigurationError(
                f"{said}: give device_bytes, a folder for the rest, moments='8bit' or "
                "master_weights='split', or use more ranks."
            )
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise ConfigurationError(f"{said}, and the folder cannot be used: {error}") from error
        wanted = beyond * world.current(type(self).__name__).local_size
        if wanted > free:
            raise ConfigurationError(
                f"{said}, and {self._folder} has {free / GIB:.1f} GiB of the "
                f"{wanted / GIB:.1f} that the rest of all ranks here takes: give more host_bytes, "
                "or another folder."
            )

    def _place_states(self) -> None:
        if self._room is None:
            self._room = self._free_room()
            if self._room:
                self.settle()
                self._drop_layout()
        num_params = len(parameters_of(self.param_groups))
        if num_params != self._num_checked:
            # Hosts may have disks of other sizes: without it, some ranks would take the step.
            attempt(self._place, self._engine.mesh.world, ConfigurationError)
            self._num_checked = num_params

    def _free_room(self) -> int:
        """Bytes that states may take on all GPUs, as the first step has used them. Collective."""
        room = 0
        if self._peak is not None:
            current = world.current(type(self).__name__)
            limit = int(current.service(memory_of).limit() * (1 - MARGIN))
            grads = sum(map(_bytes_of_gradient, self._storages()))
            # At the update there are copies of gradients, and states that pass through.
            held = current.service(DeviceMemory).held() + grads
            held += NUM_SLOTS * self._passage.load_bytes
            room = limit - max(self._peak.take(), held)
        return self._least(room)

    def _least(self, room: int) -> int:
        """The least room of any rank, or 0. Collective."""
        return max(0, -int(largest([-room], self._engine.mesh.world, "free memory")[0]))

    def _runs(self) -> list[Run]:
        return contiguous_runs(parameters_of(self.param_groups))

    def _storages(self) -> set[Storage]:
        return {run.storage for run in self._runs() if run.storage is not None}

    def _wait_for_copies(self) -> None:
        self._passage.wait()

    def _prepare(self, layout: AdamLayout) -> None:
        self._held = layout.held_owners()

    def _secure(self, updates: list[Update]) -> list[Update]:
        away = [run for update in updates for run, _ in update.places if not self._is_here(run)]
        if away:
            self._passage.make_slots()
        self._hidden = self._hidden_owners(away)
        # Copies of what the program may write before it is read.
        copied = self._hidden - self._held
        return [update.with_copies(lambda run: run.owner in copied) for update in updates]

    def _is_here(self, run: Run) -> bool:
        return run.owner in self._resident

    def _apply(self, steps: Sequence[Step], verdict: torch.Tensor | None) -> None:
        self._note_step()
        items = [
            Item(run, piece, tensors, settings)
            for update, settings in steps
            for (run, piece), tensors in zip(update.places, update.tensors, strict=True)
        ]
        self._numel = sum(update.cohort.numel for update, _ in steps)
        here = [item for item in items if self._is_here(item.run)]
        away = [item for item in items if not self._is_here(item.run)]
        away.sort(key=self._order)
        series = Series(self._passage, verdict)
        self._updates = [StreamedUpdate(series, records=self._record_delta) for _ in away]
        # Before the first of them is computed: if one fails, values of none pass for those of the
        # step.
        for item, update in zip(away, self._updates, strict=True):
            if item.piece.storage is not None:
                item.piece.storage.expect(update, is_late=item.run.owner in self._hidden)
        self._deltas = update_together(
            [item.tensors for item in here],
            [item.settings for item in here],
            verdict,
            records=self._record_delta,
        )
        for item, update in zip(away, self._updates, strict=True):
            self._add(item, update, series)
        series.close()
        late = self._hidden - self._held
        for item, update in zip(away, self._updates, strict=True):
            if item.run.owner not in late:
                update.finish()
        if not all(self._can_wait(item) for item in away):
            self._passage.wait()  # the program may read and write these states without asking

    def _hidden_owners(self, away: Sequence[Run]) -> set[int]:
        """Owners that are updated while the program goes on; the same on all ranks, which gather
        late what is updated late, even where the program holds memory of one on some of them.

        The last that the forward pass needs, since it would wait for the first.
        """
        if not self._overlap:
            return set()
        room = self._room_for_copies()
        sharded = {run.owner: run.storage for run in away if run.storage is not None}
        last = sorted(sharded.values(), key=lambda storage: storage.residence.turn, reverse=True)
        return fitting_owners({id(storage): _bytes_of_gradient(storage) for storage in last}, room)

    def _room_for_copies(self) -> int:
        """Bytes of copies of gradients that all GPUs have room for. Collective at first."""
        if self._copy_room is None:
            memory = world.current(type(self).__name__).service(memory_of)
            storages = self._storages()
            room = memory.limit() - memory.allocated()
            if memory.limit_is_open:
                room = sum(map(_bytes_of_gradient, storages))
            self._copy_room = self._least(room) if storages else 0
        return self._copy_room

    def _note_step(self) -> None:
        """Enter in the ledger what decides the order of gathers and where states are."""
        if any(isinstance(param, Slices) for param in parameters_of(self.param_groups)):
            self._engine.transport.ledger.note(
                self._engine.mesh.world,
                f"{type(self).__name__}(overlap={self._overlap}, device_bytes="
                f"{self._device_bytes})",
            )

    def _order(self, item: Item) -> tuple[bool, int]:
        """What cannot be done later first; the rest as the next forward pass needs it."""
        storage = item.piece.storage
        return self._can_wait(item), 0 if storage is None else storage.residence.turn

    def _can_wait(self, item: Item) -> bool:
        return item.piece.storage is not None and item.piece.owner not in self._held

    def _add(self, item: Item, update: StreamedUpdate, series: Series) -> None:
        weight = item.tensors.weight
        if not weight.is_inference():
            # Now, so that versions do not depend on when the values come.
            torch.autograd.graph.increment_version(weight)
        series.add(update, item.tensors, item.settings)

    def _uncopied(self) -> dict[str, Any]:
        deltas = [delta.clone() for delta in self._all_deltas()]
        own: dict[str, Any] = {"_updates": [], "_deltas": deltas, "_held": set(), "_hidden": set()}
        own |= {"_passage": self._passage, "_peak": self._peak}
        return {**super()._uncopied(), **own}

    def _all_deltas(self) -> list[torch.Tensor]:
        """Of all parts of the last step, which is settled."""
        return [*self._deltas, *(x for update in self._updates for x in update.deltas)]

    def _global_sums(self) -> tuple[float, float, float]:
        self.settle()
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        sums[0] = self._numel
        for delta in self._all_deltas():
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


def first_owners(runs: Iterable[Run], room: int, form: StateForm) -> set[int]:
    """Ids of the owners whose states fit into `room` bytes, on all ranks the same.

    The first ones, because the forward pass needs them first, while others are updated.
    """
    sizes: dict[int, int] = {}
    for run in runs:
        sizes[run.owner] = sizes.get(run.owner, 0) + bytes_of_state(run, form)
    return fitting_owners(sizes, room)


def fitting_owners(sizes: Mapping[int, int], room: int) -> set[int]:
    """Owners of so many bytes, the first ones, that fit into `room` together."""
    found: set[int] = set()
    for owner, size in sizes.items():
        if size <= room:
            found.add(owner)
            room -= size
    return found


def _bytes_of_gradient(storage: Storage) -> int:
    """Of the gradient of a shard."""
    dtype = storage.policy.accumulate_dtype or storage.dtype
    return storage.layout.shard_numel * dtype.itemsize


def bytes_of_state(run: Run, form: StateForm) -> int:
    """Of a run: the most that it can take on a rank, whatever it takes on this one."""
    numel = sum(param.numel() for param in run.params)
    if run.storage is not None:
        numel = min(numel, run.storage.layout.shard_numel)
    # In 8 bits each parameter has blocks of its own.
    return form.num_bytes(numel, run.params[0].dtype) + 8 * len(run.params) * form.is_quantised
