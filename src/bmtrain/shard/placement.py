"""Which ranks own the shards of a storage."""

from __future__ import annotations

import dataclasses

import torch

from bmtrain.errors import ParameterError
from bmtrain.runtime.mesh import Axis, Mesh
from bmtrain.shard.layout import Split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Every element of every storage is owned by exactly one rank of the run.

    Attributes:
        tensor_parallel: each tensor rank has a different part of the parameters, sharded over the
            ranks that have the same part. Other parameters are sharded over tensor ranks too.
        stage: the pipeline stage that holds the storage; None if all stages use it.
    """

    tensor_parallel: bool = False
    stage: int | None = None

    def is_here(self, mesh: Mesh) -> bool:
        """Whether this rank owns a shard."""
        return self.stage is None or self.stage == mesh.topology.stage_id


EVERYWHERE = Placement()


def split_of(data: torch.Tensor, dim: int, tp: Axis) -> Split | None:
    """Which part of the whole `data` is; None if nothing is split.

    Raises:
        ParameterError: for a dim that `data` does not have.
    """
    if dim == -1 or tp.size == 1:
        return None
    if not 0 <= dim < data.dim():
        raise ParameterError(
            f"tp_split_dim is {dim} for a parameter of shape {tuple(data.shape)}: "
            f"expected 0 to {data.dim() - 1}, or -1 for none."
        )
    return Split(dim, tp.index, tp.size)
