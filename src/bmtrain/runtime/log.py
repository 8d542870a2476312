"""What the library prints and warns."""

from __future__ import annotations

import resource
import warnings
from typing import Any

import torch

from bmtrain.runtime import world


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """`print(*args, **kwargs)` on one rank of the world; the others stay silent."""
    if world.rank() == rank:
        print(*args, **kwargs)


def warn(message: str) -> None:
    """Warn the user once per place and text, on the calling rank, naming it when there are several."""
    prefix = f"[rank {world.rank()}] " if world.world_size() > 1 else ""
    warnings.warn(prefix + message, UserWarning, stacklevel=3)


def see_memory(message: str, detail: bool = False) -> None:
    """Print on rank 0 the device memory in use and its peak since the last call (GiB), then reset the peak.

    `detail` adds torch's full table. On a CPU the resident set of the process is shown.
    """
    current = world.current("see_memory")
    if current.device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print_rank(f"{message}: peak resident memory {peak:.2f} GiB")
        return
    used, peak = (torch.cuda.memory_allocated(current.device) / 2**30, torch.cuda.max_memory_allocated(current.device) / 2**30)
    print_rank(f"{message}: allocated {used:.2f} GiB, peak {peak:.2f} GiB")
    if detail:
        print_rank(torch.cuda.memory_summary(current.device))
    torch.cuda.reset_peak_memory_stats(current.device)
