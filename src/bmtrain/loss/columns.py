"""Which classes the columns of the logits stand for: all of them, or this rank's part of a split
vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch

from bmtrain.distributed import tensor_parallel
from bmtrain.kernels.cross_entropy import RowSums, score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(ABC):
    """The columns are the classes `first` to `first + count - 1` of `total`."""

    first: int
    count: int
    total: int

    @abstractmethod
    def scores(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The logit of every row's class, x_y (rows,) in the arithmetic dtype; 0 where it is not
        among these columns.
        """

    @abstractmethod
    def join(
        self, sums: RowSums, scores: torch.Tensor, weight: float | torch.Tensor
    ) -> tuple[RowSums, torch.Tensor]:
        """From sums and scores of these columns (rows,) those of all; the scores, relative to the
        maximum then.

        Args:
            weight: sum of the class weights of these columns.
        """

    @abstractmethod
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that have a part of the columns: (rows,)."""

    @abstractmethod
    def place(self, target: torch.Tensor) -> torch.Tensor:
        """The column of every row's class (rows,) int64, -1 where it is not among these."""

    def own(self, per_class: torch.Tensor) -> torch.Tensor:
        """Of one value per class (total,) those of these columns (count,)."""
        return per_class.narrow(0, self.first, self.count)


class AllColumns(Columns):
    """Every class has its column here."""

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
    """The other classes have theirs on the other tensor-parallel ranks.

    Collective; what travels is a number or so per row.
    """

    def scores(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        column = self.place(target)
        return torch.where(column < 0, 0.0, score(logits, column.clamp(min=0)))

    def join(
        self, sums: RowSums, scores: torch.Tensor, weight: float | torch.Tensor
    ) -> tuple[RowSums, torch.Tensor]:
        highest = tensor_parallel.all_reduce(sums.highest, "max")
        # Where all of these columns are masked, `below` is relative to 0, as RowSums says.
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
    """What `count` columns are: all classes, or this rank's part of those of the tensor-parallel
    group.
    """
    axis = tensor_parallel.axis() if parallel else None
    if axis is None or axis.size == 1:
        return AllColumns(first=0, count=count, total=count)
    return OwnColumns(first=axis.index * count, count=count, total=axis.size * count)
