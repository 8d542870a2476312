"""The whole parameters of a model, gathered once and held for many passes without gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from bmtrain.block.block import Binding, Block, parts_of
from bmtrain.distributed.memory import DeviceMemory
from bmtrain.errors import ParameterError, StaleParameterError
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine, Fixed, Residence
from bmtrain.shard.placement import EVERYWHERE
from bmtrain.shard.storage import Storage


class ResidentWeights:
    """The whole parameters of a sharded model on this rank, for generation or evaluation.

        resident = ResidentWeights.of(model)
        with torch.no_grad(), resident.held():
            with resident.bound():
                model(...)  # as often as wanted, and on each rank as often as it likes

    Inside of `bound` modules hold whole tensors, calls gather nothing, and other ranks need not
    take part. Between, the model has its sharded parameters; they must not be written while they
    are held, as the values would stay those of before. On one rank nothing is copied.

    The memory is freed at the end of `held`. As long as somebody has `memory()`, all that is held
    of these parameters lies there, and what no rank has written since is not gathered again.
    """

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self._tables = [(binding, binding.table()) for binding in bindings]
        self._are_copies = any(storage.axis.size > 1 for storage in self._storages())
        self._full: dict[Storage, torch.Tensor] = {}  # of `held`

    @classmethod
    def of(cls, model: torch.nn.Module) -> ResidentWeights | None:
        """That of a model; None if there cannot be one.

        So it is where some parameters are not sharded, are split over tensor-parallel ranks or
        belong to a pipeline, and where blocks compute in fp8. All ranks get one, or none does.
        """
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        bindings = [Binding(functools.partial(parts_of, model)), *(b.binding for b in blocks)]
        try:
            resident = cls(bindings)
        except ParameterError:
            return None
        placements = {storage.placement for storage in resident._storages()}
        are_plain = placements <= {EVERYWHERE} and all(block.runs_plainly for block in blocks)
        return resident if are_plain else None

    @property
    def num_bytes(self) -> int:
        """What gathering would allocate on this rank."""
        return sum(
            storage.layout.numel * storage.dtype.itemsize
            for storage, residence in zip(self._storages(), self.memory(), strict=True)
            if isinstance(residence, Fixed) and residence.version is None
        )

    def fits(self, spare: int) -> bool:
        """Whether this rank has room for it, and for `spare` further bytes. On a CPU it has."""
        current = world.current("ResidentWeights")
        if current.device.type == "cpu":
            return True
        memory = current.service(DeviceMemory)
        # Free bytes of segments that tensors partly occupy: they cannot go back to the device.
        stats = torch.cuda.memory_stats(current.device)
        fragments = int(stats.get("inactive_split_bytes.all.current", 0))
        return self.num_bytes + spare <= memory.within_reach() - fragments - memory.held()

    def memory(self) -> list[Residence]:
        """Owners of the memory that whole parameters are gathered to, alive or new."""
        return [storage.engine.fixed(storage.residence) for storage in self._storages()]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Gather everything and hold it. Collective; the end is not."""
        memory = self.memory()
        try:
            world.current("ResidentWeights").service(Engine).bring_changed(memory)
            self._find(self._storages())
            yield
        except BaseException:
            # what was being computed may have written into a copy
            for residence in memory:
                if isinstance(residence, Fixed):
                    residence.lose()
            raise
        finally:
            self._full.clear()

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Put the whole tensors into the modules.

        Raises:
            StaleParameterError: if modules or parameters of them were replaced on several ranks.
        """
        with contextlib.ExitStack() as stack:
            for place, (binding, before) in enumerate(self._tables):
                table = binding.table()
                if table is not before and self._are_copies:
                    raise StaleParameterError(
                        "modules or parameters were replaced while their gathered values were "
                        "held: change the model between generations."
                    )
                if table is not before:
                    # On one rank: parameters that the program has put in place of the earlier ones.
                    self._tables[place] = binding, table
                    self._find(table.storages)
                slots = [
                    view
                    for storage in table.storages
                    for view in storage.views(self._full[storage])
                ]
                stack.enter_context(binding.running(table, slots, is_compiled=False))
            yield

    def addresses(self) -> list[object]:
        """Where whole parameters are in memory, and how they lie there; inside of `held`."""
        memory = [
            # asking for a shard waits for an update of it
            (self._full[storage] if self._are_copies else storage.shard).data_ptr()
            for storage in self._storages()
        ]
        layouts = [(storage.layout, storage.dtype) for storage in self._storages()]
        return [memory, layouts, [binding.table().positions for binding, _ in self._tables]]

    def _storages(self) -> list[Storage]:
        tables = [binding.table() for binding, _ in self._tables]
        return list(dict.fromkeys(storage for table in tables for storage in table.storages))

    def _find(self, storages: Sequence[Storage]) -> None:
        """Where the full values of storages are, which have been brought."""
        for storage in storages:
            residence = storage.engine.fixed(storage.residence)
            self._full[storage] = residence.acquire()
