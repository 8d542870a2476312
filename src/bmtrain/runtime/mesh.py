"""Axes of the process mesh: groups of ranks and their communicators."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch.distributed as dist

from bmtrain.errors import NotInitializedError
from bmtrain.runtime.meeting import Groups
from bmtrain.runtime.topology import Topology

_GROUPS = {"group", "gather", "reduce"}


@dataclasses.dataclass(eq=False, repr=False)
class Communicators:
    """The process groups of an axis. After `close`, reading one raises NotInitializedError.

    `group` carries ordinary collectives. `gather` and `reduce` hold the same ranks but separate
    communicators, so that an all-gather and a reduce-scatter can be in flight at the same time.

    Objects that communicate over an axis often stay alive until the interpreter exits, so `close`
    drops the groups instead of relying on their lifetime. Otherwise Gloo's threads, which live as
    long as their group, would still run during finalisation: a thread that then releases a tensor
    is killed by the interpreter, and takes the process down with it.
    """

    group: dist.ProcessGroup
    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup

    def __getattr__(self, name: str) -> dist.ProcessGroup:
        """Only reached for a group that `close` has deleted."""
        if name not in _GROUPS:
            raise AttributeError(name)
        raise NotInitializedError("the run has ended, and a new collective")

    def close(self) -> None:
        """Drop the groups. Safe to call twice."""
        for name in _GROUPS & vars(self).keys():
            delattr(self, name)


@dataclasses.dataclass(frozen=True)
class Axis:
    """The ranks along one axis of the mesh that contains this rank.

    `size` is the number of ranks, `index` this rank's position among them. `group` carries ordinary
    collectives and raises RuntimeError after the run has ended.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    communicators: Communicators

    @functools.cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.communicators.group


@dataclasses.dataclass(frozen=True)
class Mesh:
    """All axes through this rank. Axes with the same ranks are one object."""

    topology: Topology
    world: Axis
    pipe: Axis
    tp: Axis
    tp_zero: Axis
    pp_zero: Axis
    pp_tp_zero: Axis
    upstream: Axis | None  # the previous stage and this one; None on the first stage
    downstream: Axis | None  # this stage and the next; None on the last stage

    def close(self) -> None:
        """Drop all process groups."""
        for axis in vars(self).values():
            if isinstance(axis, Axis):
                axis.communicators.close()

    def shard_axis(self, *, tensor_parallel: bool, pipelined: bool) -> Axis:
        """The ranks over which a parameter is sharded: those that hold the same full parameter.

        Tensor-parallel ranks hold different slices of a tensor-parallel parameter, and pipeline
        stages hold different blocks.
        """
        if tensor_parallel:
            return self.pp_tp_zero if pipelined else self.tp_zero
        return self.pp_zero if pipelined else self.world


KINDS = ("world", "pipe", "tp", "tp_zero", "pp_zero", "pp_tp_zero")


def build_mesh(topology: Topology, opened: Groups) -> Mesh:
    """Create the process groups of every axis.

    Collective over the world. All ranks create all groups, their own or not, in the same order:
    `new_group` hangs otherwise.
    """
    axes: dict[str, Axis] = {}
    by_partition: dict[tuple[tuple[int, ...], ...], Axis] = {}
    for kind in KINDS:
        partition = tuple(topology.partition(kind))
        for ranks in () if partition in by_partition else partition:
            groups = [opened.open(ranks) for _ in range(3)]
            if topology.rank in ranks:
                index = ranks.index(topology.rank)
                by_partition[partition] = Axis(kind, ranks, index, Communicators(*groups))
        axes[kind] = by_partition[partition]
    links: list[Axis | None] = [None, None]  # to the next stage, and to the one before
    for line in topology.partition("pipe"):
        for ranks in itertools.pairwise(line):
            # A group for each neighbour: sends downstream do not queue behind receives from
            # upstream.
            group = opened.open(ranks)
            if topology.rank in ranks:
                index = ranks.index(topology.rank)
                links[index] = Axis("link", ranks, index, Communicators(group, group, group))
    return Mesh(topology, **axes, downstream=links[0], upstream=links[1])
