"""Products of one row with the weights of several linear maps that read it, in one kernel.

What a step of generation multiplies is one row, and its time is that of reading the weights. So a
kernel streams all weights that share an input, wherever each is in memory; and what stands before
and behind the products takes no kernel of its own: a norm of the row, which every program makes for
itself, and gates, biases and the residual.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.kernels.chunks import launching_on
from bmtrain.kernels.gated import ACTIVATIONS
from bmtrain.kernels.gelu import CUBIC, LINEAR

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
    with launching_on(out.device):
        _triton_kernel()[(sum(-(-size // BLOCK_OUT) for size in sizes),)](
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
            LINEAR=LINEAR,
            CUBIC=CUBIC,
            COLUMNS=columns,
            BLOCK_OUT=BLOCK_OUT,
            BLOCK_IN=min(BLOCK_IN, 1 << (columns - 1).bit_length()),
            num_warps=WARPS,
        )
    return out


def _filled(found: Sequence[Any], rest: object) -> list[Any]:
    return [*found, *[rest] * (MOST_WEIGHTS - len(found))]


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.row_products_triton import row_products_kernel

    return row_products_kernel
