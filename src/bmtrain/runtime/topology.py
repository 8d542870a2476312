"""A rank's coordinates on the axes of the process mesh: integer arithmetic, no processes."""

from __future__ import annotations

import functools

from bmtrain.errors import ConfigurationError
from bmtrain.runtime.arguments import SIZE, check

_GROUPS = ("pipe", "zero", "tp_zero", "tp")


class Topology:
    """Coordinates of `rank` in a world of `pipe_size` stages by `tp_size` tensor-parallel ranks.

    Names follow BMTrain: `*_idx` is the index of this rank's group among the groups of that kind,
    `*_id` its rank within the group (except `stage_id`, its position along the pipeline).

    Attributes:
        stage_size: number of ranks in one pipeline stage.

    Raises:
        ConfigurationError: if a size is below 1 or their product does not divide `world_size`.
    """

    def __init__(self, *, rank: int, world_size: int, pipe_size: int = 1, tp_size: int = 1) -> None:
        check("Topology", pipe_size=(pipe_size, SIZE), tp_size=(tp_size, SIZE))
        parts = pipe_size * tp_size
        if world_size % parts:
            raise ConfigurationError(
                f"the world of {world_size} ranks cannot be split into pipe_size={pipe_size} x "
                f"tp_size={tp_size}: expected a world size divisible by {parts}; start a multiple "
                f"of {parts} processes or change the sizes."
            )
        self.rank, self.world_size, self.pipe_size, self.tp_size = (
            rank,
            world_size,
            pipe_size,
            tp_size,
        )
        self.stages, self.stage_size = pipe_size, world_size // pipe_size
        self.zero_idx, self.zero_id = 0, rank
        self.stage_id, self.pipe_idx = divmod(rank, self.stage_size)
        self.pipe_id = self.stage_id
        self.pp_zero_idx, self.pp_zero_id = self.stage_id, self.pipe_idx
        self.tp_idx, self.tp_id = divmod(rank, tp_size)
        self.tp_zero_idx, self.tp_zero_id = self.tp_id, self.tp_idx
        self.pp_tp_zero_idx = self.stage_id * tp_size + self.tp_id
        self.pp_tp_zero_id = self.pipe_idx // tp_size

    def get_group_rank(self, group_name: str, kind: str = "id") -> int:
        """This rank's position in its group of a kind: pipe, zero, tp_zero or tp."""
        if group_name not in _GROUPS:
            raise ConfigurationError(
                f"unknown group {group_name!r}: expected one of {', '.join(_GROUPS)}."
            )
        return int(vars(self)[f"{group_name}_{kind}"])

    #: index of this rank's group among those of a kind: pipe, zero, tp_zero or tp
    get_group_id = functools.partialmethod(get_group_rank, kind="idx")

    def partition(self, kind: str) -> list[tuple[int, ...]]:
        """All groups of a kind, as tuples of ranks; every rank is in exactly one.

        `kind` is one of world, pipe, tp, tp_zero, pp_zero, pp_tp_zero.
        """
        groups: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            place = Topology(
                rank=rank,
                world_size=self.world_size,
                pipe_size=self.pipe_size,
                tp_size=self.tp_size,
            )
            index = 0 if kind == "world" else vars(place)[f"{kind}_idx"]
            groups.setdefault(index, []).append(rank)
        return [tuple(ranks) for _, ranks in sorted(groups.items())]
