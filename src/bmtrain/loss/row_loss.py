"""The loss of one row of logits as arithmetic on a few numbers per row, whoever has summed over the
classes.

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

from bmtrain.kernels import cross_entropy as kernels
from bmtrain.kernels.cross_entropy import RowFactors, RowSums
from bmtrain.loss.columns import Columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLoss:
    """What decides the loss of one row: class weights (V,) in the arithmetic dtype or None, the
    share of smoothing, and where classes are.
    """

    weight: torch.Tensor | None
    label_smoothing: float
    columns: Columns

    @property
    def smoothed(self) -> bool:
        """Whether classes other than the target's count."""
        return self.label_smoothing > 0

    def of_targets(self, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Weight of every row (rows,): that of its target's class, and 0 where it is not valid."""
        return valid.float() if self.weight is None else self.weight[target] * valid

    def of_columns(self) -> torch.Tensor | None:
        """The weights of the classes that have a column here (columns,), None for 1 each."""
        return None if self.weight is None else self.columns.own(self.weight)

    def sums(self, logits: torch.Tensor) -> RowSums:
        """Over the columns that are here."""
        return kernels.row_sums(logits, self.of_columns(), smoothed=self.smoothed)

    def losses(
        self, sums: RowSums, scores: torch.Tensor, target: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Loss of every row (rows,) from sums over all columns and x_y - m of its class y; 0 where
        it is not valid.
        """
        log_sum = sums.sum_exp.log()
        loss = self.of_targets(target, valid) * (log_sum - scores)
        if self.smoothed:
            spread = self._total_weight() * log_sum - sums.below
            loss = (
                1 - self.label_smoothing
            ) * loss + self.label_smoothing / self.columns.total * spread
        # Not a product with `valid`: an infinite logit in an ignored row must not make it NaN.
        return torch.where(valid, loss, 0.0)

    def factors(
        self, grad_rows: torch.Tensor, target: torch.Tensor, valid: torch.Tensor
    ) -> RowFactors:
        """What makes the gradient of the logits, from that of the losses (rows,), 0 where a row is
        not valid.
        """
        hit, column = grad_rows * self.of_targets(target, valid), self.columns.place(target)
        if not self.smoothed:
            return RowFactors(hit, hit, hit, column)
        hit, smooth = (
            hit * (1 - self.label_smoothing),
            grad_rows * (self.label_smoothing / self.columns.total),
        )
        return RowFactors(hit + smooth * self._total_weight(), smooth, hit, column)

    def own_weight(self) -> float | torch.Tensor:
        """The sum of the weights of the classes that have a column here."""
        return self.columns.count if self.weight is None else self.columns.own(self.weight).sum()

    def _total_weight(self) -> float | torch.Tensor:
        """W."""
        return self.columns.total if self.weight is None else self.weight.sum()
