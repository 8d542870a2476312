"""Cross entropy in fp32 arithmetic without an fp32 copy of half-precision logits.

Saved for backward are the logits x and, for each row, m = max_c x_c and s = sum_c exp(x_c - m). If
the vocabulary is split over tensor-parallel ranks, m and s are those of all ranks' columns; logits
are not communicated.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmtrain.distributed import tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.kernels.cross_entropy import RowSums, row_gradient
from bmtrain.loss.module import DTYPES, ClassLoss, describe, names
from bmtrain.loss.row_loss import RowLoss, columns_of
from bmtrain.runtime import world
from bmtrain.runtime.arguments import FLAG, check


class CrossEntropyRows(torch.autograd.Function):
    """The loss of each row (rows,) of logits (rows, columns), in the arithmetic dtype.

    Rows for which `valid` is false have loss 0 and zero gradient. With a split vocabulary, all
    tensor-parallel ranks get the same losses, and gradients are those of the sum of all ranks'
    functions of them.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, valid: torch.Tensor, row_loss: RowLoss
    ) -> torch.Tensor:
        """Logits of any floating dtype; target (rows,) int64 in [0, V) in all rows; valid (rows,).

        `valid` is bool. The target of a row that is not valid must still be in range.
        """
        sums, scores = row_loss.sums_and_scores(logits, target)
        ctx.save_for_backward(logits, sums.highest, sums.sum_exp, target, valid)
        ctx.row_loss = row_loss
        return row_loss.losses(sums, scores, target, valid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the logits (rows, columns) in their dtype, rounded once."""
        logits, highest, sum_exp, target, valid = ctx.saved_tensors
        row_loss: RowLoss = ctx.row_loss
        grad_rows = torch.where(valid, grad_rows, 0.0)
        if row_loss.columns.are_split:
            grad_rows = tensor_parallel.all_reduce(grad_rows, "sum")
        factors = row_loss.factors(grad_rows, target, valid)
        sums, weight = RowSums(highest, sum_exp, highest), row_loss.of_columns()
        grad = row_gradient(logits, sums, factors, weight, smoothed=row_loss.smoothed)
        return grad, None, None, None


class FusedCrossEntropy(ClassLoss):
    """`torch.nn.CrossEntropyLoss` for class indices, in fp32 arithmetic and with an fp32 result.

    For fp64 logits, arithmetic and result are fp64. The mean over a batch without a valid target is
    NaN, as in torch, but its gradient is zero, so such a batch has no effect on training.

    Args:
        weight: weights of the classes (V,), or None for 1 each; kept as a buffer.
        ignore_index: the target of rows to ignore.
        reduction: "mean" over the valid rows, weighted by their classes; "sum"; or "none" for a
            loss per row.
        label_smoothing: the share in [0, 1] of the target that is spread evenly over all classes.
        parallel: the logits are this rank's part of a vocabulary split over the tensor-parallel
            ranks in equal parts, as VPEmbedding(projection=True) and ColumnParallelLinear return
            them. Rows, targets and class weights must be the same on all of these ranks, and the
            loss is the same; its gradients are those of the sum of all ranks' losses. Collective.
        inplace: of BMTrain 0.1 and 0.2, without effect: the logits keep their values.

    Raises:
        ConfigurationError: for an invalid argument.
        NotInitializedError: for `parallel=True` before `init_distributed`.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
        *,
        inplace: bool = False,
    ) -> None:
        check("FusedCrossEntropy", parallel=(parallel, FLAG))
        if parallel:
            world.current("FusedCrossEntropy(parallel=True)")
        super().__init__(weight, ignore_index, reduction, label_smoothing)
        self.parallel = parallel

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of logits `input` (rows, V) for class indices `target` (rows,).

        Args:
            input: fp32, fp16, bf16 or fp64; the gradient has the same dtype. With `parallel` (rows,
                V / tp_size).
            target: any integer dtype, in [0, V) or `ignore_index`. A target out of range raises an
                error with its value on a CPU; on a GPU it triggers a device-side assert, as in
                torch.

        Returns:
            A scalar, or (rows,) for reduction "none", in fp32 (fp64 for fp64 logits).

        Raises:
            ConfigurationError: for shapes, dtypes, devices or targets that do not fit; with
                `parallel` also on all ranks if their arguments differ (targets are compared on a
                CPU only, and under torch.compile only the number of rows is).
        """
        columns = columns_of(input.shape[-1] if input.dim() else 0, parallel=self.parallel)
        if columns.are_split and not torch.compiler.is_compiling():
            self._check_together(input, target, columns.total)
        else:
            self._check(input, target, columns.total)
        target, valid = self.classes_of(target)
        row_loss = self.row_loss(columns, input.dtype)
        # Autocast would run parts of the arithmetic in half precision.
        with torch.autocast(input.device.type, enabled=False):
            losses: torch.Tensor = CrossEntropyRows.apply(input, target, valid, row_loss)
        if self.reduction == "none":
            return losses
        if self.reduction == "sum":
            return losses.sum()
        return self.average(losses.sum(), row_loss, target, valid)

    def extra_repr(self) -> str:
        """The arguments other than the class weights, for printing."""
        return f"{super().extra_repr()}, parallel={self.parallel}"

    def _check_together(self, logits: torch.Tensor, target: torch.Tensor, num_classes: int) -> None:
        """Check the arguments on all tensor-parallel ranks. Collective.

        All ranks raise if one of them has invalid arguments, or if they differ: a rank that raised
        alone would leave the others hanging in the loss's collectives.
        """
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
