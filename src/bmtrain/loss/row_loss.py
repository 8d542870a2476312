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

from bmtrain.kernels import cross_entropy as kernels
from bmtrain.kernels.cross_entropy import RowFactors, RowSums
from bmtrain.loss.columns import Columns


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
        return None if self.weight is None else self.columns.own(self.weight)

    def sums(self, logits: torch.Tensor) -> RowSums:
        """The sums of each row over this rank's columns."""
        return kernels.row_sums(logits, self.of_columns(), smoothed=self.smoothed)

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
            spread = self._total_weight() * log_sum - sums.below
            loss = (
                1 - self.label_smoothing
            ) * loss + self.label_smoothing / self.columns.total * spread
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
        hit, smooth = (
            hit * (1 - self.label_smoothing),
            grad_rows * (self.label_smoothing / self.columns.total),
        )
        return RowFactors(hit + smooth * self._total_weight(), smooth, hit, column)

    def own_weight(self) -> float | torch.Tensor:
        """The sum of the class weights of this rank's columns."""
        return self.columns.count if self.weight is None else self.columns.own(self.weight).sum()

    def _total_weight(self) -> float | torch.Tensor:
        """W, the sum of all class weights."""
        return self.columns.total if self.weight is None else self.weight.sum()
