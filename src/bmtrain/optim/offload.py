"""AdamW with its state in host memory: the GPU holds weights and gradients only."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import attempt, largest
from bmtrain.distributed.memory import DeviceMemory, Peak
from bmtrain.errors import ConfigurationError
from bmtrain.optim.adam import AdamBase, Steps
from bmtrain.optim.adam_state import AdamLayout, Make, ParamBatch
from bmtrain.optim.flat import FlatSpan, parameters_of, spans_of
from bmtrain.optim.streaming import NUM_SLOTS, PendingUpdate, StateStreamer, file_zeros, host_zeros
from bmtrain.recompute.memory import memory_of
from bmtrain.runtime import world
from bmtrain.runtime.arguments import COUNT, FLAG, Rule, check, optional
from bmtrain.shard.slices import Slices
from bmtrain.shard.storage import Storage

AUTO = "auto"
ROOM = Rule('bytes, or "auto"', lambda value: value == AUTO or COUNT.holds(value))
LIMIT = optional(Rule("bytes", COUNT.holds))
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
        params: parameters or groups, as in torch.optim.
        lr, betas, eps, weight_decay, hold_steps, maximize: as AdamOptimizer.
        moments, master_weights: as AdamOptimizer.
        scale, scale_factor, scale_steps: as AdamOptimizer.
        record_delta: after each step, `get_avg_delta()` and `get_var_delta()` return mean and
            variance of the change of all weights on all ranks (collective).
        overlap: whether the program goes on while a GPU updates states. Their gradients are copied
            for it, on the GPU, until the forward pass comes to their block: of the last blocks, as
            many as the GPUs have room for in the first step. The others are updated before, as are
            parameters that are not sharded and those of which the program holds memory
            (`param.local`). On a CPU all are updated in `step`.
        device_bytes: of this rank's GPU that states may take: those that fit stay there. "auto"
            for what the first step, forward and backward, leaves free on all ranks, less a margin;
            until then all states are in host memory.
        host_bytes: of host memory that states of this rank may take; None for no limit.
        folder: of a disk, for states beyond `host_bytes`, in files without names that go with the
            process. All threads copy them to and from page-locked memory while `step` goes on.

    Raises:
        TypeError: as AdamOptimizer.
        ParameterError: for parameters on a device other than the rank's.
        ConfigurationError: for hyperparameters out of range; on all ranks when states are laid out,
            before any of it is allocated, if they need more than `host_bytes` and there is no
            folder, or it has no room for the rest.
    """

    def __init__(  # noqa: PLR0913 (BMTrain's arguments)
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *sixth: Any,
        record_delta: bool = False,
        overlap: bool = True,
        device_bytes: int | str = 0,
        host_bytes: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        check(
            type(self).__name__,
            overlap=(overlap, FLAG),
            device_bytes=(device_bytes, ROOM),
            host_bytes=(host_bytes, LIMIT),
        )
        super().__init__(params, lr, betas, eps, weight_decay, *sixth, **options)
        self._record_delta, self._overlap = record_delta, overlap
        self._device_bytes, self._host_bytes, self._folder = device_bytes, host_bytes, folder
        #: bytes of the GPU for states, once that is known
        self._room = None if isinstance(device_bytes, str) else device_bytes
        self._copy_room: int | None = None  # the same for copies of gradients
        # owners whose states are on the device, and in files
        self._resident: set[int] = set()
        self._filed: set[int] = set()
        self._updates: list[PendingUpdate] = []  # of the last step
        self._held: set[int] = set()  # owners that cannot be updated later on this rank
        self._hidden: set[int] = set()  # those that may be, on all ranks
        self._num_checked = 0  # parameters for which the host has room
        current = world.current(type(self).__name__)
        self._streamer = current.service(StateStreamer)
        self._wait_for_copies = self._streamer.wait
        self._peak: Peak | None = None
        if self._room is None and current.device.type != "cpu":
            self._peak = current.service(DeviceMemory).new_peak()

    @property
    def skips_on_device(self) -> bool:
        return not self._record_delta and super().skips_on_device

    def get_avg_delta(self) -> float:
        """Mean change of a weight in the last step, over all ranks. Collective."""
        mean, _ = self._mean_changes()
        return mean

    def get_var_delta(self) -> float:
        """Variance of the change of a weight in the last step, over all ranks. Collective."""
        mean, square = self._mean_changes()
        return square - mean**2

    def _mean_changes(self) -> tuple[float, float]:
        """Means of the changes of all elements in the last step, and of their squares."""
        self.wait()
        # Those of ordinary parameters are the same on all ranks and count once.
        sums = torch.zeros(2, 3, dtype=torch.float64, device="cpu")
        for update in self._updates:
            own = sums[int(update.span.storage is not None)]
            bounds = map(update.piece.offset, update.piece.params)  # without the padding between
            own[0] += sum(end - begin for begin, end in bounds)
            for part in update.deltas:
                own[1:] += part.cpu()
        collectives.all_reduce_(sums[1], "sum", world.current("record_delta").mesh.world)
        count, total, squares = sums.sum(0).tolist()
        return total / max(count, 1.0), squares / max(count, 1.0)

    def wait(self) -> None:
        for update in self._updates:
            update.finish()
        # Without it, the caller could read or write states that are still on their way.
        self._streamer.wait()

    def _memory_of(self, span: FlatSpan) -> Make:
        if span.owner in self._resident:
            return super()._memory_of(span)
        if span.owner in self._filed and self._folder is not None:
            return functools.partial(file_zeros, folder=os.fspath(self._folder))
        return functools.partial(host_zeros, device=self._engine.device)

    def _place(self) -> None:
        """Decide where states will be: the first ones on the device, because the forward pass needs
        them first, while others are updated; those for which the host has no room in files.

        Raises:
            ConfigurationError: if there is no room for them.
        """
        self._copy_room = None
        sizes: dict[int, int] = {}  # the most that the state of an owner takes on a rank
        for span in spans_of(parameters_of(self.param_groups)):
            numel = sum(param.numel() for param in span.params)
            if span.storage is not None:
                numel = min(numel, span.storage.layout.shard_numel)
            # In 8 bits each parameter has blocks of its own.
            size = 8 * len(span.params) * self.form.is_quantised
            size += self.form.num_bytes(numel, span.params[0].dtype)
            sizes[span.owner] = sizes.get(span.owner, 0) + size
        self._resident = first_fitting(sizes, self._room or 0)
        away = {owner: size for owner, size in sizes.items() if owner not in self._resident}
        self._filed = set()
        if self._host_bytes is None:
            return
        self._filed = away.keys() - first_fitting(away, self._host_bytes)
        beyond = sum(away[owner] for owner in self._filed)
        if not beyond:
            return
        said = f"{type(self).__name__}: the states take {sum(away.values()) / GIB:.1f} GiB of host "
        said += f"memory on each rank, host_bytes allows {self._host_bytes / GIB:.1f}"
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
                f"{said}, and {self._folder} has {free / GIB:.1f} GiB of the {wanted / GIB:.1f} "
                "that the rest of all ranks here takes: give more host_bytes, or another folder."
            )

    def _prepared(self) -> tuple[AdamLayout, list[ParamBatch]]:
        if self._room is None:
            self._room = self._free_room()
            if self._room:
                self.wait()
                self._drop_layout()
        num_params = len(parameters_of(self.param_groups))
        if num_params != self._num_checked:
            # Hosts may have disks of other sizes: without it, some ranks would take the step.
            attempt(self._place, self._engine.mesh.world, ConfigurationError)
            self._num_checked = num_params
        layout = self._lay_out()
        layout.follow()
        # before there are any views of states and weights for the update
        self._held = layout.held_owners() if self._streamer.is_beside else set()
        batches = layout.updates()
        spans = [part.span for batch in batches for part in batch.parts]
        away = [span for span in spans if span.owner not in self._resident]
        if away:
            self._streamer.make_slots()
        self._hidden = self._hidden_owners(away)
        for batch in batches:
            for number, part in enumerate(batch.parts):
                if part.span.owner in self._hidden - self._held:
                    # the program may write the gradient before it is read
                    own = part.tensors.with_weight(part.tensors.weight, part.tensors.grad.clone())
                    batch.parts[number] = part._replace(tensors=own)
        return layout, batches

    def _free_room(self) -> int:
        """Bytes that states may take on all GPUs, as the first step has used them. Collective."""
        room = 0
        if self._peak is not None:
            current = world.current(type(self).__name__)
            limit = int(current.service(memory_of).limit() * (1 - MARGIN))
            # At the update there are copies of gradients, and states that pass through.
            held = current.service(DeviceMemory).held()
            held += sum(self._gradient_bytes().values())
            held += NUM_SLOTS * self._streamer.chunk_bytes
            room = limit - max(self._peak.take(), held)
        return self._least(room)

    def _least(self, room: int) -> int:
        """The least room of any rank, or 0. Collective."""
        return max(0, -int(largest([-room], self._engine.mesh.world, "free memory")[0]))

    def _gradient_bytes(self) -> dict[Storage, int]:
        """Bytes of the gradient of each storage's shard."""
        found = {}
        for span in spans_of(parameters_of(self.param_groups)):
            if span.storage is not None:
                dtype = span.storage.policy.accumulate_dtype or span.storage.dtype
                found[span.storage] = span.storage.layout.shard_numel * dtype.itemsize
        return found

    def _hidden_owners(self, away: Sequence[FlatSpan]) -> set[int]:
        """Owners that are updated while the program goes on; the same on all ranks, which gather
        late what is updated late, even where the program holds memory of one on some of them.

        The last that the forward pass needs, since it would wait for the first: as many as all GPUs
        have room for copies of their gradients. Collective at first.
        """
        if not (self._overlap and self._streamer.is_beside):
            return set()
        sizes = self._gradient_bytes()
        if self._copy_room is None:
            memory = world.current(type(self).__name__).service(memory_of)
            room = memory.limit() - memory.allocated()
            if memory.limit_is_open:
                room = sum(sizes.values())
            self._copy_room = self._least(room) if sizes else 0
        last = dict.fromkeys(span.storage for span in away if span.storage is not None)
        in_turn = sorted(last, key=lambda storage: storage.residence.turn, reverse=True)
        return first_fitting({id(storage): sizes[storage] for storage in in_turn}, self._copy_room)

    def _apply(self, steps: Steps, verdict: torch.Tensor | None) -> None:
        if any(isinstance(param, Slices) for param in parameters_of(self.param_groups)):
            # what decides the order of gathers and where states are
            self._engine.transport.ledger.note(
                self._engine.mesh.world,
                f"{type(self).__name__}(overlap={self._overlap}, device_bytes="
                f"{self._device_bytes})",
            )
        self._updates = [
            PendingUpdate(self._streamer, part, settings, records=self._record_delta)
            for settings, parts in steps
            for part in parts
        ]
        here = [update for update in self._updates if update.span.owner in self._resident]
        away = [update for update in self._updates if update.span.owner not in self._resident]
        # What cannot be done later first; the rest as the next forward pass needs it.
        away.sort(key=self._place_in_turn)
        # Before the first of them is computed: if one fails, values of none pass for those of the
        # step.
        for update in away:
            if update.span.storage is not None:
                update.span.storage.add_pending_update(
                    update.finish, is_late=update.span.owner in self._hidden
                )
            update.count_write()
        self._streamer.update(here, away, verdict)
        for update in away:
            if update.span.owner not in self._hidden - self._held:
                update.finish()
        if not all(self._place_in_turn(update)[0] for update in away):
            self._streamer.wait()  # the program may read and write these states without asking

    def _place_in_turn(self, update: PendingUpdate) -> tuple[bool, int]:
        """Whether an update may be done later, and its storage's place in the last forward pass."""
        storage = update.span.storage
        if storage is None:
            return False, 0
        return update.span.owner not in self._held, storage.residence.turn

    def _uncopied(self) -> dict[str, Any]:
        # The updates are over: what they have changed is true of the copy too.
        own: dict[str, Any] = {"_updates": [*self._updates], "_held": set(), "_hidden": set()}
        own |= {"_streamer": self._streamer, "_wait_for_copies": self._wait_for_copies}
        return {**super()._uncopied(), **own, "_peak": self._peak}


def first_fitting(sizes: Mapping[int, int], room: int) -> set[int]:
    """Owners of so many bytes, the first ones, that fit into `room` together."""
    found: set[int] = set()
    for owner, size in sizes.items():
        if size <= room:
            found.add(owner)
            room -= size
    return found
