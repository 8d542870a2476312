"""The kernel that quantises a tensor. Imported only where there is a GPU: see kernels/fp8.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def encode_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    x: tl.tensor,
    unit: tl.tensor,
    codes: tl.tensor,
    turned: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    padded_rows: tl.tensor,
    CODES: tl.constexpr,
    TURNED: tl.constexpr,
    SUMS: tl.constexpr,
    LIMIT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One tile of x (num_rows, num_columns) per program.

    Writes it to codes, of the same shape, and to turned (num_columns, padded_rows), with zeros
    beyond num_rows; and the sums of its columns to a row of sums.
    """
    down = tl.cdiv(padded_rows, TILE)
    part = tl.program_id(0) % down
    i = part * TILE + tl.arange(0, TILE)
    j = (tl.program_id(0) // down) * TILE + tl.arange(0, TILE)
    inside = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    at = i.to(tl.int64)[:, None] * num_columns + j[None, :]
    tile = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    number = tile * tl.div_rn(1.0, tl.load(unit))
    number = tl.clamp(number, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    code = number.to(codes.dtype.element_ty)
    if CODES:
        tl.store(codes + at, code, mask=inside)
    if TURNED:
        fits = (j < num_columns)[:, None] & (i < padded_rows)[None, :]
        to = j.to(tl.int64)[:, None] * padded_rows + i[None, :]
        tl.store(turned + to, tl.trans(code), mask=fits)
    if SUMS:
        tl.store(sums + part.to(tl.int64) * num_columns + j, tl.sum(tile, 0), j < num_columns)
