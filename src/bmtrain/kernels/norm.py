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

import functools
from collections.abc import Sequence

import torch

from bmtrain.kernels import launch
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


def norm(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> Normed:
    """`(x - mean) * rstd * weight + bias`, with mean and rstd over the rows of x.

    Dtypes are fp32, fp16 or bf16, arithmetic is in fp32.

    Args:
        inputs: at most MOST_INPUTS tensors (..., n) whose sum, rounded to their dtype, is x.
        weight, bias: (n,), at most MOST_COLUMNS; None for a norm without bias.
        eps: added to the variance or the mean square.
        centered: True for layer norm, False for RMS norm.

    Returns:
        The result (..., n) in the dtype of the inputs; the mean (..., 1) in fp32, empty for RMS
        norm; rstd (..., 1) in fp32, the inverse of the standard deviation or of the root mean
        square; and x (..., n) if it is the sum of several inputs, else an empty tensor.
    """
    n, (result, mean, rstd, total) = weight.shape[0], _normed(inputs, centered)
    if not launch.takes(weight):
        x = functools.reduce(torch.add, inputs)
        if len(inputs) > 1:
            total.copy_(x)
        wide = x.float()
        if centered:
            mean.copy_(wide.mean(-1, keepdim=True))
            wide = wide - mean
        rstd.copy_(torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
        normed = wide * rstd * weight.float()
        result.copy_(normed if bias is None else normed + bias.float())
        return result, mean, rstd, total
    block = 1 << (n - 1).bit_length()
    norm_kernel(
        (min(rstd.numel(), FORWARD_PARTS),),
        *_filled(inputs, MOST_INPUTS),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        result,
        total,
        mean,
        rstd,
        rstd.numel(),
        n,
        eps,
        NUM_INPUTS=len(inputs),
        CENTERED=centered,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return result, mean, rstd, total


def _normed(inputs: Sequence[torch.Tensor], centered: bool) -> Normed:
    first = inputs[0]
    of_rows = (*first.shape[:-1], 1)
    return (
        first.new_empty(first.shape),
        first.new_empty(of_rows if centered else 0, dtype=torch.float32),
        first.new_empty(of_rows, dtype=torch.float32),
        first.new_empty(first.shape if len(inputs) > 1 else 0),
    )


#: `norm` as an operator, which a compiler leaves whole
norm_op = torch.library.custom_op(
    "bmtrain::norm",
    norm,
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor weight, Tensor? bias, float eps, bool centered) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
norm_op.register_fake(lambda inputs, weight, bias, eps, centered: _normed(inputs, centered))


def norm_backward(
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    residual: torch.Tensor | None = None,
    sums_result: bool = False,
    sums_residual: bool = False,
) -> Results:
    """The gradients of `(x - mean) * rstd * weight + bias`, with mean and rstd over the rows of x.

    Dtypes are fp32, fp16 or bf16, arithmetic is in fp32.

    Args:
        grads: at most MOST_GRADS tensors (..., n) whose sum is the gradient of the norm's result.
        inputs: at most MOST_INPUTS tensors (..., n) whose sum was normalised.
        weight: (n,), at most MOST_COLUMNS.
        mean: (..., 1) in fp32; None for RMS norm.
        rstd: (..., 1) in fp32, the inverse of the standard deviation or of the root mean square.
        residual: (..., n), added to the gradient.
        sums_result, sums_residual: whether to sum the columns of the gradient, and of `residual`.

    Returns:
        The gradient of x (..., n) in the dtype of the inputs; partial sums (2, parts, n) in fp32,
        whose sums over the parts are the gradients of weight and bias; and likewise partial column
        sums (0 to 2, parts, n) of the gradient and of `residual`.
    """
    n = weight.shape[0]
    if not launch.takes(weight):
        grad, x = (
            functools.reduce(torch.add, [_rows(part, n) for part in parts])
            for parts in (grads, inputs)
        )
        factor = rstd.reshape(-1, 1).float()
        normed = (x if mean is None else x - mean.reshape(-1, 1)) * factor
        weighted = grad * weight.float()
        slope = weighted - normed * (weighted * normed).mean(1, keepdim=True)
        if mean is not None:
            slope = slope - weighted.mean(1, keepdim=True)
        slope = slope * factor
        if residual is not None:
            slope = slope + _rows(residual, n)
        rounded = slope.to(inputs[0].dtype)
        columns = [rounded.float()] if sums_result else []
        columns += [_rows(residual, n)] if sums_residual and residual is not None else []
        return rounded.view(inputs[0].shape), _sums([grad * normed, grad], n), _sums(columns, n)
    result, sums, more = _results(inputs[0], sums_result + sums_residual)
    block = 1 << (n - 1).bit_length()
    read = [*grads, *inputs] if residual is None else [*grads, *inputs, residual]
    row_bytes = block * sum(tensor.element_size() for tensor in read)
    norm_backward_kernel(
        (_parts(n),),
        *_filled(grads, MOST_GRADS),
        *_filled(inputs, MOST_INPUTS),
        None if residual is None else residual.contiguous(),
        weight.contiguous(),
        None if mean is None else mean.contiguous(),
        rstd.contiguous(),
        result,
        sums,
        more,
        result.numel() // n,
        n,
        NUM_GRADS=len(grads),
        NUM_INPUTS=len(inputs),
        CENTERED=mean is not None,
        HAS_RESIDUAL=residual is not None,
        SUMS_RESULT=sums_result,
        SUMS_RESIDUAL=sums_residual,
        BLOCK=block,
        STAGES=_stages(row_bytes, result.device),
        num_warps=max(1, min(16, block // 256)),
    )
    return result, sums, more


def _results(x: torch.Tensor, num_sums: int) -> Results:
    n = x.shape[-1]
    sums, more = (x.new_empty((k, _parts(n), n), dtype=torch.float32) for k in (2, num_sums))
    return x.new_empty(x.shape), sums, more


norm_backward_op = torch.library.custom_op(
    "bmtrain::norm_backward",
    norm_backward,
    mutates_args=(),
    schema="(Tensor[] grads, Tensor[] inputs, Tensor weight, Tensor? mean, Tensor rstd, "
    "Tensor? residual=None, "
    "bool sums_result=False, bool sums_residual=False) -> (Tensor, Tensor, Tensor)",
)
norm_backward_op.register_fake(
    lambda grads, inputs, weight, mean, rstd, residual=None, *asked: _results(inputs[0], sum(asked))
)


def _parts(n: int) -> int:
    return PARTS_OF_WIDE if n > WIDE else PARTS


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
    dense = [tensor.contiguous() for tensor in tensors]
    return [*dense, *[None] * (count - len(tensors))]


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
