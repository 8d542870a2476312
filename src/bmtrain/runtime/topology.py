"""A rank's coordinates on the axes of the process mesh: integer arithmetic, no processes.

Names follow BMTrain: `*_idx` is the index of this rank's group among the groups of that kind,
`*_id` its rank within the group (except `stage_id`, its position along the pipeline).
"""

from __future__ import annotations

import dataclasses

from bmtrain.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Coordinates of `rank` in a world of `pipe_size` stages by `tp_size` tensor-parallel ranks.

    Raises:
        ConfigurationError: if a size is below 1 or their product does not divide `world_size`.
    """

    rank: int
    world_size: int
    pipe_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name, size in (("pipe_size", self.pipe_size), ("tp_size", self.tp_size)):
            if size < 1:
                raise ConfigurationError(f"{name} is {size}: expected at least 1.")
        parts = self.pipe_size * self.tp_size
        if self.world_size % parts:
            raise ConfigurationError(
                f"the world of {self.world_size} ranks cannot be split into "
                f"pipe_size={self.pipe_size} x tp_size={self.tp_size}: "
                f"expected a world size divisible by {parts}; start a multiple of "
                f"{parts} processes or change the sizes."
            )

    @property
    def stages(self) -> int:
        return self.pipe_size

    @property
    def stage_size(self) -> int:
        """Number of ranks in one pipeline stage."""
        return self.world_size // self.pipe_size

    @property
    def stage_id(self) -> int:
        return self.rank // self.stage_size

    @property
    def pipe_idx(self) -> int:
        return self.rank % self.stage_size

    @property
    def tp_id(self) -> int:
        return self.rank % self.tp_size

    @property
    def tp_idx(self) -> int:
        return self.rank // self.tp_size

    @property
    def zero_id(self) -> int:
        return self.rank

    @property
    def zero_idx(self) -> int:
        return 0

    @property
    def pp_zero_id(self) -> int:
        return self.pipe_idx

    @property
    def pp_zero_idx(self) -> int:
        return self.stage_id

    @property
    def tp_zero_id(self) -> int:
        return self.tp_idx

    @property
    def tp_zero_idx(self) -> int:
        return self.tp_id

    @property
    def pp_tp_zero_id(self) -> int:
        return self.pipe_idx // self.tp_size

    @property
    def pp_tp_zero_idx(self) -> int:
        return self.stage_id * self.tp_size + self.tp_id

    def get_group_id(self, name: str) -> int:
        """Index of this rank's group among those of the kind `name` (pipe, zero, tp_zero, tp)."""
        return self._lookup(
            name,
            {
                "pipe": self.pipe_idx,
                "zero": self.zero_idx,
                "tp_zero": self.tp_zero_idx,
                "tp": self.tp_idx,
            },
        )

    def get_group_rank(self, name: str) -> int:
        """This rank's position in its group of the kind `name` (pipe, zero, tp_zero, tp)."""
        return self._lookup(
            name,
            {
                "pipe": self.stage_id,
                "zero": self.zero_id,
                "tp_zero": self.tp_zero_id,
                "tp": self.tp_id,
            },
        )

    @staticmethod
    def _lookup(name: str, values: dict[str, int]) -> int:
        if name not in values:
            raise ConfigurationError(
                f"unknown group {name!r}: expected one of {', '.join(values)}."
            )
        return values[name]

    def partition(self, kind: str) -> list[tuple[int, ...]]:
        """All groups of a kind, as tuples of ranks; every rank is in exactly one.

        `kind` is one of world, pipe, tp, tp_zero, pp_zero, pp_tp_zero.
        """
        everyone = [dataclasses.replace(self, rank=r) for r in range(self.world_size)]
        key = {
            "world": lambda t: 0,
            "pipe": lambda t: t.pipe_idx,
            "tp": lambda t: t.tp_idx,
            "tp_zero": lambda t: t.tp_zero_idx,
            "pp_zero": lambda t: t.pp_zero_idx,
            "pp_tp_zero": lambda t: t.pp_tp_zero_idx,
        }[kind]
        groups: dict[int, list[int]] = {}
        for place in everyone:
            groups.setdefault(key(place), []).append(place.rank)
        return [tuple(ranks) for _, ranks in sorted(groups.items())]
