"""What the library prints and warns."""

from __future__ import annotations

import warnings
from typing import Any

from bmtrain.runtime import world


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """`print(*args, **kwargs)` on one rank of the world; the others stay silent."""
    if world.rank() == rank:
        print(*args, **kwargs)


def warn(message: str) -> None:
    """Warn the user once per place and text, on the calling rank, naming it when there are
    several.
    """
    prefix = f"[rank {world.rank()}] " if world.world_size() > 1 else ""
    warnings.warn(prefix + message, UserWarning, stacklevel=3)
