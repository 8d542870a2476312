"""Sum of the ranks' parts, always in rank order: bitwise reproducible whatever arrives first.

Floating-point sums depend on their order. A reduction of gradients that adds what has arrived, or a
tree whose shape depends on the number of ranks on a host, gives other bits in each run; a loss that
differs from the last one's is then no sign of a fault. One pass over the parts costs no more.
"""

from __future__ import annotations

import torch

from bmtrain.kernels import launch
from bmtrain.kernels.launch import kernel, tl

BLOCK = 4096


def sum_parts(total: torch.Tensor, parts: torch.Tensor, *, accumulate: bool) -> None:
    """`total = (total if accumulate else 0) + parts[0] + parts[1] + ...`.

    Added in fp32 (fp64 if either is fp64) and rounded once.

    Args:
        total: (n,) of any floating dtype, written.
        parts: (ranks, n) of any floating dtype, contiguous.
        accumulate: whether to add the old `total`, as the last term.
    """
    is_double = torch.float64 in (total.dtype, parts.dtype)
    if is_double or not launch.takes(total):
        result = parts[0].to(torch.float64 if is_double else torch.float32, copy=True)
        for part in parts[1:]:
            result += part
        total.copy_(result.add_(total) if accumulate else result)
        return
    # one kernel that reads and writes each element once
    num_ranks, numel = parts.shape
    grid = (-(-numel // BLOCK),)
    constants = {"ACCUMULATE": accumulate, "NUM_RANKS": num_ranks, "BLOCK": BLOCK}
    sum_parts_kernel(grid, total, parts, numel, **constants)
    torch.autograd.graph.increment_version(total)


@kernel
def sum_parts_kernel(
    total: tl.tensor,
    parts: tl.tensor,
    n: tl.tensor,
    ACCUMULATE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program sums BLOCK elements of all parts in fp32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    result = tl.load(parts + i, mask=inside).to(tl.float32)
    for rank in tl.static_range(1, NUM_RANKS):
        result += tl.load(parts + rank * tl.cast(n, tl.int64) + i, mask=inside).to(tl.float32)
    if ACCUMULATE:
        result += tl.load(total + i, mask=inside).to(tl.float32)
    tl.store(total + i, result.to(total.dtype.element_ty), mask=inside)
