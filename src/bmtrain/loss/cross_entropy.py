"""Cross entropy in fp32 arithmetic that never holds an fp32 copy of half-precision logits.

Kept for backward are the logits x and, of every row, m = max_c x_c and s = sum_c exp(x_c - m).
Where the vocabulary is split over tensor-parallel ranks, m and s are those of all ranks' columns;
of the logits nothing travels.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmtrain.distributed import tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.kernels.cross_entropy import RowSums, row_gradient
from bmtrain.loss.columns import columns_of
from bmtrain.loss.module import DTYPES, ClassLoss, describe, names
from bmtrain.loss.row_loss import RowLoss
from bmtrain.runtime import world


class CrossEntropyRows(torch.autograd.Function):
    """Loss of every row (rows,) in fp32 of logits (rows, columns).

    Rows where `valid` is false have the loss 0 and a zero gradient. With a split vocabulary every
    tensor-parallel rank gets the same losses; gradients are those of the sum of what all ranks make
    of them.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, valid: torch.Tensor, row_loss: RowLoss
    ) -> torch.Tensor:
        """Logits in any floating dtype, target (rows,) int64 in [0, V) also where not valid, valid
        (rows,) bool.
        """
        own_scores = row_loss.columns.scores(logits, target)
        sums, scores = row_loss.columns.join(
            row_loss.sums(logits), own_scores, row_loss.own_weight()
        )
        ctx.save_for_backward(logits, sums.highest, sums.sum_exp, target, valid)
        ctx.row_loss = row_loss
        return row_loss.losses(sums, scores, target, valid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the logits (rows, columns) in their dtype, rounded once."""
        logits, highest, sum_exp, target, valid = ctx.saved_tensors
        row_loss: RowLoss = ctx.row_loss
        factors = row_loss.factors(
            row_loss.columns.sum(torch.where(valid, grad_rows, 0.0)), target, valid
        )
        sums = RowSums(highest, sum_exp, highest)
        grad = row_gradient(
            logits, sums, factors, row_loss.of_columns(), smoothed=row_loss.smoothed
        )
        return grad, None, None, None


class FusedCrossEntropy(ClassLoss):
    """As `torch.nn.CrossEntropyLoss` for class indices, with fp32 arithmetic and an fp32 result for
    every logits dtype.

    The mean over a batch in which no target is valid is NaN, as in torch, and its gradient is zero:
    such a batch changes nothing.

    Args:
        weight: weights of the classes (V,), or None for 1 each; kept as a buffer.
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the valid rows, weighted by their classes; "sum"; or "none" for a
            loss per row.
        label_smoothing: share in [0, 1] of the target that is spread evenly over all classes.
        parallel: the logits are this rank's part of a vocabulary split over the tensor-parallel
            ranks in equal parts, as VPEmbedding(projection=True) and ColumnParallelLinear give
            them. Rows, targets and class weights are the same on all those ranks, and so is the
            loss; its gradients are those of the sum of all ranks' losses. Collective.

    Raises:
        ConfigurationError: an argument that cannot be meant.
        NotInitializedError: `parallel=True` before `init_distributed`.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
    ) -> None:
        if parallel:
            world.current("FusedCrossEntropy(parallel=True)")
        super().__init__(weight, ignore_index, reduction, label_smoothing)
        self.parallel = parallel

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of logits `input` (rows, V) for class indices `target` (rows,).

        Args:
            input: fp32, fp16, bf16 or fp64; the gradient has the same dtype. With `parallel` (rows,
                V / tp_size).
            target: any integer dtype, in [0, V) or `ignore_index`. One out of range is an error
                that names it on a CPU; on a GPU it stops the kernel that reads it, as with torch.

        Returns:
            A scalar, or (rows,) for reduction "none", in fp32 (fp64 for fp64).

        Raises:
            ConfigurationError: shapes, dtypes, devices or targets that do not fit; with `parallel`
                also ranks that do not match, on all of them (targets are compared on a CPU only,
                and nothing under torch.compile but the number of rows).
        """
        columns = columns_of(input.shape[-1] if input.dim() else 0, parallel=self.parallel)
        if columns.count < columns.total and not torch.compiler.is_compiling():
            self._check_together(input, target, columns.total)
        else:
            self._check(input, target, columns.total)
        target, valid = self.classes_of(target)
        row_loss = self.row_loss(columns, input.dtype)
        # Autocast would turn parts of the arithmetic to half precision again.
        with torch.autocast(input.device.type, enabled=False):
            losses: torch.Tensor = CrossEntropyRows.apply(input, target, valid, row_loss)
        if self.reduction == "none":
            return losses
        return (
            losses.sum()
            if self.reduction == "sum"
            else self.average(losses.sum(), row_loss, target, valid)
        )

    def extra_repr(self) -> str:
        """Arguments other than the weights, for printing."""
        return f"{super().extra_repr()}, parallel={self.parallel}"

    def _check_together(self, logits: torch.Tensor, target: torch.Tensor, num_classes: int) -> None:
        """What one tensor-parallel rank refuses, all refuse; and they refuse to be different."""
        problem = ""
        try:
            self._check(logits, target, num_classes)
        except ConfigurationError as error:
            problem = str(error)
        told = (
            f"logits {describe(logits)}, target {describe(target)}, {problem or 'well by itself'}"
        )
        if not problem and target.device.type == "cpu":
            told += f", digest of the targets {zlib.crc32(target.contiguous().numpy().tobytes()):x}"
        tensor_parallel.check_alike("FusedCrossEntropy", told)
        if problem:
            raise ConfigurationError(problem)

    def _check(self, logits: torch.Tensor, target: torch.Tensor, num_classes: int) -> None:
        if logits.dim() != 2 or logits.dtype not in DTYPES or logits.shape[1] == 0:
            raise ConfigurationError(
                f"logits: got {describe(logits)}, expected (rows, classes) in {names(*DTYPES)}; "
                "flatten leading dimensions: logits.view(-1, logits.shape[-1])."
            )
        self.check_target(target, logits, num_classes)
