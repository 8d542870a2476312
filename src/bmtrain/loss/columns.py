"""The classes of the logits' columns: all, or this rank's part of a tensor-parallel vocabulary."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch

from bmtrain.distributed import tensor_parallel
from bmtrain.kernels.cross_entropy import RowSums, score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(ABC):
    """A mapping of columns to classes: `first` to `first + count - 1` of `total`."""

    first: int
    count: int
    total: int

    @abstractmethod
    def scores(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The logit x_y of each row's target class, (rows,) in the arithmetic dtype.

        0 for rows whose target class is not among these columns.
        """

    @abstractmethod
    def join(
        self, sums: RowSums, scores: torch.Tensor, weight: float | torch.Tensor
    ) -> tuple[RowSums, torch.Tensor]:
        """Combine sums and scores (rows,) of these columns to those of all columns.

        The combined scores are relative to the maximum.

        Args:
            weight: the sum of the class weights of these columns.
        """

    @abstractmethod
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` (rows,) over the ranks that share the columns: (rows,)."""

    @abstractmethod
    def place(self, target: torch.Tensor) -> torch.Tensor:
        """The column of each row's target class, (rows,) int64; -1 if it is not among these."""

    def own(self, per_class: torch.Tensor) -> torch.Tensor:
        """The values of these columns (count,) out of one value per class (total,)."""
        return per_class.narrow(0, self.first, self.count)


class AllColumns(Columns):
    """All classes have their columns on this rank."""

    def scores(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return score(logits, target)

    def join(
        self, sums: RowSums, scores: torch.Tensor, weight: float | torch.Tensor
    ) -> tuple[RowSums, torch.Tensor]:
        return sums, scores - sums.highest

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def place(self, target: torch.Tensor) -> torch.Tensor:
        return target


class OwnColumns(Columns):
    """This rank's part of a vocabulary that is split over the tensor-parallel ranks.

    Collective. At most three numbers per row are communicated at a time, never logits.
    """

    def scores(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        column = self.place(target)
        return torch.where(column < 0, 0.0, score(logits, column.clamp(min=0)))

    def join(
        self, sums: RowSums, scores: torch.Tensor, weight: float | torch.Tensor
    ) -> tuple[RowSums, torch.Tensor]:
        highest = tensor_parallel.all_reduce(sums.highest, "max")
        # Where all of these columns are -inf, `below` is relative to 0 (see RowSums).
        base = torch.where(sums.highest == -torch.inf, 0.0, sums.highest)
        moved = torch.stack(
            [
                sums.sum_exp * (sums.highest - highest).exp(),
                sums.below + weight * (base - highest),
                scores,
            ]
        )
        sum_exp, below, scores = tensor_parallel.all_reduce(moved, "sum").unbind(0)
        return RowSums(highest, sum_exp, below), scores - highest

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return tensor_parallel.all_reduce(values, "sum")

    def place(self, target: torch.Tensor) -> torch.Tensor:
        column = target - self.first
        return torch.where((column >= 0) & (column < self.count), column, -1)


def columns_of(count: int, *, parallel: bool) -> Columns:
    """The classes of `count` columns: all of them, or with `parallel` this rank's part."""
    axis = tensor_parallel.axis() if parallel else None
    if axis is None or axis.size == 1:
        return AllColumns(first=0, count=count, total=count)
    return OwnColumns(first=axis.index * count, count=count, total=axis.size * count)
