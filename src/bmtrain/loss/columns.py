"""Which classes the columns of the logits stand for: all of them, or this rank's part of a split vocabulary."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch

from bmtrain.distributed import tensor_parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(ABC):
    """The columns are the classes `first` to `first + count - 1` of `total`."""

    first: int
    count: int
    total: int

    @abstractmethod
    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over all columns, given the largest over these: (rows,)."""

    @abstractmethod
    def sums(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sums over all columns, given those over these, each (rows,)."""

    @abstractmethod
    def place(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The column of every row's class (rows,) int64, and whether it is among these (rows,) bool: 0 where it is not."""

    def own(self, per_class: torch.Tensor) -> torch.Tensor:
        """Of one value per class (total,) those of these columns (count,)."""
        return per_class.narrow(0, self.first, self.count)


class AllColumns(Columns):
    """Every class has its column here."""

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def sums(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values

    def place(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return target, torch.ones_like(target, dtype=torch.bool)


class OwnColumns(Columns):
    """The other classes have theirs on the other tensor-parallel ranks. Collective; what travels is a number or so per row."""

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return tensor_parallel.all_reduce(values, "max")

    def sums(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor_parallel.all_reduce(torch.stack(values), "sum").unbind(0)

    def place(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        column = target - self.first
        here = (column >= 0) & (column < self.count)
        return torch.where(here, column, 0), here


def columns_of(count: int, *, parallel: bool) -> Columns:
    """What `count` columns are: all classes, or this rank's part of those of the tensor-parallel group."""
    axis = tensor_parallel.axis() if parallel else None
    if axis is None or axis.size == 1:
        return AllColumns(first=0, count=count, total=count)
    return OwnColumns(first=axis.index * count, count=count, total=axis.size * count)
