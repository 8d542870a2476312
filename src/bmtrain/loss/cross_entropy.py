"""Cross entropy in fp32 arithmetic that never holds an fp32 copy of half-precision logits.

For logits x (rows, V), target y, class weights w (1 by default) and label smoothing eps, a row's loss is

    (1 - eps) w_y (z - x_y) + eps/V sum_c w_c (z - x_c)          with z = log sum_c exp(x_c),

and with W = sum_c w_c its gradient is

    p_c ((1 - eps) w_y + eps/V W) - eps/V w_c - [c = y] (1 - eps) w_y      with p_c = exp(x_c - z),

as in torch.nn.functional.cross_entropy. Kept for backward are x and, of every row, m = max_c x_c and
s = sum_c exp(x_c - m). z = m + log s itself is never formed: beside a large m it would lose the digits of log s.

Where the vocabulary is split over tensor-parallel ranks, m and the sums over c are those of all ranks' columns; of the logits
nothing travels.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmtrain.distributed import tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.loss.columns import Columns, columns_of
from bmtrain.runtime import world

# Elements of the fp32 scratch memory. On a CPU 1 MiB: it stays in the cache. Elsewhere 32 MiB: small beside the logits
# of a training step, large beside the start of a kernel.
CPU_CHUNK_NUMEL = 2**18
CHUNK_NUMEL = 2**23

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = ("mean", "sum", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLoss:
    """What decides the loss of one row: class weights (V,) in fp32 or None, the share of smoothing, and where classes are."""

    weight: torch.Tensor | None
    label_smoothing: float
    columns: Columns

    def of_targets(self, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Weight of every row (rows,) fp32: that of its target's class, and 0 where it is not valid."""
        return valid.float() if self.weight is None else self.weight[target] * valid

    def total_weight(self) -> float | torch.Tensor:
        """W, the sum of all class weights."""
        return self.columns.total if self.weight is None else self.weight.sum()

    def of_columns(self) -> float | torch.Tensor:
        """The weights of the classes that have a column here: (columns,), or 1 for each."""
        return 1.0 if self.weight is None else self.columns.own(self.weight)

    def over_columns(self, values: torch.Tensor) -> torch.Tensor:
        """`sum_c w_c values_c` (rows,) over the columns of values (rows, columns) in fp32."""
        return values.sum(1) if self.weight is None else (values * self.of_columns()).sum(1)


class CrossEntropyRows(torch.autograd.Function):
    """Loss of every row (rows,) in fp32 of logits (rows, columns).

    Rows where `valid` is false have the loss 0, and a zero gradient as long as their logits are finite. With a split
    vocabulary every tensor-parallel rank gets the same losses; gradients are those of the sum of what all ranks make of them.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, valid: torch.Tensor, row_loss: RowLoss) -> torch.Tensor:
        """Logits in any floating dtype, target (rows,) int64 in [0, V) also where not valid, valid (rows,) bool."""
        smoothing, columns = row_loss.label_smoothing, row_loss.columns
        highest = columns.maximum(logits.amax(1).to(_arithmetic(logits)))
        sum_exp, below = torch.empty_like(highest), torch.zeros_like(highest)
        for rows in _row_chunks(logits):
            # Two tensors of different dtype subtract in the wider one, without a converted copy of the logits.
            differences = torch.sub(logits[rows], highest[rows, None])
            if smoothing:
                below[rows] = row_loss.over_columns(differences)
            sum_exp[rows] = differences.exp_().sum(1)
        column, here = columns.place(target)
        sum_exp, below, picked = columns.sums(sum_exp, below, torch.where(here, _picked(logits, column) - highest, 0.0))
        log_sum = sum_exp.log()
        loss = (1 - smoothing) * row_loss.of_targets(target, valid) * (log_sum - picked)
        if smoothing:
            loss += smoothing / columns.total * (row_loss.total_weight() * log_sum - below)
        ctx.save_for_backward(logits, highest, sum_exp, target, valid)
        ctx.row_loss = row_loss
        # Not a product with `valid`: an infinite logit in an ignored row must not make it NaN.
        return torch.where(valid, loss, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the logits (rows, columns) in their dtype, rounded once."""
        logits, highest, sum_exp, target, valid = ctx.saved_tensors
        row_loss: RowLoss = ctx.row_loss
        columns = row_loss.columns
        (grad_rows,) = columns.sums(torch.where(valid, grad_rows, 0.0))
        hit = grad_rows * (1 - row_loss.label_smoothing) * row_loss.of_targets(target, valid)
        smooth = grad_rows * (row_loss.label_smoothing / columns.total)
        spread = (hit + smooth * row_loss.total_weight()) / sum_exp
        grad = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            part = torch.sub(logits[rows], highest[rows, None]).exp_().mul_(spread[rows, None])
            if row_loss.label_smoothing:
                part -= smooth[rows, None] * row_loss.of_columns()
            grad[rows] = part
        # The target's column is worked out apart in fp32 and written over: subtracting from the stored half-precision
        # gradient would round twice, and an fp32 one-hot matrix is what this file avoids.
        column, here = columns.place(target)
        at_target = spread * torch.exp(_picked(logits, column) - highest) - hit
        if row_loss.label_smoothing:
            at_target -= smooth * (1.0 if row_loss.weight is None else row_loss.weight[target])
        grad.scatter_(1, column[:, None], torch.where(here, at_target.to(grad.dtype), _picked(grad, column))[:, None])
        return grad, None, None, None


