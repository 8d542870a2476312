"""Products with a factor that only the device knows: in place, or rounded to another dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bmtrain.kernels import launch
from bmtrain.kernels.chunks import by_path, tables_of, tensor_at
from bmtrain.kernels.launch import kernel, tl
from bmtrain.torch_internals import has_no_memory

BLOCK, NUM_WARPS = 2048, 4
NUM_PROGRAMS = 4096  # few enough that a launch with a factor of 1 ends at once
BLOCK_TO, NUM_WARPS_TO = 4096, 8  # of `scale_to`


def scale_(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place, without synchronising with the device.

    Args:
        tensors: of any floating dtype, strides and device.
        factor: 0-dim fp32 or fp64. The product is computed in fp32 (fp64 for fp64 tensors) and
            rounded once; if the factor is 1, the kernel reads and writes nothing.
    """
    fast, slow = by_path(tensors)
    for tensor in slow:  # `mul_` would round the factor to the tensor's dtype first
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        tensor.copy_(wide * factor.to(tensor.device))
    if fast:
        factor = factor.float()
    for (dtype, is_aligned), (rows, row_of) in tables_of(fast, BLOCK):
        scale_kernel(
            (min(len(row_of), NUM_PROGRAMS),),
            rows,
            row_of,
            factor,
            len(row_of),
            DTYPE=dtype,
            IS_ALIGNED=is_aligned,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    torch.autograd.graph.increment_version(fast)


@kernel
def scale_kernel(
    rows: tl.tensor,
    row_of: tl.tensor,
    factor: tl.tensor,
    num_chunks: tl.tensor,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program scales its share of the chunks; none if `factor` is 1."""
    number = tl.load(factor)
    end = tl.where(number == 1.0, 0, num_chunks)
    for chunk in range(tl.program_id(0), end, tl.num_programs(0)):
        row = rows + tl.load(row_of + chunk).to(tl.int64) * 3
        n = tl.load(row + 1)
        n = tl.multiple_of(n, 16) if IS_ALIGNED else n
        i = (chunk - tl.load(row + 2)) * BLOCK + tl.arange(0, BLOCK)
        at = tensor_at(row, 0, DTYPE, IS_ALIGNED) + i
        tl.store(at, (tl.load(at, mask=i < n).to(tl.float32) * number).to(DTYPE), mask=i < n)


def scale_to(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor * factor` in `dtype`, rounded once.

    Args:
        tensor: contiguous, of any shape, fp32 (or fp64, for an fp64 result).
        factor: 0-dim, of the tensor's dtype and device.
    """
    # Dynamo says that it compiles; what is traced behind it, as a backward pass is, has no memory.
    is_traced = torch.compiler.is_compiling() or has_no_memory(tensor)
    if is_traced or tensor.dtype == torch.float64 or not launch.takes(tensor):
        return (tensor * factor).to(dtype)
    # One kernel, without storing the product in the wider dtype: torch's own conversion kernel runs
    # at a third of the speed.
    out, count = torch.empty_like(tensor, dtype=dtype), tensor.numel()
    grid, sizes = (-(-count // BLOCK_TO),), {"BLOCK": BLOCK_TO, "num_warps": NUM_WARPS_TO}
    scale_to_kernel(grid, out, tensor, factor, count, **sizes)
    return out


@kernel
def scale_to_kernel(
    out: tl.tensor, tensor: tl.tensor, factor: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Each program converts BLOCK elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    product = tl.load(tensor + i, mask=inside) * tl.load(factor)
    tl.store(out + i, product.to(out.dtype.element_ty), mask=inside)
