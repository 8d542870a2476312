"""The kernel of rotary positions. Imported only where there is a GPU: see kernels/rotary.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def rotate_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    query: tl.tensor,
    key: tl.tensor,
    query_out: tl.tensor,
    key_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    table_batch: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_position: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_position: tl.tensor,
    num_heads: tl.tensor,
    num_heads_kv: tl.tensor,
    num_positions: tl.tensor,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Each program turns one head at one position, first those of queries, then those of keys.

    `table_batch` is the number of rows of the tables from one sequence to the next, 0 if they share
    the rows.
    """
    heads = num_heads + num_heads_kv
    head = tl.program_id(0) % heads
    position = (tl.program_id(0) // heads) % num_positions
    batch = (tl.program_id(0) // (heads * num_positions)).to(tl.int64)
    if head < num_heads:
        x = query + batch * query_batch + head * query_head + position * query_position
        y = query_out + ((batch * num_heads + head) * num_positions + position) * (2 * PAIRS + REST)
    else:
        head -= num_heads
        x = key + batch * key_batch + head * key_head + position * key_position
        y = key_out + ((batch * num_heads_kv + head) * num_positions + position) * (
            2 * PAIRS + REST
        )
    pairs = tl.arange(0, BLOCK)
    inside = pairs < PAIRS
    one = pairs
    other = pairs + PAIRS
    if INTERLEAVED:
        one = 2 * pairs
        other = 2 * pairs + 1
    angle = (batch * table_batch + position) * PAIRS + pairs
    c, s = tl.load(cos + angle, inside, other=0.0), tl.load(sin + angle, inside, other=0.0)
    a = tl.load(x + one, inside, other=0.0).to(tl.float32)
    b = tl.load(x + other, inside, other=0.0).to(tl.float32)
    tl.store(y + one, (a * c - b * s).to(y.dtype.element_ty), inside)
    tl.store(y + other, (b * c + a * s).to(y.dtype.element_ty), inside)
    if REST > 0:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        left = tl.arange(0, BLOCK_REST) < REST
        tl.store(y + rest, tl.load(x + rest, left), left)
