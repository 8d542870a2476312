"""Products of one row with the weights of several linear maps that read it, in one kernel.

What a step of generation multiplies is one row, and its time is that of reading the weights. So a
kernel streams all weights that share an input, wherever each is in memory; and what precedes
and behind the products takes no kernel of its own: a norm of the row, which every program makes for
itself, and gates, biases and the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.kernels.launch import kernel, tl
from model_center.kernels.gated import ACTIVATIONS, activated

#: most weights that share an input
MOST_WEIGHTS = 3
#: longest row: a program goes over it in steps that are written out
MOST_COLUMNS = 1 << 15
#: rows of a weight, and columns at once, that a program multiplies
BLOCK_OUT, BLOCK_IN, WARPS = 1, 2048, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowProducts:
    """`W x + b` for each weight; tensors of one dtype: fp32, fp16 or bf16; sums in fp32.

    Attributes:
        x: (columns,), at most MOST_COLUMNS.
        weights: 1 to MOST_WEIGHTS contiguous matrices (outputs, columns).
        biases: (outputs,) or None, of each.
        norm: the weight (columns,) of an RMS norm of the row in front of the products; None for no
            norm.
        eps: of the norm.
        act: an activation of kernels/gated.py that follows: of one weight's product, or of the
            first of two, by which the second is multiplied then.
        residual: with one weight, what is added to the result (outputs,).
    """

    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]
    norm: torch.Tensor | None = None
    eps: float = 0.0
    act: str | None = None
    residual: torch.Tensor | None = None

    @property
    def is_gated(self) -> bool:
        """Whether there is one result of two weights."""
        return self.act is not None and len(self.weights) > 1

    @property
    def sizes(self) -> list[int]:
        """Outputs of each result."""
        sizes = [weight.shape[0] for weight in self.weights]
        return sizes[:1] if self.is_gated else sizes


def row_products(case: RowProducts) -> torch.Tensor:
    """The results one after another, (outputs of all,), rounded once."""
    by = row_products_reference if case.x.device.type == "cpu" else row_products_by_triton
    return by(case)


def row_products_reference(case: RowProducts) -> torch.Tensor:
    """`row_products` by the formula."""
    x = case.x.float()
    if case.norm is not None:
        x = F.rms_norm(x, x.shape, case.norm.float(), case.eps)
    found = [
        F.linear(x, weight.float(), None if bias is None else bias.float())
        for weight, bias in zip(case.weights, case.biases, strict=True)
    ]
    if case.act is not None:
        found[0] = ACTIVATIONS[case.act](found[0])
    if case.residual is not None:
        found[0] = found[0] + case.residual.float()
    out = found[0] * found[1] if case.is_gated else torch.cat(found)
    return out.to(case.x.dtype)


def row_products_by_triton(case: RowProducts) -> torch.Tensor:
    """`row_products` in one kernel."""
    columns, sizes = case.x.shape[0], case.sizes
    out = case.x.new_empty(sum(sizes))
    row_products_kernel(
        (sum(-(-size // BLOCK_OUT) for size in sizes),),
        case.x.contiguous(),
        case.norm,
        case.eps,
        *_filled(case.weights, None),
        *_filled(case.biases, None),
        *_filled(sizes, 0),
        case.residual,
        out,
        IS_GATED=case.is_gated,
        ACT=case.act,
        COLUMNS=columns,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=min(BLOCK_IN, 1 << (columns - 1).bit_length()),
        num_warps=WARPS,
    )
    return out


def _filled(found: Sequence[Any], rest: object) -> list[Any]:
    return [*found, *[rest] * (MOST_WEIGHTS - len(found))]


@kernel
def _loaded(base: tl.tensor, i: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Elements `i`, in fp32."""
    return tl.load(base + i, inside, other=0.0).to(tl.float32)


@kernel
def _product(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tensor:
    """The row times rows `first` and following of `weight`, plus bias.

    The norm's factor is found beside the product, and multiplied in at the end: nothing waits for
    it.
    """
    rows = first + tl.arange(0, BLOCK_OUT)
    there = rows < size
    begin = rows.to(tl.int64)[:, None] * COLUMNS
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        inside = columns < COLUMNS
        w = _loaded(weight, begin + columns[None, :], there[:, None] & inside[None, :])
        row = _loaded(x, columns, inside)
        if norm is not None:
            squares += row * row
            row *= _loaded(norm, columns, inside)
        total += w * row[None, :]
    result = tl.sum(total, 1)
    if norm is not None:
        result *= 1 / tl.sqrt_rn(tl.sum(squares, 0) / COLUMNS + eps)
    if bias is not None:
        result += _loaded(bias, rows, there)
    return result


@kernel
def _store(
    result: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    BLOCK_OUT: tl.constexpr,
) -> None:
    """Add the residual, and store."""
    rows = first + tl.arange(0, BLOCK_OUT)
    there = rows < size
    if residual is not None:
        result += _loaded(residual, rows, there)
    tl.store(out + rows, result.to(out.dtype.element_ty), there)


@kernel
def row_products_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight_0: tl.tensor,
    weight_1: tl.tensor,
    weight_2: tl.tensor,
    bias_0: tl.tensor,
    bias_1: tl.tensor,
    bias_2: tl.tensor,
    size_0: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    IS_GATED: tl.constexpr,
    ACT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    """Each program multiplies the row with BLOCK_OUT rows of a weight, or of both of a gate.

    Branches, not a pointer that is chosen: so the compiler knows how each argument is aligned.
    """
    first = tl.program_id(0) * BLOCK_OUT
    end_0 = tl.cdiv(size_0, BLOCK_OUT) * BLOCK_OUT
    end_1 = end_0 + tl.cdiv(size_1, BLOCK_OUT) * BLOCK_OUT
    if IS_GATED or weight_1 is None:
        y = _product(x, norm, eps, weight_0, bias_0, first, size_0, COLUMNS, BLOCK_OUT, BLOCK_IN)
        if ACT is not None:
            y = activated(y, ACT)
        if IS_GATED:
            y *= _product(
                x, norm, eps, weight_1, bias_1, first, size_0, COLUMNS, BLOCK_OUT, BLOCK_IN
            )
        _store(y, residual, out, first, size_0, BLOCK_OUT)
    elif first < end_0:
        y = _product(x, norm, eps, weight_0, bias_0, first, size_0, COLUMNS, BLOCK_OUT, BLOCK_IN)
        _store(y, None, out, first, size_0, BLOCK_OUT)
    elif first < end_1:
        first -= end_0
        y = _product(x, norm, eps, weight_1, bias_1, first, size_1, COLUMNS, BLOCK_OUT, BLOCK_IN)
        _store(y, None, out + size_0, first, size_1, BLOCK_OUT)
    elif weight_2 is not None:
        first -= end_1
        y = _product(x, norm, eps, weight_2, bias_2, first, size_2, COLUMNS, BLOCK_OUT, BLOCK_IN)
        _store(y, None, out + size_0 + size_1, first, size_2, BLOCK_OUT)
