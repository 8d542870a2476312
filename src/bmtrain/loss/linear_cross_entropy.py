"""Cross entropy of a linear layer's output without the logits of all rows in memory at a time.

Rows are processed in chunks that share one buffer of logits. For the sum of the losses, the
gradient of a chunk's logits is known in the forward pass: it overwrites the logits and is
multiplied with the weight and the hidden states there, and backward only scales the results by the
incoming gradient. For losses per row, backward recomputes the logits. Gradients accumulate in fp32;
the weight's gradient sums the chunks in a fixed order.

Sources: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024); Wijmans et
al., "Cut Your Losses in Large-Vocabulary Language Models" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from bmtrain.errors import ConfigurationError
from bmtrain.kernels.cross_entropy import (
    RowFactors,
    RowSums,
    arithmetic,
    row_gradient,
    row_sums,
    score,
)
from bmtrain.kernels.scale import scale_to
from bmtrain.loss.module import DTYPES, ClassLoss, check_device, check_tensor, describe, names
from bmtrain.loss.row_loss import RowLoss, columns_of
from bmtrain.shard.parameter import computed_with

# A chunk has CHUNK_ROWS rows, or more if its logits fit into CHUNK_BYTES. Each chunk reads and
# writes the weight's gradient once, and each matmul ends with a partly idle GPU: many rows per
# chunk amortise both.
CHUNK_ROWS, CHUNK_BYTES = 4096, 2**30
# Matmuls whose sizes are not a multiple of VECTOR are several times slower: the number of classes
# is then padded to a multiple of ALIGNMENT.
VECTOR, ALIGNMENT = 8, 64

# hidden (rows, dim), weight (classes, dim) and optionally bias (classes,); or their gradients.
Head = list[torch.Tensor]


class Targets(NamedTuple):
    """The targets and the loss's options, as a tuple of plain values, which torch.compile accepts.

    Attributes:
        target: classes (rows,) int64, in range in all rows, valid or not.
        valid: which rows are not ignored, (rows,) bool.
        class_weight: (classes,) in the arithmetic dtype, None for 1 each.
        label_smoothing: the share of the target that is spread evenly over all classes.
    """

    target: torch.Tensor
    valid: torch.Tensor
    class_weight: torch.Tensor | None
    label_smoothing: float


class LinearCrossEntropySum(torch.autograd.Function):
    """The sum of the losses of all rows, a scalar. Forward computes the gradients as well."""

    @staticmethod
    def forward(ctx: Any, targets: Targets, *head: torch.Tensor) -> torch.Tensor:
        """Hidden states, weight and optionally bias; at least one of them requires grad."""
        ctx.wanted = [tensor.requires_grad for tensor in head]
        ctx.dtype = head[0].dtype
        # A factor on gradients of fp16 logits, against underflow: they are computed here, where the
        # loss scale is not yet known.
        weight, ctx.boost = targets.class_weight, 1.0
        if ctx.dtype == torch.float16:
            ctx.boost = 2.0**12 if weight is None else 2.0**12 / weight.amax().clamp(min=1.0)
        grad_rows = targets.valid.to(arithmetic(ctx.dtype)) * ctx.boost
        losses, *grads = linear_cross_entropy_gradients(list(head), *targets, grad_rows, ctx.wanted)
        ctx.save_for_backward(*grads)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the saved gradients by the incoming one and round them to the tensors' dtype."""
        factor = grad_sum / ctx.boost
        return None, *(
            scale_to(grad, factor, ctx.dtype) if wanted else None
            for grad, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        )


