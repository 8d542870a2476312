"""Whole tensors from all ranks' slices, outside autograd: for files, inspection, initial values."""

from __future__ import annotations

import torch

from bmtrain.distributed import collectives, results
from bmtrain.shard.slices import Slices
from bmtrain.shard.storage import Storage


def gather_result(result: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, concatenated along dim 0 in rank order, on `result`'s device.

    Collective. For a distributed parameter, its gradient or another sharded tensor: the whole
    tensor. The result has no graph.

    Args:
        result: of the same dtype and the same dims after the first on every rank; numbers of rows
            may differ. A 0-dim tensor is one row.

    Raises:
        ConfigurationError: on every rank, for anything but a tensor, or naming the shapes and
            dtypes that do not match.
    """
    return result.whole() if isinstance(result, Slices) else results.gather_result(result)


class Whole:
    """The whole tensors of all slots of a storage on every rank, tensor-parallel splits undone.

    Collective over the run, wherever the storage lives.

    Args:
        storage: whose slots.
        shard: this rank's values, (shard_numel,) of any dtype on the rank's device, laid out as the
            storage's shard, which is the default; on ranks where the storage is not, an empty
            tensor of that dtype.
    """

    def __init__(self, storage: Storage, shard: torch.Tensor | None = None) -> None:
        self._storage = storage
        full = storage.gather(shard)
        tp = storage.engine.mesh.tp
        self._parts = (
            collectives.all_gather(full, tp)
            if storage.placement.tensor_parallel
            else full.unsqueeze(0)
        )

    def __getitem__(self, index: int) -> torch.Tensor:
        """The whole tensor of slot `index`; a view of the gathered buffer unless it was split."""
        slot = self._storage.layout.slots[index]
        parts = [part[slot.offset : slot.end].view(slot.shape) for part in self._parts]
        return parts[0] if slot.split is None else torch.cat(parts, slot.split.dim)
