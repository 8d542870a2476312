"""How one tensor is cut into the slices of ranks, and how it is put together again. Collectives on plain tensors, outside autograd."""

from __future__ import annotations

import dataclasses
import functools

import torch

from bmtrain.distributed import collectives
from bmtrain.runtime.mesh import Axis, Mesh
from bmtrain.shard.layout import Layout, Piece, Split
from bmtrain.shard.placement import Placement


@dataclasses.dataclass(frozen=True)
class Cut:
    """The slices of one tensor: slot `index` of a layout, its tensor-parallel split undone.

    Equal cuts give every rank the same elements, whichever storage they belong to; ranks agree on whether two cuts are equal.

    Attributes:
        shape: of the whole tensor.
        part_shape, split: of this tensor rank's part of it.
        pieces: what each rank of the axis owns of the flattened part.
        axis, placement: the ranks that own slices of this part, and where the others are.
    """

    shape: torch.Size
    part_shape: torch.Size
    split: Split | None
    pieces: tuple[Piece, ...]
    axis: Axis
    placement: Placement
    mesh: Mesh

    @classmethod
    def of(cls, layout: Layout, index: int, axis: Axis, placement: Placement, mesh: Mesh) -> Cut:
        """That of slot `index`."""
        slot = layout.slots[index]
        pieces = tuple(layout.piece(index, place) for place in range(layout.num_shards))
        return cls(torch.Size(slot.whole_shape), torch.Size(slot.shape), slot.split, pieces, axis, placement, mesh)

    @functools.cached_property
    def piece(self) -> Piece:
        """What this rank owns; nothing of a tensor of another pipeline stage."""
        return self.pieces[self.axis.index] if self.placement.is_here(self.mesh) else Piece(0, 0, 0)

    def is_like(self, other: Cut) -> bool:
        """Whether all ranks own the same elements of tensors cut in these two ways."""
        return self is other or self._key == other._key

    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        spans = tuple((piece.start, piece.stop) for piece in self.pieces)
        return self.shape, self.part_shape, None if self.split is None else self.split.dim, spans, self.axis.ranks, self.placement

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This tensor rank's part of a tensor of the whole's shape. Differentiable, a view."""
        if self.split is None:
            return whole
        length = self.part_shape[self.split.dim]
        return whole.narrow(self.split.dim, self.split.index * length, length)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice, 1-D, of a tensor of the whole's shape. Differentiable; a view where it can be one."""
        return self.part(whole).reshape(-1)[self.piece.start : self.piece.stop]

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, of which every rank brings its slice `local`. Collective over the run."""
        part = self._part(local)
        if self.placement.stage is not None:
            collectives.broadcast_(part, self.placement.stage, self.mesh.pipe)
        if not self.placement.tensor_parallel:
            return part
        parts = collectives.all_gather(part, self.mesh.tp)
        return parts[0] if self.split is None else torch.cat(list(parts), self.split.dim)

    def _part(self, local: torch.Tensor) -> torch.Tensor:
        if not self.placement.is_here(self.mesh):
            return local.new_empty(self.part_shape)
        if self.axis.size == 1:
            return local.clone().view(self.part_shape)
        sizes = [piece.numel for piece in self.pieces]
        padded = local.new_zeros(max(1, *sizes))
        padded[: local.numel()] = local
        # Bytes travel: not every backend moves every dtype.
        rows = collectives.all_gather(padded.view(torch.uint8), self.axis).view(local.dtype)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).view(self.part_shape)
