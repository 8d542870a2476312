"""Sum of squares of many tensors: gradient norm and finiteness check in a single number."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bmtrain.kernels.chunks import by_path, tables_of, tensor_at
from bmtrain.kernels.launch import kernel, tl

BLOCK, NUM_WARPS = 2048, 8
# Programs per launch. The same on every device: each program then sums the same chunks in the same
# order, which gives the same bits.
NUM_PROGRAMS = 2048


def sum_of_squares(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of squares of all elements: 0-dim fp64 on `device`, without synchronising with it.

    Finite if and only if all elements are, since squares that overflow fp32 do not overflow fp64;
    only those of fp64 elements above 1e154 do. Squares that underflow fp32 count as zero. The
    result is bitwise reproducible.

    Args:
        tensors: of any floating dtype, strides and device; elements of fp64 tensors are squared in
            fp64.
    """
    fast, slow = by_path(tensors)
    launches = tables_of(fast, BLOCK)  # a kernel per dtype, then one sum
    found = torch.empty(len(launches), NUM_PROGRAMS, dtype=torch.float64, device=device)
    for ((dtype, is_aligned), (rows, row_of)), partial in zip(launches, found, strict=True):
        squares_kernel(
            (NUM_PROGRAMS,),
            rows,
            row_of,
            partial,
            len(row_of),
            DTYPE=dtype,
            IS_ALIGNED=is_aligned,
            NUM_PROGRAMS=NUM_PROGRAMS,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    total = found.sum() if launches else torch.zeros((), dtype=torch.float64, device=device)
    for tensor in slow:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square().to(device)
    return total


@kernel
def squares_kernel(
    rows: tl.tensor,
    row_of: tl.tensor,
    found: tl.tensor,
    num_chunks: tl.tensor,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program p sums the squares of chunks p, p + NUM_PROGRAMS, ... into `found[p]`, fp64.

    Squares are accumulated in fp32 twice: as they are, and of elements scaled down. If the first
    sum overflows, the second is used: squares that underflow in it are negligible in the sum.
    """
    program = tl.program_id(0)
    plain = tl.zeros([BLOCK], tl.float32)
    small = tl.zeros([BLOCK], tl.float32)
    for chunk in range(program, num_chunks, NUM_PROGRAMS):
        row = rows + tl.load(row_of + chunk).to(tl.int64) * 3
        n = tl.load(row + 1)
        n = tl.multiple_of(n, 16) if IS_ALIGNED else n
        i = (chunk - tl.load(row + 2)) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(tensor_at(row, 0, DTYPE, IS_ALIGNED) + i, mask=i < n, other=0.0).to(tl.float32)
        plain += x * x
        y = x * 2.0**-80
        small += y * y
    exact = tl.sum(plain, 0)
    total = tl.where(
        exact < float("inf"), exact.to(tl.float64), tl.sum(small, 0).to(tl.float64) * 2.0**160
    )
    tl.store(found + program, total)