class LinearCrossEntropyRows(torch.autograd.Function):
    """The loss of each row (rows,). Backward recomputes the logits."""

    @staticmethod
    def forward(ctx: Any, targets: Targets, *head: torch.Tensor) -> torch.Tensor:
        """Hidden states, weight and optionally bias."""
        ctx.wanted = [tensor.requires_grad for tensor in head]
        ctx.label_smoothing = targets.label_smoothing
        ctx.save_for_backward(targets.target, targets.valid, targets.class_weight, *head)
        grad_rows = targets.valid.to(arithmetic(head[0].dtype))
        none = [False] * len(head)
        return linear_cross_entropy_gradients(list(head), *targets, grad_rows, none)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Recompute the logits chunk by chunk, and from them the gradients."""
        target, valid, class_weight, *head = ctx.saved_tensors
        targets = Targets(target, valid, class_weight, ctx.label_smoothing)
        _, *grads = linear_cross_entropy_gradients(
            head, *targets, torch.where(valid, grad_rows, 0.0), ctx.wanted
        )
        dtype = head[0].dtype
        return None, *(
            grad.to(dtype) if wanted else None
            for grad, wanted in zip(grads, ctx.wanted, strict=True)
        )


@torch.library.custom_op(
    "bmtrain::linear_cross_entropy_gradients",
    mutates_args=(),
    schema="(Tensor[] head, Tensor target, Tensor valid, Tensor? class_weight, float "
    "label_smoothing, Tensor grad_rows, bool[] wanted) -> Tensor[]",
)
def linear_cross_entropy_gradients(
    head: Head,
    target: torch.Tensor,
    valid: torch.Tensor,
    class_weight: torch.Tensor | None,
    label_smoothing: float,
    grad_rows: torch.Tensor,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """The losses (rows,) and the gradients of the tensors in `head`, in the arithmetic dtype.

    A custom operator, because torch.compile would unroll the loop over chunks.

    Args:
        grad_rows: the gradient of the losses (rows,) in the arithmetic dtype, 0 for rows that are
            not valid.
        wanted: for each tensor in `head`, whether to compute its gradient; if not, the returned
            tensor is empty.
    """
    columns = columns_of(head[1].shape[0], parallel=False)
    row_loss = RowLoss(weight=class_weight, label_smoothing=label_smoothing, columns=columns)
    factors, parts, scores = row_loss.factors(grad_rows, target, valid), [], []
    hidden, weight, *biases = head
    num_rows, num_classes = hidden.shape[0], weight.shape[0]
    missing = -num_classes % (ALIGNMENT if num_classes % VECTOR else 1)
    if missing:  # classes of zeros: their logits are 0 and stay, and so is their gradient
        weight = F.pad(weight, (0, 0, 0, missing))
        biases = [F.pad(bias, (0, missing)) for bias in biases]
    grads = _empty_gradients([hidden, weight, *biases], wanted)
    step = chunk_rows(num_rows, weight.shape[0] * weight.element_size())
    memory = hidden.new_empty(step, weight.shape[0])  # of the logits of each chunk in turn
    for start in range(0, num_rows or 1, step or 1):  # without rows there is one empty chunk
        rows = slice(start, min(start + step, num_rows))
        padded = memory[: rows.stop - start]
        if biases:
            torch.addmm(biases[0], hidden[rows], weight.t(), out=padded)
        else:
            torch.mm(hidden[rows], weight.t(), out=padded)
        logits = padded[:, :num_classes]
        scores.append(score(logits, target[rows]))
        parts.append(row_sums(logits, class_weight, smoothed=row_loss.smoothed))
        if any(wanted):
            of_rows, smoothed = RowFactors(*(each[rows] for each in factors)), row_loss.smoothed
            row_gradient(logits, parts[-1], of_rows, class_weight, smoothed=smoothed, in_place=True)
        # The first chunk overwrites uninitialised memory.
        if wanted[0]:
            _multiply(grads[0][rows], padded, weight, adds=False)
        if wanted[1]:
            _multiply(grads[1], padded.t(), hidden[rows], adds=start > 0)
        if biases and wanted[2]:
            part = padded.sum(0, dtype=grads[2].dtype)
            grads[2].copy_(grads[2] + part if start else part)
    sums = RowSums(*(torch.cat(chunks) for chunks in zip(*parts, strict=True)))
    losses = row_loss.losses(sums, torch.cat(scores) - sums.highest, target, valid)
    return [losses, grads[0], *(grad[:num_classes] for grad in grads[1:])]


linear_cross_entropy_gradients.register_fake(
    lambda head, target, *rest: [
        head[0].new_empty(target.shape, dtype=arithmetic(head[0].dtype)),
        *_empty_gradients(head, rest[-1]),
    ]
)


class FusedLinearCrossEntropy(ClassLoss):
    """`FusedCrossEntropy` of `F.linear(hidden, weight, bias)` without all logits in memory.

    With reduction "mean" or "sum", the forward pass computes the gradients, too. It needs memory
    for the logits of one chunk (at least 4096 rows, about a GiB) and for the gradients in fp32.
    Recomputation, in a Block with `use_checkpoint`, would compute the gradients twice.

    Args:
        weight: weights of the classes (V,), or None for 1 each; kept as a buffer.
        ignore_index: the target of rows to ignore.
        reduction: "mean" over the valid rows, weighted by their classes; "sum"; or "none" for a
            loss per row.
        label_smoothing: the share in [0, 1] of the target that is spread evenly over all classes.

    Raises:
        ConfigurationError: for an invalid argument.
    """

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Loss of the rows of `hidden` for class indices `target`.

        Args:
            hidden: (rows, dim) in fp32, fp16, bf16 or fp64; flatten leading dimensions.
            weight: (V, dim) in the same dtype, the weight of a linear layer or an embedding. Under
                autocast the dtypes may differ.
            target: (rows,) of any integer dtype, in [0, V) or `ignore_index`. A target out of range
                raises an error with its value on a CPU; on a GPU it triggers a device-side assert,
                as in torch.
            bias: (V,) in the same dtype, or None.

        Returns:
            A scalar, or (rows,) for reduction "none", in fp32 (fp64 for fp64 inputs).

        Raises:
            ConfigurationError: for shapes, dtypes, devices or targets that do not fit.
        """
        weight, bias = computed_with(weight), None if bias is None else computed_with(bias)
        for name, value in (
            ("hidden", hidden),
            ("weight of the linear map", weight),
            ("bias", hidden if bias is None else bias),
        ):
            check_tensor(name, value)
        head, kind = [hidden, weight, *([] if bias is None else [bias])], hidden.device.type
        if torch.is_autocast_enabled(kind):  # all but fp64, as for F.linear
            dtype = torch.get_autocast_dtype(kind)
            head = [x if x.dtype not in DTYPES[:-1] else x.to(dtype) for x in head]
        self._check(head, target)
        target, valid = self.classes_of(target)
        row_loss = self.row_loss(columns_of(weight.shape[0], parallel=False), head[0].dtype)
        targets = Targets(target, valid, row_loss.weight, self.label_smoothing)
        if self.reduction == "none":
            return LinearCrossEntropyRows.apply(targets, *head)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in head):
            loss_sum = LinearCrossEntropySum.apply(targets, *head)
        else:
            loss_sum = LinearCrossEntropyRows.apply(targets, *head).sum()
        if self.reduction == "sum":
            return loss_sum
        return self.average(loss_sum, row_loss, target, valid)

    def _check(self, head: Head, target: torch.Tensor) -> None:
        hidden, weight = head[:2]
        if hidden.dim() != 2 or hidden.dtype not in DTYPES:
            raise ConfigurationError(
                f"hidden: got {describe(hidden)}, expected (rows, dim) in {names(*DTYPES)}; "
                "flatten leading dimensions: hidden.view(-1, hidden.shape[-1])."
            )
        if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.shape[0] == 0:
            raise ConfigurationError(
                f"weight of the linear map: got {describe(weight)}, expected (classes, "
                f"{hidden.shape[1]}) for hidden states "
                f"{tuple(hidden.shape)}; give it as torch.nn.functional.linear takes it."
            )
        if len(head) > 2 and head[2].shape != weight.shape[:1]:
            raise ConfigurationError(
                f"bias: got {describe(head[2])}, expected ({weight.shape[0]},), one number "
                "for each class."
            )
        for name, tensor in zip(("weight of the linear map", "bias"), head[1:], strict=False):
            check_device(name, tensor, hidden)
            if tensor.dtype != hidden.dtype:
                raise ConfigurationError(
                    f"{name}: got {names(tensor.dtype)}, expected {names(hidden.dtype)} like the "
                    "hidden states; convert one of them, or use autocast."
                )
        self.check_target(target, hidden, weight.shape[0])


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Log-probabilities (rows,) of the classes `target` by `F.linear(hidden, weight, bias)`.

    As `FusedLinearCrossEntropy`, without all logits in memory, in forward or backward.
    Differentiable in `hidden`, `weight` and `bias`.

    Args:
        hidden: (rows, dim), fp16, bf16, fp32 or fp64.
        weight: (classes, dim), in the dtype of `hidden`.
        target: (rows,), integers from 0 to classes - 1.
        bias: (classes,), in the dtype of `hidden`.
        ignore_index: the target of rows whose result is 0.

    Returns:
        (rows,), in fp32, or fp64 for fp64 hidden states.

    Raises:
        ConfigurationError: for other shapes, dtypes or devices.
    """
    loss = FusedLinearCrossEntropy(ignore_index=ignore_index, reduction="none")
    return -loss(hidden, weight, target, bias)


def chunk_rows(num_rows: int, row_bytes: int) -> int:
    """Rows of a chunk, so that all chunks are of nearly equal size; `num_rows` if there is one.

    Args:
        num_rows: of all chunks.
        row_bytes: of the logits of a row.
    """
    most = max(CHUNK_ROWS, CHUNK_BYTES // row_bytes)
    count = max(1, -(-num_rows // most))
    return -(-num_rows // count)


def _empty_gradients(head: Head, wanted: Sequence[bool]) -> list[torch.Tensor]:
    dtype = arithmetic(head[0].dtype)
    return [
        tensor.new_empty(tensor.shape if want else 0, dtype=dtype)
        for tensor, want in zip(head, wanted, strict=True)
    ]


def _multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, adds: bool) -> None:
    """`out = a @ b`, or `out += a @ b`, computed and stored in the dtype of `out`.

    Args:
        out: (m, n), in the dtype of the factors or a wider one.
        a, b: (m, k) and (k, n) of one dtype.
    """
    wider: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if wider and a.device.type == "cpu":  # no such kernel: convert the factors
        a, b, wider = a.to(out.dtype), b.to(out.dtype), {}
    if adds:
        torch.addmm(out, a, b, **wider, out=out)
    else:
        torch.mm(a, b, **wider, out=out)
