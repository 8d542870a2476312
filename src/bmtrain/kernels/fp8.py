"""FP8 matrix products: tensors as codes and one scale, `unit`, and three products of them.

A tensor is stored as `codes * unit`: codes in e4m3 (3 mantissa bits, up to 448) or e5m2 (2 bits, up
to 57344), and `unit`, a 0-dim fp32 tensor that maps the largest magnitude to the largest code.
Products accumulate in fp32.

On CUDA the products are torch's. They require both factors with the contracted dimension innermost,
so two of the three products need a transposed copy, which one Triton kernel writes. A plain-torch
version with the same arithmetic runs on a CPU.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

import torch

from bmtrain.kernels import launch
from bmtrain.kernels.launch import kernel, tl
from bmtrain.torch_internals import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: sizes of matrices must be multiples of this
ALIGNMENT = 16
TILE = 128  # rows and columns that a program transposes
_LEAST = 1e-30  # smallest magnitude assumed for a tensor: avoids a zero unit


def quantise(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x`, of any floating dtype: its codes in the dtype `kind`, and their unit.

    Plain operators, so that the compiler can fuse them with the producer of `x`.
    """
    limit = torch.finfo(kind).max
    unit = x.abs().amax().float().clamp(min=_LEAST) / limit  # infinities and NaN propagate
    return _codes(x, unit, kind), unit


def _codes(x: torch.Tensor, unit: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(kind).max
    return (x.float() * unit.reciprocal()).clamp(-limit, limit).to(kind)


def product(
    a: torch.Tensor,
    a_unit: torch.Tensor,
    b: torch.Tensor,
    b_unit: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """`a @ b.T + bias` in `dtype`, for codes a (m, k) and b (n, k) and bias (n,): (m, n).

    `fast` accumulates in the tensor cores' registers, which keep about 14 bits.
    """
    if a.device.type == "cpu":
        out = (a.float() @ b.float().t()) * (a_unit * b_unit)
        return (out if bias is None else out + bias.float()).to(dtype)
    a, b = a.contiguous(), b.contiguous()  # the only layouts that `scaled_mm` accepts
    inside = None if bias is None or dtype == torch.float32 else bias.to(dtype)
    out = scaled_mm(
        a, b.t(), scale_a=a_unit, scale_b=b_unit, bias=inside, out_dtype=dtype, use_fast_accum=fast
    )
    return out if bias is None or inside is not None else out + bias


@torch.library.custom_op(
    "bmtrain::fp8_input_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor grad_unit, Tensor weight, Tensor weight_unit, ScalarType "
    "dtype) -> Tensor",
)
def input_gradient(
    grad: torch.Tensor,
    grad_unit: torch.Tensor,
    weight: torch.Tensor,
    weight_unit: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`grad @ weight` in `dtype`, for codes grad (m, n) and a weight (n, k): (m, k).

    The weight is in its own dtype and is quantised here with `weight_unit`, transposed. Codes saved
    in forward would be a second copy of the model.
    """
    return product(
        grad, grad_unit, transposed(weight, weight_unit), weight_unit, None, dtype, fast=False
    )


input_gradient.register_fake(
    lambda grad, grad_unit, weight, weight_unit, dtype: grad.new_empty(
        (grad.shape[0], weight.shape[1]), dtype=dtype
    )
)


@torch.library.custom_op(
    "bmtrain::fp8_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor grad_unit, Tensor x, Tensor x_unit, ScalarType dtype) -> Tensor",
)
def weight_gradient(
    grad: torch.Tensor,
    grad_unit: torch.Tensor,
    x: torch.Tensor,
    x_unit: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`grad.T @ x` in `dtype`, for codes grad (m, n) and x (m, k): (n, k). Any m."""
    return product(transposed(grad), grad_unit, transposed(x), x_unit, None, dtype, fast=False)


weight_gradient.register_fake(
    lambda grad, grad_unit, x, x_unit, dtype: grad.new_empty(
        (grad.shape[1], x.shape[1]), dtype=dtype
    )
)


def transposed(x: torch.Tensor, unit: torch.Tensor | None = None) -> torch.Tensor:
    """The codes of `x` (m, n), transposed: (n, m rounded up to a multiple of ALIGNMENT).

    Zeros pad the last dim.

    Args:
        x: codes, or values of another dtype, which are quantised to e4m3.
        unit: the unit for values; None for codes.
    """
    rows, columns = x.shape
    kind = x.dtype if unit is None else E4M3
    padded = -(-rows // ALIGNMENT) * ALIGNMENT
    if not launch.takes(x):
        codes = x if unit is None else _codes(x, unit, kind)
        out = torch.zeros(columns, padded, dtype=kind, device=x.device)
        out.view(torch.uint8)[:, :rows] = codes.view(torch.uint8).t()
        return out
    out = torch.empty(columns, padded, dtype=kind, device=x.device)
    source, target = x.contiguous(), out
    if unit is None:
        source, target = source.view(torch.uint8), out.view(torch.uint8)
    transpose_kernel(
        (-(-padded // TILE) * -(-columns // TILE),),
        source,
        target,
        target if unit is None else unit,
        rows,
        columns,
        padded,
        IS_CAST=unit is not None,
        LIMIT=torch.finfo(kind).max,
        TILE=TILE,
        num_warps=8,
    )
    return out


@kernel
def transpose_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    x: tl.tensor,
    out: tl.tensor,
    unit: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    padded_rows: tl.tensor,
    IS_CAST: tl.constexpr,
    LIMIT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """x (num_rows, num_columns) to out (num_columns, padded_rows), one tile per program.

    Pads with zeros beyond num_rows.
    """
    down = tl.cdiv(padded_rows, TILE)
    i = (tl.program_id(0) % down) * TILE + tl.arange(0, TILE)
    j = (tl.program_id(0) // down) * TILE + tl.arange(0, TILE)
    inside = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    tile = tl.load(x + i.to(tl.int64)[:, None] * num_columns + j[None, :], mask=inside, other=0)
    if IS_CAST:
        number = tile.to(tl.float32) * tl.div_rn(1.0, tl.load(unit))
        number = tl.clamp(number, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        tile = number.to(out.dtype.element_ty)
    fits = (j < num_columns)[:, None] & (i < padded_rows)[None, :]
    tl.store(out + j.to(tl.int64)[:, None] * padded_rows + i[None, :], tl.trans(tile), mask=fits)
