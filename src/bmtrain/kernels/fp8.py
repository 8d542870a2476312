"""FP8 matrix products: tensors as codes and one scale, `unit`, and three products of them.

A tensor is stored as `codes * unit`: codes in e4m3 (3 mantissa bits, up to 448) or e5m2 (2 bits, up
to 57344), and `unit`, a 0-dim fp32 tensor that maps the largest magnitude to the largest code.
Products accumulate in fp32.

On CUDA the products are torch's. They require both factors with the contracted dimension innermost,
so two of the three products need transposed codes. One Triton kernel reads a tensor once and writes
its codes, the same transposed, and the column sums that a bias's gradient is. A plain-torch version
with the same arithmetic runs on a CPU.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from bmtrain.kernels.chunks import launching_on
from bmtrain.torch_internals import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: sizes of matrices must be multiples of this
ALIGNMENT = 16
#: rows and columns that one program of the kernel handles
TILE = 128
_LEAST = 1e-30  # smallest magnitude assumed for a tensor: avoids a zero unit


def is_supported(device: torch.device) -> bool:
    """Whether the device supports FP8 products: GPUs from Ada on, and CPUs, which use fp32."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def quantise(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x`, of any floating dtype: its codes in the dtype `kind`, and their unit.

    Plain operators, so that the compiler can fuse them with the producer of `x`.
    """
    unit = unit_of(x, kind)
    return codes_of(x, unit, kind), unit


def unit_of(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The unit of `x` for codes in the dtype `kind`. Infinities and NaN propagate."""
    return x.abs().amax().float().clamp(min=_LEAST) / torch.finfo(kind).max


def codes_of(x: torch.Tensor, unit: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The codes of `x` in the dtype `kind`, in plain operators."""
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
        return product_reference(a, a_unit, b, b_unit, bias, dtype)
    a, b = a.contiguous(), b.contiguous()  # the only layouts that `scaled_mm` accepts
    inside = None if bias is None or dtype == torch.float32 else bias.to(dtype)
    out = scaled_mm(
        a, b.t(), scale_a=a_unit, scale_b=b_unit, bias=inside, out_dtype=dtype, use_fast_accum=fast
    )
    return out if bias is None or inside is not None else out + bias


def product_reference(
    a: torch.Tensor,
    a_unit: torch.Tensor,
    b: torch.Tensor,
    b_unit: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`product` as an fp32 matrix product."""
    out = (a.float() @ b.float().t()) * (a_unit * b_unit)
    return (out if bias is None else out + bias.float()).to(dtype)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """What is wanted of a tensor.

    Attributes:
        x: (m, n) in fp32, fp16 or bf16.
        unit: 0-dim, in fp32.
        kind: dtype of the codes.
        codes, turned, sums: whether the codes, the transposed codes and the column sums are wanted.
    """

    x: torch.Tensor
    unit: torch.Tensor
    kind: torch.dtype
    codes: bool
    turned: bool
    sums: bool


Encoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op(
    "bmtrain::fp8_encode",
    mutates_args=(),
    schema="(Tensor x, Tensor unit, ScalarType kind, bool codes, bool turned, bool sums) -> "
    "(Tensor, Tensor, Tensor)",
)
def encode(x: torch.Tensor, *rest: Any) -> Encoded:
    """Codes of a tensor, the same transposed, and sums of its columns, in one pass over memory.

    Takes the fields of `Encoding`, in order.

    Returns:
        The codes (m, n); the transposed codes (n, m rounded up to a multiple of ALIGNMENT), with
        zeros in what is added; and partial sums (parts, n) of x in fp32, each over TILE rows. What
        is not wanted has 0 rows.
    """
    wanted = Encoding(x, *rest)
    return encode_reference(wanted) if x.device.type == "cpu" else encode_by_triton(wanted)


@encode.register_fake
def _(x: torch.Tensor, *rest: Any) -> Encoded:
    return _encoded(Encoding(x, *rest))


def _encoded(wanted: Encoding) -> Encoded:
    (m, n), padded = wanted.x.shape, _rounded_up(wanted.x.shape[0])
    return (
        wanted.x.new_empty((m if wanted.codes else 0, n), dtype=wanted.kind),
        wanted.x.new_empty((n if wanted.turned else 0, padded), dtype=wanted.kind),
        wanted.x.new_empty((-(-m // TILE) if wanted.sums else 0, n), dtype=torch.float32),
    )


def encode_reference(wanted: Encoding) -> Encoded:
    """`encode` in plain torch."""
    codes, turned, sums = _encoded(wanted)
    m = wanted.x.shape[0]
    found = codes_of(wanted.x, wanted.unit, wanted.kind)
    if wanted.codes:
        codes.copy_(found)
    if wanted.turned:
        bits = turned.view(torch.uint8)
        bits[:, :m] = found.view(torch.uint8).t()
        bits[:, m:] = 0
    if wanted.sums:
        for part, rows in zip(sums, wanted.x.float().split(TILE), strict=True):
            part.copy_(rows.sum(0))
    return codes, turned, sums


def encode_by_triton(wanted: Encoding) -> Encoded:
    """`encode` in one kernel."""
    (codes, turned, sums), (m, n) = _encoded(wanted), wanted.x.shape
    padded = turned.shape[1]
    grid = (-(-padded // TILE) * -(-n // TILE),)
    with launching_on(codes.device):
        _triton_kernel()[grid](
            wanted.x.contiguous(),
            wanted.unit,
            codes,
            turned,
            sums,
            m,
            n,
            padded,
            CODES=wanted.codes,
            TURNED=wanted.turned,
            SUMS=wanted.sums,
            LIMIT=torch.finfo(wanted.kind).max,
            TILE=TILE,
            num_warps=8,
        )
    return codes, turned, sums


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
        grad,
        grad_unit,
        encode(weight, weight_unit, E4M3, False, True, False)[1],
        weight_unit,
        None,
        dtype,
        fast=False,
    )


@input_gradient.register_fake
def _(
    grad: torch.Tensor,
    grad_unit: torch.Tensor,
    weight: torch.Tensor,
    weight_unit: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[1]), dtype=dtype)


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
    """`grad.T @ x` in `dtype`, for transposed codes grad (n, m) and x (k, m): (n, k).

    An operator of its own, so that a compiler with symbolic shapes need not know that m, rounded
    up, is a multiple of ALIGNMENT.
    """
    return product(grad, grad_unit, x, x_unit, None, dtype, fast=False)


@weight_gradient.register_fake
def _(
    grad: torch.Tensor,
    grad_unit: torch.Tensor,
    x: torch.Tensor,
    x_unit: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return grad.new_empty((grad.shape[0], x.shape[0]), dtype=dtype)


def _rounded_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.fp8_triton import encode_kernel

    return encode_kernel
