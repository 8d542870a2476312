"""What losses share: arguments, checks, the reduction over rows and over the tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.kernels.cross_entropy import arithmetic
from bmtrain.loss.row_loss import Columns, RowLoss
from bmtrain.runtime import world
from bmtrain.runtime.arguments import SHARE, WHOLE, Rule, check

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REDUCTION = Rule("mean, sum or none", ("mean", "sum", "none").__contains__)


class ClassLoss(torch.nn.Module):
    """A loss of class indices.

    Args:
        weight: weights of the classes (V,), or None for 1 each; kept as a buffer.
        ignore_index: the target of rows to ignore.
        reduction: "mean" over the valid rows, weighted by their classes; "sum"; or "none" for a
            loss per row.
        label_smoothing: the share in [0, 1] of the target that is spread evenly over all classes.

    Raises:
        ConfigurationError: for an invalid argument.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check(
            type(self).__name__,
            reduction=(reduction, _REDUCTION),
            label_smoothing=(label_smoothing, SHARE),
            ignore_index=(ignore_index, WHOLE),
        )
        if weight is not None:
            check_tensor("weight", weight)
        if weight is not None and (weight.dim() != 1 or not weight.is_floating_point()):
            raise ConfigurationError(
                f"weight: got {describe(weight)}, expected a floating-point tensor of "
                "shape (classes,); give one weight per class."
            )
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    def extra_repr(self) -> str:
        """The arguments other than the class weights, for printing."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}"
        )

    def row_loss(self, columns: Columns, dtype: torch.dtype) -> RowLoss:
        """The loss function of a row of logits of `dtype`."""
        weight = None if self.weight is None else self.weight.to(arithmetic(dtype))
        return RowLoss(weight=weight, label_smoothing=self.label_smoothing, columns=columns)

    def classes_of(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Target classes (rows,) int64, 0 in ignored rows, and valid rows (rows,) bool."""
        target = target.long()
        valid = target != self.ignore_index
        return torch.where(valid, target, 0), valid

    def average(
        self, loss_sum: torch.Tensor, row_loss: RowLoss, target: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """The mean weighted by the rows' class weights; NaN if these sum to 0, as in torch.

        If no row is valid, the gradient is zero.
        """
        total = row_loss.of_targets(target, valid).sum()
        # NaN is added: the quotient 0 / 0 would be NaN as well, but so would its gradient. Both
        # cases stay on the device, without a synchronisation.
        divisor = torch.where(valid.any(), total, 1.0)
        return loss_sum / divisor + torch.where(total == 0, torch.nan, 0.0)

    def check_target(self, target: torch.Tensor, rows: torch.Tensor, num_classes: int) -> None:
        """Check that `target` and the class weights fit `rows`.

        Args:
            rows: the logits or hidden states, (rows, ...).

        Raises:
            ConfigurationError: if they do not.
        """
        check_tensor("target", target)
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise ConfigurationError(
                f"target: got {describe(target)}, expected class indices of an integer dtype; "
                "for class probabilities use torch.nn.functional.cross_entropy."
            )
        if target.shape != rows.shape[:1]:
            raise ConfigurationError(
                f"target: got {describe(target)}, expected ({rows.shape[0]},), one class for each "
                f"of the rows {tuple(rows.shape)}; flatten both alike: target.view(-1)."
            )
        for name, other in (("target", target), ("weight", self.weight)):
            if other is not None:
                check_device(name, other, rows)
        if self.weight is not None and self.weight.shape[0] != num_classes:
            raise ConfigurationError(
                f"weight: got {self.weight.shape[0]} weights, expected {num_classes}; "
                "give one weight per class."
            )
        # Reading values would synchronise with a GPU and break the graph of a compiler. In these
        # cases the gather itself fails.
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():
            bad = ((target < 0) | (target >= num_classes)) & (target != self.ignore_index)
            if bad.any():
                row = int(bad.nonzero()[0, 0])
                raise ConfigurationError(
                    f"target of row {row}: got {int(target[row])}, expected 0 to {num_classes - 1} "
                    f"or ignore_index={self.ignore_index} ({int(bad.sum())} of {bad.numel()} rows "
                    "are out of range); check that the vocabulary of the data is that of the model."
                )


class TokenMean:
    """Scales summed losses so that the step's gradient is that of the mean over all valid tokens.

    A mean of micro-batch means gives tokens of a short micro-batch more weight; this one weighs all
    tokens equally. Construct it once per step from the targets of all micro-batches of this rank,
    call it with each micro-batch's summed loss, and pass the result to `OptimManager.backward`. The
    sum of the results, averaged by `sum_loss`, is the mean loss for the log. Construction is
    collective: it sums the token counts of all ranks.

    Args:
        targets: this rank's targets of the step, one integer tensor of any shape per micro-batch.
        ignore_index: the target of tokens to ignore.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError: for targets that are no integer tensors.

    Example:
        mean = TokenMean(targets_of_all_micro_batches)
        loss = FusedCrossEntropy(reduction="sum")
        for inputs, targets in micro_batches:
            logits = model(inputs).flatten(0, 1)
            manager.backward(mean(loss(logits, targets.flatten())))
    """

    def __init__(self, targets: Iterable[torch.Tensor], ignore_index: int = -100) -> None:
        current = world.current("TokenMean")
        self._num_ranks = current.mesh.world.size
        count = torch.zeros((), dtype=torch.float64, device=current.device)
        for target in targets:
            if not isinstance(target, torch.Tensor) or target.is_floating_point():
                raise ConfigurationError(
                    "TokenMean got targets that are not integer tensors: expected one tensor per "
                    "micro-batch."
                )
            count += (target != ignore_index).sum()
        collectives.all_reduce_(count, "sum", current.mesh.world)
        self.num_tokens = count

    def __call__(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Scale `loss_sum`, a scalar summed over the valid tokens of one micro-batch.

        It is divided by the step's number of tokens and multiplied by the world size, by which
        `OptimManager.backward` divides. A step without a valid token gives 0.
        """
        return loss_sum * (self._num_ranks / self.num_tokens.clamp(min=1)).to(loss_sum.dtype)


def check_device(name: str, tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ConfigurationError unless `tensor` is on the device of the rows."""
    if tensor.device != rows.device:
        raise ConfigurationError(
            f"{name}: got a tensor on {tensor.device}, expected it on {rows.device} like the rows; "
            f"move it there: .to({str(rows.device)!r})."
        )


def describe(tensor: torch.Tensor) -> str:
    """Shape and dtype of a tensor, for error messages."""
    return f"shape {tuple(tensor.shape)} of {names(tensor.dtype)}"


def names(*dtypes: torch.dtype) -> str:
    """Names of dtypes without the `torch.` prefix."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(name: str, value: object) -> None:
    """Raise ConfigurationError unless an argument is a tensor."""
    if not isinstance(value, torch.Tensor):
        hint = "; give its `.weight`" if isinstance(value, torch.nn.Module) else ""
        raise ConfigurationError(f"{name}: got {type(value).__name__}, expected a tensor{hint}.")
