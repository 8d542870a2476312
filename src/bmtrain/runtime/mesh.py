"""Axes of the process mesh: the ranks that share something, and the process groups they talk
through.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch.distributed as dist

from bmtrain.runtime.topology import Topology

_GROUPS = {"group", "gather", "reduce"}


class Communicators:
    """The process groups of an axis, until `close`; asked for later they raise RuntimeError.

    `group` carries ordinary collectives; `gather` and `reduce` are the same ranks with
    communicators of their own, so that a gather and a reduction can be in flight at the same time.

    Whoever talks over an axis keeps the axis, often to the last moment of the interpreter. Gloo's
    threads live as long as a group does, and one that gives back a tensor while the interpreter
    ends is killed by it, and the process with it.
    """

    def __init__(
        self, group: dist.ProcessGroup, gather: dist.ProcessGroup, reduce: dist.ProcessGroup
    ) -> None:
        self.group, self.gather, self.reduce = group, gather, reduce

    def __getattr__(self, name: str) -> dist.ProcessGroup:
        """What is asked for after `close`."""
        if name not in _GROUPS:
            raise AttributeError(name)
        raise RuntimeError("the run has ended: its ranks can no longer talk to each other.")

    def close(self) -> None:
        """Let the groups go. Safe to call twice."""
        for name in _GROUPS & vars(self).keys():
            delattr(self, name)


@dataclasses.dataclass(frozen=True)
class Axis:
    """One line of the mesh through this rank: `size` ranks, of which this one is number `index`.

    `group` carries ordinary collectives. It raises RuntimeError after the run.
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
    """All axes through this rank. Axes of the same ranks are the same object."""

    topology: Topology
    world: Axis
    pipe: Axis
    tp: Axis
    tp_zero: Axis
    pp_zero: Axis
    pp_tp_zero: Axis
    upstream: Axis | None  # the stage before and this one; None on the first stage
    downstream: Axis | None  # this stage and the next; None on the last

    def close(self) -> None:
        """Let all process groups go."""
        axes = (
            self.world,
            self.pipe,
            self.tp,
            self.tp_zero,
            self.pp_zero,
            self.pp_tp_zero,
            self.upstream,
            self.downstream,
        )
        for axis in axes:
            if axis is not None:
                axis.communicators.close()

    def shard_axis(self, *, tensor_parallel: bool, pipelined: bool) -> Axis:
        """The ranks over which a parameter is sharded: those that compute with the same values of
        it.

        Tensor ranks have different parts of a tensor-parallel parameter, stages different blocks of
        a pipeline.
        """
        if tensor_parallel:
            return self.pp_tp_zero if pipelined else self.tp_zero
        return self.pp_zero if pipelined else self.world


KINDS = ("world", "pipe", "tp", "tp_zero", "pp_zero", "pp_tp_zero")


def build_mesh(topology: Topology) -> Mesh:
    """Create the process groups of every axis.

    Collective over the world: all ranks create all groups in one order.
    """
    axes: dict[str, Axis] = {}
    by_partition: dict[tuple[tuple[int, ...], ...], Axis] = {}
    for kind in KINDS:
        partition = tuple(topology.partition(kind))
        if partition not in by_partition:
            by_partition[partition] = _build_axis(kind, topology.rank, partition)
        axes[kind] = by_partition[partition]
    upstream, downstream = _build_links(topology)
    return Mesh(topology, **axes, upstream=upstream, downstream=downstream)


def _build_axis(name: str, rank: int, partition: tuple[tuple[int, ...], ...]) -> Axis:
    own = None
    for ranks in partition:
        groups = [dist.new_group(list(ranks)) for _ in range(3)]
        if rank in ranks:
            own = Axis(name, ranks, ranks.index(rank), Communicators(*groups))
    if own is None:
        raise RuntimeError(f"rank {rank} is in no {name} group of {partition}")
    return own


def _build_links(topology: Topology) -> tuple[Axis | None, Axis | None]:
    """Communicators of neighbouring stages: what a stage sends on must not queue behind what it
    receives.
    """
    upstream = downstream = None
    for line in topology.partition("pipe"):
        for ranks in itertools.pairwise(line):
            group = dist.new_group(list(ranks))
            communicators = Communicators(group, group, group)
            if topology.rank == ranks[0]:
                downstream = Axis("link", ranks, 0, communicators)
            elif topology.rank == ranks[1]:
                upstream = Axis("link", ranks, 1, communicators)
    return upstream, downstream
