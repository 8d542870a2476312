"""A storage: one flat group of parameters of one dtype, of which this rank keeps a shard."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.transport import Gather, ShardSource
from bmtrain.errors import ParameterError
from bmtrain.shard.cut import Cut
from bmtrain.shard.engine import Absent, Engine, Gathered, Residence, num_references
from bmtrain.shard.gradient import Gradient, ShardPolicy
from bmtrain.shard.layout import Layout, Split
from bmtrain.shard.placement import EVERYWHERE, Placement
from bmtrain.shard.slices import Slices
from bmtrain.torch_internals import version_of


class Storage:
    """Owner of a shard, its gradient and the residence of the full buffer.

    Args:
        engine: of the run.
        shapes: name and shape of each parameter; of a tensor-parallel one, the shape of this tensor
            rank's part.
        dtype: of all of them.
        policy, placement: how and where they are sharded.
        splits: of tensor-parallel parameters, one per shape.
        adoptable: whether it was made for a single parameter, which a block may move into a storage
            of its own.

    Raises:
        ParameterError: for a dtype that is not floating point.
    """

    def __init__(
        self,
        engine: Engine,
        shapes: Sequence[tuple[str, torch.Size]],
        dtype: torch.dtype,
        policy: ShardPolicy,
        *,
        placement: Placement = EVERYWHERE,
        splits: Sequence[Split | None] | None = None,
        adoptable: bool = False,
    ) -> None:
        if not dtype.is_floating_point:
            raise ParameterError(
                f"parameter {shapes[0][0]!r} has dtype {dtype}: only floating point is "
                "sharded; register it as a buffer."
            )
        self.engine, self.dtype, self.policy = engine, dtype, policy
        self.placement, self.adoptable = placement, adoptable
        #: the ranks of this rank's stage over which it is sharded, if it is here
        self.axis = engine.mesh.shard_axis(
            tensor_parallel=placement.tensor_parallel, pipelined=placement.stage is not None
        )
        self.is_here = placement.is_here(engine.mesh)
        self.layout = Layout.build(
            [(name, tuple(shape)) for name, shape in shapes], self.axis.size, splits
        )
        label = engine.register(self.axis, self.layout.slots, dtype)
        #: how the parameter of each slot is cut into slices
        self.cuts = [
            Cut.of(self.layout, i, label, placement, engine.mesh)
            for i in range(len(self.layout.slots))
        ]
        # Mapping memory of other ranks costs whole pages and milliseconds: not for storages of
        # other stages, which are empty here, nor for those that a block will soon replace.
        numel = self.layout.shard_numel if self.is_here else 0
        self._shard, source = engine.transport.new_shard(
            numel, dtype, self.axis, shared=self.is_here and not adoptable
        )
        #: a number that changes when a parameter is written in place on this rank
        self.version = functools.partial(version_of, self._shard)
        self._updates: list[Callable[[], None]] = []
        self._num_own = num_references(self._shard)  # if no one has made a view of it
        #: the parameter objects of the slots. Weak, as parameters hold their storage: a shard would
        #: otherwise outlive its model until Python's collector finds the cycle, at different times
        #: on different ranks.
        self.references: list[weakref.ref[torch.nn.Parameter]] = []
        self.gradient = Gradient(
            self.layout,
            self.references,
            dtype,
            policy,
            engine.device,
            engine.transport,
            label,
            self.cuts,
        )
        # The schedule keeps residences, which therefore hold the shards of dropped models weakly.
        self.residence: Residence
        if not self.is_here:
            self.residence = Absent(source, label)
        elif self.axis.size == 1:
            self.residence = Residence(source, label)
        else:
            survives = policy.zero_level == 2
            self.residence = Gathered(source, label, engine.transport, survives_forward=survives)
        self.residence.is_pipelined = placement.stage is not None
        self.residence.updates = weakref.WeakMethod(self.wait_for_updates)
        engine.residences.add(self.residence)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's values (shard_numel,); waits for an update that is under way."""
        self.wait_for_updates()
        return self._shard

    def add_pending_update(self, finish: Callable[[], None], *, is_late: bool) -> None:
        """Values of the shard are computed beside the program: whoever asks for them waits.

        Called at the same place on all ranks, those without elements of it too. The caller has
        counted the write, so that versions do not depend on when the values come.

        Args:
            finish: waits for the values and writes them, so that later work on the current stream
                finds them. May be called again.
            is_late: whether that may be in the next pass; the same on all ranks.
        """
        self._updates.append(finish)
        self.residence.is_late = is_late or self.residence.is_late

    def wait_for_updates(self) -> None:
        """Wait for updates that are under way. Not collective.

        Raises:
            Exception: what ended an update; then the values are not to be had any more.
        """
        while self._updates:
            finish = self._updates[0]
            finish()
            self._updates = [other for other in self._updates if other is not finish]

    @property
    def is_held(self) -> bool:
        """Whether the program holds memory of the shard, as `param.local` for example.

        It can read that at any time without asking.
        """
        params = [param for param in self.params if param is not None]
        own = self._num_own + len(params)
        return num_references(self._shard) > own or any(
            isinstance(param, Slices) and param.is_held for param in params
        )

    def new_like(
        self, policy: ShardPolicy, placement: Placement, *, adoptable: bool = False
    ) -> Storage:
        """Another one for as many values, all zeros. Collective."""
        return Storage(
            self.engine,
            [(slot.name, torch.Size(slot.shape)) for slot in self.layout.slots],
            self.dtype,
            policy,
            placement=placement,
            splits=[slot.split for slot in self.layout.slots],
            adoptable=adoptable,
        )

    def attach(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Set the parameter objects of all slots, in order."""
        self.references.extend(weakref.ref(param) for param in params)

    @property
    def params(self) -> list[torch.nn.Parameter | None]:
        """The parameter objects of the slots; None where the program has dropped one."""
        return [reference() for reference in self.references]

    def local(self, index: int) -> torch.Tensor:
        """This rank's 1-D slice of slot `index`: a view of the shard."""
        piece = self.cuts[index].piece
        return self.shard[piece.begin : piece.end]

    def fill(self, index: int, value: torch.Tensor) -> None:
        """Copy this rank's slice of the full tensor `value` into the shard.

        For a meta tensor the slice becomes NaN, which shows if it is never set.
        """
        if value.is_meta:
            self.local(index).fill_(float("nan"))
        else:
            self.local(index).copy_(self.cuts[index].own(value.detach()))

    def views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """One view of the full buffer per slot."""
        start = full.storage_offset()
        return [
            full.as_strided(slot.shape, slot.stride, start + slot.offset)
            for slot in self.layout.slots
        ]

    def gather(self, shard: torch.Tensor | None = None) -> torch.Tensor:
        """A new full buffer (layout.numel,), outside autograd and schedule.

        Collective, in other stages of a pipeline too.

        Args:
            shard: other values laid out as the shard, of any dtype.
        """
        shard = self.shard if shard is None else shard
        full = shard.new_empty(self.layout.numel)
        if self.is_here and self.axis.size == 1:
            full.copy_(shard)
        elif self.is_here:
            transport = self.engine.transport
            # Without this wait, the caller's kernels would read what the gather has not yet filled.
            transport.streams.compute_waits(
                transport.gather(
                    Gather(
                        full, ShardSource(shard), self.axis, f"values of {self.gradient.label.text}"
                    )
                )
            )
        if self.placement.stage is not None:
            collectives.broadcast_(full, self.placement.stage, self.engine.mesh.pipe)
        return full
