"""Layer norm and RMS norm and their gradients, each in one pass over memory.

The compiler's code reads a long row twice in forward: first for mean and variance. In backward it
reads everything twice: the gradient of the input needs sums over rows, those of weight and bias
sums over columns. Often the input is a sum of two tensors, its gradient arrives as several terms
and is added to a residual, and biases nearby need column sums too. These kernels fuse all of that
into a single pass.

Sources: Ba et al., "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean Square Layer
Normalization" (2019).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.kernels.launch import kernel, tl

#: most columns that one program can hold
MOST_COLUMNS = 8192
#: up to this many columns, the compiler's own forward pass also holds a whole row
NARROW = 1024
#: most gradients and inputs that the kernels add up
MOST_GRADS, MOST_INPUTS = 3, 2
# Programs per launch: a few per SM, fewer where one occupies an SM. These values and those below
# were tuned on an H200.
PARTS, PARTS_OF_WIDE = 528, 264
FORWARD_PARTS = 2112
#: beyond this many columns, sums of the gradient and of `residual` cost more than they save:
#: registers spill
WIDE = 2048
STAGES = 3  # rows in flight per program
_SPARE = 4096  # bytes of shared memory per SM left for reductions

Normed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Norm:
    """The inputs of a norm; dtypes fp32, fp16 or bf16, arithmetic in fp32.

    Attributes:
        inputs: at most MOST_INPUTS tensors (..., n) whose sum, rounded to their dtype, is
            normalised.
        weight, bias: (n,), at most MOST_COLUMNS; None for a norm without bias.
        eps: added to the variance or the mean square.
        centered: True for layer norm, False for RMS norm.
    """

    inputs: Sequence[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centered: bool


@torch.library.custom_op(
    "bmtrain::norm",
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor weight, Tensor? bias, float eps, bool centered) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def norm(inputs: Sequence[torch.Tensor], weight: torch.Tensor, *rest: Any) -> Normed:
    """`(x - mean) * rstd * weight + bias`, with mean and rstd over the rows of x.

    Takes the fields of `Norm`, in order.

    Returns:
        The result (..., n) in the dtype of the inputs; the mean (..., 1) in fp32, empty for RMS
        norm; rstd (..., 1) in fp32, the inverse of the standard deviation or of the root mean
        square; and x (..., n) if it is the sum of several inputs, else an empty tensor.
    """
    case = Norm(inputs, weight, *rest)
    return norm_reference(case) if weight.device.type == "cpu" else norm_by_triton(case)


def _normed(case: Norm) -> Normed:
    first = case.inputs[0]
    of_rows = (*first.shape[:-1], 1)
    return (
        first.new_empty(first.shape),
        first.new_empty(of_rows if case.centered else 0, dtype=torch.float32),
        first.new_empty(of_rows, dtype=torch.float32),
        first.new_empty(first.shape if len(case.inputs) > 1 else 0),
    )


norm.register_fake(lambda *fields: _normed(Norm(*fields)))


def norm_reference(case: Norm) -> Normed:
    """`norm` by the formula."""
    result, mean, rstd, total = _normed(case)
    x = functools.reduce(torch.add, case.inputs)
    if len(case.inputs) > 1:
        total.copy_(x)
    wide = x.float()
    if case.centered:
        mean.copy_(wide.mean(-1, keepdim=True))
        wide = wide - mean
    rstd.copy_(torch.rsqrt(wide.square().mean(-1, keepdim=True) + case.eps))
    normed = wide * rstd * case.weight.float()
    result.copy_(normed if case.bias is None else normed + case.bias.float())
    return result, mean, rstd, total


def norm_by_triton(case: Norm) -> Normed:
    """`norm` in one kernel."""
    n, (result, mean, rstd, total) = case.weight.shape[0], _normed(case)
    inputs = [tensor.contiguous() for tensor in case.inputs]
    bias = None if case.bias is None else case.bias.contiguous()
    block = 1 << (n - 1).bit_length()
    norm_kernel(
        (min(rstd.numel(), FORWARD_PARTS),),
        *_filled(inputs, MOST_INPUTS),
        case.weight.contiguous(),
        bias,
        result,
        total,
        mean,
        rstd,
        rstd.numel(),
        n,
        case.eps,
        NUM_INPUTS=len(inputs),
        CENTERED=case.centered,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return result, mean, rstd, total


@dataclasses.dataclass(frozen=True)
class Terms:
    """The inputs of a norm's gradient; dtypes fp32, fp16 or bf16, arithmetic in fp32.

    Attributes:
        grads: at most MOST_GRADS tensors (..., n) whose sum is the gradient of the norm's result.
        inputs: at most MOST_INPUTS tensors (..., n) whose sum was normalised.
        weight: (n,), at most MOST_COLUMNS.
        mean: (..., 1) in fp32; None for RMS norm.
        rstd: (..., 1) in fp32, the inverse of the standard deviation or of the root mean square.
        residual: (..., n), added to the gradient.
        sums_result, sums_residual: whether to sum the columns of the gradient, and of `residual`.
    """

    grads: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    weight: torch.Tensor
    mean: torch.Tensor | None
    rstd: torch.Tensor
    residual: torch.Tensor | None = None
    sums_result: bool = False
    sums_residual: bool = False


@torch.library.custom_op(
    "bmtrain::norm_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor[] inputs, Tensor weight, Tensor? mean, Tensor rstd, "
    "Tensor? residual=None, "
    "bool sums_result=False, bool sums_residual=False) -> (Tensor, Tensor, Tensor)",
)
def norm_backward(
    grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weight: torch.Tensor, *rest: Any
) -> Results:
    """The gradients of `(x - mean) * rstd * weight + bias`, with mean and rstd over the rows of x.

    Takes the fields of `Terms`, in order.

    Returns:
        The gradient of x (..., n) in the dtype of the inputs; partial sums (2, parts, n) in fp32,
        whose sums over the parts are the gradients of weight and bias; and likewise partial column
        sums (0 to 2, parts, n) of the gradient and of `residual`.
    """
    terms = Terms(grads, inputs, weight, *rest)
    by = norm_backward_reference if weight.device.type == "cpu" else norm_backward_by_triton
    return by(terms)


def _results(terms: Terms) -> Results:
    n = terms.weight.shape[0]
    sums = [
        terms.weight.new_empty((count, _parts(n), n), dtype=torch.float32)
        for count in (2, terms.sums_result + terms.sums_residual)
    ]
    return terms.inputs[0].new_empty(terms.inputs[0].shape), sums[0], sums[1]


norm_backward.register_fake(lambda *fields: _results(Terms(*fields)))


def _parts(n: int) -> int:
    return PARTS_OF_WIDE if n > WIDE else PARTS


def norm_backward_reference(terms: Terms) -> Results:
    """`norm_backward` by the formula."""
    n = terms.weight.shape[0]
    grad, x = (
        functools.reduce(torch.add, [_rows(part, n) for part in parts])
        for parts in (terms.grads, terms.inputs)
    )
    rstd = terms.rstd.reshape(-1, 1).float()
    normed = (x if terms.mean is None else x - terms.mean.reshape(-1, 1)) * rstd
    weighted = grad * terms.weight.float()
    result = weighted - normed * (weighted * normed).mean(1, keepdim=True)
    if terms.mean is not None:
        result = result - weighted.mean(1, keepdim=True)
    result = result * rstd
    if terms.residual is not None:
        result = result + _rows(terms.residual, n)
    rounded = result.to(terms.inputs[0].dtype)
    more = [rounded.float()] if terms.sums_result else []
    more += [_rows(terms.residual, n)] if terms.sums_residual and terms.residual is not None else []
    return rounded.view(terms.inputs[0].shape), _sums([grad * normed, grad], n), _sums(more, n)


def _rows(tensor: torch.Tensor, n: int) -> torch.Tensor:
    return tensor.reshape(-1, n).float()


def _sums(terms: Sequence[torch.Tensor], n: int) -> torch.Tensor:
    """Partial sums (terms, parts, n): part p sums rows p, p + parts, p + 2 parts, ..."""
    sums = [
        rows.new_zeros(_parts(n), n).index_add_(
            0, torch.arange(rows.shape[0], device=rows.device) % _parts(n), rows
        )
        for rows in terms
    ]
    return torch.stack(sums) if sums else torch.empty(0, _parts(n), n)


def norm_backward_by_triton(terms: Terms) -> Results:
    """`norm_backward` in one kernel."""
    n, (result, sums, more) = terms.weight.shape[0], _results(terms)
    grads, inputs = (
        [tensor.contiguous() for tensor in tensors] for tensors in (terms.grads, terms.inputs)
    )
    residual, mean = (
        None if tensor is None else tensor.contiguous() for tensor in (terms.residual, terms.mean)
    )
    block = 1 << (n - 1).bit_length()
    read = [*grads, *inputs] if residual is None else [*grads, *inputs, residual]
    row_bytes = block * sum(tensor.element_size() for tensor in read)
    norm_backward_kernel(
        (_parts(n),),
        *_filled(grads, MOST_GRADS),
        *_filled(inputs, MOST_INPUTS),
        residual,
        terms.weight.contiguous(),
        mean,
        terms.rstd.contiguous(),
        result,
        sums,
        more,
        result.numel() // n,
        n,
        NUM_GRADS=len(grads),
        NUM_INPUTS=len(inputs),
        CENTERED=mean is not None,
        HAS_RESIDUAL=residual is not None,
        SUMS_RESULT=terms.sums_result,
        SUMS_RESIDUAL=terms.sums_residual,
        BLOCK=block,
        STAGES=_stages(row_bytes, result.device),
        num_warps=max(1, min(16, block // 256)),
    )
    return result, sums, more


@functools.cache
def _stages(row_bytes: int, device: torch.device) -> int:
    """Pipeline stages that fit into an SM's shared memory, up to STAGES.

    Each stage but the one in use holds a prefetched row of `row_bytes`.
    """
    if device.type == "cpu":
        return 1
    there = torch.cuda.get_device_properties(device).shared_memory_per_block_optin - _SPARE  # type: ignore[attr-defined]
    return 1 + max(0, min(STAGES - 1, there // row_bytes))


def _filled(tensors: Sequence[torch.Tensor], count: int) -> list[torch.Tensor | None]:
    return [*tensors, *[None] * (count - len(tensors))]


@kernel
def _sum(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """The sum over COUNT tensors of their elements `i`, in fp32."""
    total = tl.load(first + i, inside, other=0.0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(second + i, inside, other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(third + i, inside, other=0.0).to(tl.float32)
    return total


@kernel
def norm_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    input_0: tl.tensor,
    input_1: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    result: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    num_rows: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program handles every num_programs-th row, and holds a whole row at a time."""
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    scale = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, inside, other=0.0).to(tl.float32)
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        i = tl.cast(row, tl.int64) * n + columns
        x = _sum(input_0, input_1, input_1, i, inside, NUM_INPUTS)
        if NUM_INPUTS > 1:
            rounded = x.to(total.dtype.element_ty)
            tl.store(total + i, rounded, inside)
            x = rounded.to(tl.float32)
        if CENTERED:
            center = tl.sum(x, 0) / n
            tl.store(mean + row, center)
            x = tl.where(inside, x - center, 0.0)
        factor = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / n + eps)
        tl.store(rstd + row, factor)
        normed = x * factor * scale
        if HAS_BIAS:
            normed += shift
        tl.store(result + i, normed.to(result.dtype.element_ty), inside)


