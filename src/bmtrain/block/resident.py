"""The whole parameters of a model, gathered once and held for many passes without gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from bmtrain.block.binding import Binding
from bmtrain.block.block import Block, parts_of
from bmtrain.distributed.memory import DeviceMemory
from bmtrain.errors import ParameterError, StaleParameterError
from bmtrain.runtime import world
from bmtrain.shard.placement import EVERYWHERE
from bmtrain.shard.storage import Storage
from bmtrain.shard.unshard import Use


class Resident:
    """The whole parameters of a sharded model on this rank, for generation or evaluation.

        resident = Resident.of(model)
        with torch.no_grad(), resident.held():
            with resident.bound():
                model(...)  # as often as wanted, and on each rank as often as it likes

    Inside of `bound` modules hold whole tensors, calls gather nothing, and other ranks need not
    take part. Between, the model has its sharded parameters; they must not be written while they
    are held, as the values would stay those of before. On one rank nothing is copied.

    Attributes:
        num_bytes: what gathering allocates on this rank.
    """

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self._parts = [_Part(binding) for binding in bindings]
        self.num_bytes = sum(
            storage.layout.numel * storage.dtype.itemsize
            for storage in self._storages()
            if storage.axis.size > 1
        )

    @classmethod
    def of(cls, model: torch.nn.Module) -> Resident | None:
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

    def fits(self, spare: int) -> bool:
        """Whether this rank has room for it, and for `spare` further bytes. On a CPU it has."""
        current = world.current("Resident")
        if current.device.type == "cpu":
            return True
        memory = current.service(DeviceMemory)
        return self.num_bytes + spare <= memory.within_reach() - memory.held()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Gather everything and hold it. Collective; the end is not."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.use.running())
                stack.callback(part.use.drop)
                part.use.views()
            yield

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Put the whole tensors into the modules.

        Raises:
            StaleParameterError: if modules or parameters of them were replaced on several ranks.
        """
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                self._renew(part)
                stack.enter_context(part.bound())
            yield

    def addresses(self) -> list[int]:
        """Where the shards are in memory."""
        return [storage.shard.data_ptr() for storage in self._storages()]

    def _storages(self) -> list[Storage]:
        return list(
            dict.fromkeys(
                storage for part in self._parts for storage in part.binding.table().storages
            )
        )

    def _renew(self, part: _Part) -> None:
        """Take what the program has put in the place of the modules and parameters of before."""
        if part.is_current():
            return
        if self.num_bytes:
            raise StaleParameterError(
                "modules or parameters were replaced while their gathered values were held: change "
                "the model between generations."
            )
        part.renew()


class _Part:
    """Parameters that are bound together, and the use that gathers them."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.renew()

    def renew(self) -> None:
        """Look at the modules anew."""
        self._table = self.binding.table()
        self.use = Use(self._table.storages)

    def is_current(self) -> bool:
        """Whether the modules hold the same parameters."""
        return self.binding.table() is self._table

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the modules hold whole tensors."""
        return self.binding.running(self._table, self.use, self.use.views(), is_compiled=False)