class FusedCrossEntropy(torch.nn.Module):
    """As `torch.nn.CrossEntropyLoss` for class indices, with fp32 arithmetic and an fp32 result for every logits dtype.

    A batch in which no target is valid gives 0 with a zero gradient (torch: NaN).

    Args:
        weight: weights of the classes (V,), or None for 1 each; kept as a buffer.
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the valid rows, weighted by their classes; "sum"; or "none" for a loss per row.
        label_smoothing: share in [0, 1] of the target that is spread evenly over all classes.
        parallel: the logits are this rank's part of a vocabulary split over the tensor-parallel ranks in equal parts, as
            VPEmbedding(projection=True) and ColumnParallelLinear give them. Rows, targets and class weights are the same on all
            those ranks, and so is the loss; its gradients are those of the sum of all ranks' losses. Collective.

    Raises:
        ConfigurationError: an argument that cannot be meant.
        NotInitializedError: `parallel=True` before `init_distributed`.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        if parallel:
            world.current("FusedCrossEntropy(parallel=True)")
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduction: got {reduction!r}, expected one of {REDUCTIONS}; choose one of them.")
        if not 0 <= label_smoothing <= 1:
            raise ConfigurationError(f"label_smoothing: got {label_smoothing}, expected a share between 0 and 1; 0 means none.")
        if weight is not None and (weight.dim() != 1 or not weight.is_floating_point()):
            raise ConfigurationError(
                f"weight: got {_describe(weight)}, expected a floating-point tensor of shape (classes,); give one weight per class."
            )
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.parallel = parallel

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of logits `input` (rows, V) for class indices `target` (rows,).

        Args:
            input: fp32, fp16, bf16 or fp64; the gradient has the same dtype. With `parallel` (rows, V / tp_size).
            target: any integer dtype, in [0, V) or `ignore_index`. One out of range is an error that names it on a CPU;
                on a GPU it stops the kernel that reads it, as with torch.

        Returns:
            A scalar, or (rows,) for reduction "none", in fp32 (fp64 for fp64).

        Raises:
            ConfigurationError: shapes, dtypes, devices or targets that do not fit; with `parallel` also ranks that do not match,
                on all of them (targets are compared on a CPU only, and nothing under torch.compile but the number of rows).
        """
        columns = columns_of(input.shape[-1] if input.dim() else 0, parallel=self.parallel)
        if columns.count < columns.total and not torch.compiler.is_compiling():
            self._check_together(input, target, columns.total)
        else:
            self._check(input, target, columns.total)
        target = target.long()
        valid = target != self.ignore_index
        target = torch.where(valid, target, 0)
        weight = None if self.weight is None else self.weight.to(_arithmetic(input))
        row_loss = RowLoss(weight=weight, label_smoothing=self.label_smoothing, columns=columns)
        # Autocast would turn parts of the arithmetic to half precision again.
        with torch.autocast(input.device.type, enabled=False):
            losses: torch.Tensor = CrossEntropyRows.apply(input, target, valid, row_loss)
        if self.reduction == "none":
            return losses
        if self.reduction == "sum":
            return losses.sum()
        total = row_loss.of_targets(target, valid).sum()
        # Without a valid row the sum is 0: dividing it by 1 keeps it, and asks the GPU nothing.
        return losses.sum() / torch.where(total == 0, 1.0, total)

    def extra_repr(self) -> str:
        """Arguments other than the weights, for printing."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}, "
            f"parallel={self.parallel}"
        )

    def _check_together(self, logits: torch.Tensor, target: torch.Tensor, num_classes: int) -> None:
        """What one tensor-parallel rank refuses, all refuse; and they refuse to be different."""
        problem = ""
        try:
            self._check(logits, target, num_classes)
        except ConfigurationError as error:
            problem = str(error)
        told = f"logits {_describe(logits)}, target {_describe(target)}, {problem or 'well by itself'}"
        if not problem and target.device.type == "cpu":
            told += f", digest of the targets {zlib.crc32(target.contiguous().numpy().tobytes()):x}"
        tensor_parallel.check_alike("FusedCrossEntropy", told)
        if problem:
            raise ConfigurationError(problem)

    def _check(self, logits: torch.Tensor, target: torch.Tensor, num_classes: int) -> None:
        if logits.dim() != 2 or logits.dtype not in LOGIT_DTYPES or logits.shape[1] == 0:
            raise ConfigurationError(
                f"logits: got {_describe(logits)}, expected (rows, classes) in {_names(LOGIT_DTYPES)}; "
                "flatten leading dimensions: logits.view(-1, logits.shape[-1])."
            )
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise ConfigurationError(
                f"target: got {_describe(target)}, expected class indices of an integer dtype; "
                "for class probabilities use torch.nn.functional.cross_entropy."
            )
        if target.shape != logits.shape[:1]:
            raise ConfigurationError(
                f"target: got {_describe(target)}, expected ({logits.shape[0]},), one class for each row of the logits "
                f"{tuple(logits.shape)}; flatten both alike: target.view(-1)."
            )
        for name, other in (("target", target), ("weight", self.weight)):
            if other is not None and other.device != logits.device:
                raise ConfigurationError(
                    f"{name}: got a tensor on {other.device}, expected it on {logits.device} like the logits; "
                    f"move it there: .to({str(logits.device)!r})."
                )
        if self.weight is not None and self.weight.shape[0] != num_classes:
            raise ConfigurationError(
                f"weight: got {self.weight.shape[0]} weights, expected {num_classes}, one for each class of the "
                f"logits {tuple(logits.shape)}; give one weight per class."
            )
        # Reading values stops a GPU, and a compiler's trace; there the gather itself refuses.
        if logits.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_range(target, num_classes)

    def _check_range(self, target: torch.Tensor, num_classes: int) -> None:
        bad = ((target < 0) | (target >= num_classes)) & (target != self.ignore_index)
        if bad.any():
            row = int(bad.nonzero()[0, 0])
            raise ConfigurationError(
                f"target of row {row}: got {int(target[row])}, expected 0 to {num_classes - 1} or "
                f"ignore_index={self.ignore_index} ({int(bad.sum())} of {bad.numel()} rows are out of range); "
                "check that the vocabulary of the data is that of the model."
            )


def _arithmetic(logits: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: fp32, or fp64 for fp64 logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that bound the fp32 scratch; one slice under torch.compile, which fuses it away."""
    num_rows, num_classes = logits.shape
    if torch.compiler.is_compiling():
        yield slice(0, num_rows)
        return
    chunk_numel = CPU_CHUNK_NUMEL if logits.device.type == "cpu" else CHUNK_NUMEL
    step = max(1, chunk_numel // num_classes)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _picked(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`x_y` (rows,) of every row."""
    return logits.gather(1, target[:, None])[:, 0]


def _describe(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} of {_names((tensor.dtype,))}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