@kernel
def norm_backward_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    grad_0: tl.tensor,
    grad_1: tl.tensor,
    grad_2: tl.tensor,
    input_0: tl.tensor,
    input_1: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    result: tl.tensor,
    sums: tl.tensor,
    more: tl.tensor,
    num_rows: tl.tensor,
    n: tl.tensor,
    NUM_GRADS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SUMS_RESULT: tl.constexpr,
    SUMS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Each program handles every num_programs-th row, and writes the sums of its rows."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    scale = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    weight_total = tl.zeros([BLOCK], tl.float32)
    bias_total = tl.zeros([BLOCK], tl.float32)
    result_total = tl.zeros([BLOCK], tl.float32)
    residual_total = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(part, num_rows, parts, num_stages=STAGES):
        i = tl.cast(row, tl.int64) * n + columns
        grad = _sum(grad_0, grad_1, grad_2, i, inside, NUM_GRADS)
        normed = _sum(input_0, input_1, input_1, i, inside, NUM_INPUTS)
        factor = tl.load(rstd + row).to(tl.float32)
        if CENTERED:
            normed -= tl.load(mean + row).to(tl.float32)
        normed *= factor
        weighted = grad * scale  # 0 beyond the row
        slope = weighted - normed * (tl.sum(weighted * normed, 0) / n)
        if CENTERED:
            slope -= tl.sum(weighted, 0) / n
        slope *= factor
        if HAS_RESIDUAL:
            added = tl.load(residual + i, inside, other=0.0).to(tl.float32)
            slope += added
            if SUMS_RESIDUAL:
                residual_total += added
        rounded = slope.to(result.dtype.element_ty)
        tl.store(result + i, rounded, inside)
        weight_total += grad * normed
        bias_total += grad
        if SUMS_RESULT:
            result_total += rounded.to(tl.float32)
    i = part * n + columns
    tl.store(sums + i, weight_total, inside)
    tl.store(sums + parts * n + i, bias_total, inside)
    if SUMS_RESULT:
        tl.store(more + i, result_total, inside)
        more += parts * n
    if SUMS_RESIDUAL:
        tl.store(more + i, residual_total, inside)
