"""How one tensor is cut into the slices of ranks, and how it is put together again.

Collectives on plain tensors, outside autograd.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.ledger import Ledger
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis, Mesh
from bmtrain.shard.label import Label
from bmtrain.shard.layout import Layout, Piece, Split
from bmtrain.shard.placement import Placement


@dataclasses.dataclass(frozen=True)
class Cut:
    """The slices of one tensor: slot `index` of a layout.

    Equal cuts give every rank the same elements, whichever storage they belong to; all ranks find
    the same two cuts equal.

    Attributes:
        shape: of the tensor; of a tensor-parallel one, of this tensor rank's part, with which
            programs compute.
        whole_shape, split: of all parts together, and which part this is.
        pieces: what each rank of the axis owns of the flattened tensor.
        placement: which ranks own slices.
        label, name: names of its storage and of the tensor in messages.
    """

    shape: torch.Size
    whole_shape: torch.Size
    split: Split | None
    pieces: tuple[Piece, ...]
    label: Label
    name: str
    placement: Placement
    mesh: Mesh

    @classmethod
    def of(cls, layout: Layout, index: int, label: Label, placement: Placement, mesh: Mesh) -> Cut:
        """The cut of slot `index`."""
        slot = layout.slots[index]
        whole_shape = list(slot.shape)
        if slot.split is not None:
            whole_shape[slot.split.dim] *= slot.split.count
        pieces = tuple(layout.piece(index, place) for place in range(layout.num_shards))
        return cls(
            torch.Size(slot.shape),
            torch.Size(whole_shape),
            slot.split,
            pieces,
            label,
            slot.name,
            placement,
            mesh,
        )

    @property
    def axis(self) -> Axis:
        """The ranks that own slices."""
        return self.label.axis

    def note(self, what: str, axis: Axis) -> None:
        """Enter `what` of this tensor in the ledger before it is done.

        The collectives of two tensors may have equal sizes: without the name, ranks that take
        different tensors would exchange their values in silence.
        """
        if axis.size > 1:
            world.current().service(Ledger).note(
                axis, f"{what} of {self.name} in {self.label.text}"
            )

    @functools.cached_property
    def piece(self) -> Piece:
        """What this rank owns; nothing of a tensor of another pipeline stage."""
        return self.pieces[self.axis.index] if self.placement.is_here(self.mesh) else Piece(0, 0, 0)

    @property
    def users(self) -> Axis:
        """The ranks that may compute with this tensor, in all pipeline stages."""
        return self.mesh.shard_axis(tensor_parallel=self.placement.tensor_parallel, pipelined=False)

    def is_like(self, other: Cut) -> bool:
        """Whether every rank owns the same elements of tensors cut in these two ways."""
        return self is other or self._key == other._key

    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        spans = tuple((piece.start, piece.stop) for piece in self.pieces)
        return (
            self.shape,
            self.whole_shape,
            None if self.split is None else self.split.dim,
            spans,
            self.axis.ranks,
            self.placement,
        )

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's 1-D slice of a tensor of this shape.

        Differentiable; a view where possible.
        """
        return x.reshape(-1)[self.piece.start : self.piece.stop]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This tensor rank's part of a tensor of the whole shape, as a view."""
        if self.split is None:
            return x
        length = self.shape[self.split.dim]
        return x.narrow(self.split.dim, self.split.index * length, length)

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """The tensor, gathered from the slices `local` of all ranks. Collective over the run."""
        self.note("gather", self.axis)
        out = self._of_axis(local)
        if self.placement.stage is not None:
            collectives.broadcast_(out, self.placement.stage, self.mesh.pipe)
        return out

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The same with the tensor-parallel split undone."""
        part = self.gathered(local)
        return (
            part
            if self.split is None
            else torch.cat(list(collectives.all_gather(part, self.mesh.tp)), self.split.dim)
        )

    def _of_axis(self, local: torch.Tensor) -> torch.Tensor:
        if not self.placement.is_here(self.mesh):
            return local.new_empty(self.shape)
        if self.axis.size == 1:
            return local.clone().view(self.shape)
        sizes = [piece.numel for piece in self.pieces]
        padded = local.new_zeros(max(1, *sizes))
        padded[: local.numel()] = local
        # As bytes: not every backend supports every dtype.
        rows = collectives.all_gather(padded.view(torch.uint8), self.axis).view(local.dtype)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).view(
            self.shape
        )
