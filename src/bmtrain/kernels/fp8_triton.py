"""The kernel that transposes codes, and quantises values on the way.

Imported only where there is a GPU: see kernels/fp8.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
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
