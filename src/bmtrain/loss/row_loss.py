"""The loss of one row of logits and its gradient, from sums over the classes.

For logits x (rows, V), target y, class weights w (1 by default) and label smoothing eps, a row's
loss is

    (1 - eps) w_y (z - x_y) + eps/V sum_c w_c (z - x_c)          with z = log sum_c exp(x_c),

and with W = sum_c w_c its gradient is

    p_c ((1 - eps) w_y + eps/V W) - eps/V w_c - [c = y] (1 - eps) w_y      with p_c = exp(x_c - z),

as in torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

import dataclasses

import torch

from bmtrain.distributed import tensor_parallel
from bmtrain.kernels.cross_entropy import RowFactors, RowSums, row_sums, score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """The classes of the logits' columns: `first` to `first + count - 1` of `total`.

    All of them, or this rank's part of a vocabulary that is split over the tensor-parallel ranks.
    """

    first: int
    count: int
    total: int

    @property
    def are_split(self) -> bool:
        """Whether other ranks have the columns of other classes."""
        return self.count < self.total

    def place(self, target: torch.Tensor) -> torch.Tensor:
        """The column of each row's target class, (rows,) int64; -1 if it is not among these."""
        if not self.are_split:
            return target
        column = target - self.first
        return torch.where((column >= 0) & (column < self.count), column, -1)


def columns_of(count: int, *, parallel: bool) -> Columns:
    """The classes of `count` columns: all of them, or with `parallel` this rank's part."""
    axis = tensor_parallel.axis() if parallel else None
    if axis is None:
        return Columns(first=0, count=count, total=count)
    return Columns(first=axis.index * count, count=count, total=axis.size * count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLoss:
    """The loss function of one row.

    Attributes:
        weight: class weights (V,) in the arithmetic dtype, or None for 1 each.
        label_smoothing: the share of the target that is spread evenly over all classes.
        columns: the classes that this rank's columns stand for.
    """

    weight: torch.Tensor | None
    label_smoothing: float
    columns: Columns

    @property
    def smoothed(self) -> bool:
        """Whether the loss depends on classes other than the target directly."""
        return self.label_smoothing > 0

    def of_targets(self, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """The weight of each row (rows,): its target's class weight, or 0 if it is not valid."""
        return valid.float() if self.weight is None else self.weight[target] * valid

    def of_columns(self) -> torch.Tensor | None:
        """The class weights of this rank's columns (columns,), or None for 1 each."""
        columns = self.columns
        return None if self.weight is None else self.weight.narrow(0, columns.first, columns.count)

    def sums_and_scores(
        self, logits: torch.Tensor, target: torch.Tensor
    ) -> tuple[RowSums, torch.Tensor]:
        """Sums over all columns, and x_y - m for the target class y of each row, (rows,).

        Collective if the columns are split: at most three numbers per row are communicated at a
        time, never logits.
        """
        weights, column = self.of_columns(), self.columns.place(target)
        sums = row_sums(logits, weights, smoothed=self.smoothed)
        if not self.columns.are_split:
            return sums, score(logits, target) - sums.highest
        scores = torch.where(column < 0, 0.0, score(logits, column.clamp(min=0)))
        highest = tensor_parallel.all_reduce(sums.highest, "max")
        # Where all of these columns are -inf, `below` is relative to 0 (see RowSums).
        base = torch.where(sums.highest == -torch.inf, 0.0, sums.highest)
        weight = self.columns.count if weights is None else weights.sum()
        moved = torch.stack(
            [
                sums.sum_exp * (sums.highest - highest).exp(),
                sums.below + weight * (base - highest),
                scores,
            ]
        )
        sum_exp, below, scores = tensor_parallel.all_reduce(moved, "sum").unbind(0)
        return RowSums(highest, sum_exp, below), scores - highest

    def losses(
        self, sums: RowSums, scores: torch.Tensor, target: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """The loss of each row (rows,), 0 if it is not valid.

        Args:
            sums: sums over all columns.
            scores: x_y - m for the target class y of each row.
        """
        log_sum = sums.sum_exp.log()
        loss = self.of_targets(target, valid) * (log_sum - scores)
        if self.smoothed:
            total = self.columns.total if self.weight is None else self.weight.sum()
            spread = total * log_sum - sums.below
            share = self.label_smoothing / self.columns.total
            loss = (1 - self.label_smoothing) * loss + share * spread
        # Multiplying by `valid` instead would give NaN for an ignored row with an infinite logit.
        return torch.where(valid, loss, 0.0)

    def factors(
        self, grad_rows: torch.Tensor, target: torch.Tensor, valid: torch.Tensor
    ) -> RowFactors:
        """The factors of the logits' gradient.

        Args:
            grad_rows: the gradient of the losses (rows,), 0 for rows that are not valid.
        """
        hit, column = grad_rows * self.of_targets(target, valid), self.columns.place(target)
        if not self.smoothed:
            return RowFactors(hit, hit, hit, column)
        hit = hit * (1 - self.label_smoothing)
        smooth = grad_rows * (self.label_smoothing / self.columns.total)
        total = self.columns.total if self.weight is None else self.weight.sum()
        return RowFactors(hit + smooth * total, smooth, hit, column)
