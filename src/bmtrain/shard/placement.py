"""Where the shards of a storage live: which ranks own its elements, each exactly one of them."""

from __future__ import annotations

import dataclasses

from bmtrain.runtime.mesh import Axis, Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Every element of every storage is owned by exactly one rank of the run.

    tensor_parallel: each tensor rank has another part of the parameters, sharded over the ranks that have the same part.
        Other parameters are sharded over tensor ranks too.
    stage: the pipeline stage that holds the storage; None for one that all stages use.
    """

    tensor_parallel: bool = False
    stage: int | None = None

    def axis(self, mesh: Mesh) -> Axis:
        """The ranks of this rank's stage over which the storage is sharded, if it is here."""
        return mesh.shard_axis(tensor_parallel=self.tensor_parallel, pipelined=self.stage is not None)

    def is_here(self, mesh: Mesh) -> bool:
        """Whether this rank owns a shard."""
        return self.stage is None or self.stage == mesh.topology.stage_id


EVERYWHERE = Placement()
