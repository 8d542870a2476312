"""What the metrics need of the other ranks; without a process group, there are none."""

from __future__ import annotations

import torch

import bmtrain as bmt


def summed(counts: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's `counts`, on the CPU. Collective."""
    if not bmt.is_initialized():
        return counts
    return bmt.distributed.all_reduce(counts.to(bmt.device()), "sum").cpu()


def gathered(rows: torch.Tensor) -> torch.Tensor:
    """Every rank's `rows`, which may be of different numbers, in rank order, on the CPU.

    Collective.
    """
    if not bmt.is_initialized():
        return rows
    return bmt.gather_result(rows.to(bmt.device())).cpu()
