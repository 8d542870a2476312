"""Messages and warnings printed by the library."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

from bmtrain.errors import printable
from bmtrain.runtime import world


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """`print(*args, **kwargs)` on one `rank` of the run; the others print nothing."""
    if world.rank() == rank:
        print(*args, **kwargs)


def tell(message: str) -> None:
    """Print on rank 0, and go on where nobody can read it, or the terminal lacks a letter."""
    with contextlib.suppress(OSError, ValueError):
        print_rank(printable(message), flush=True)


def warn(message: str) -> None:
    """Warn once per call site and text; the message names the rank if there are several."""
    prefix = f"[rank {world.rank()}] " if world.world_size() > 1 else ""
    warnings.warn(prefix + printable(message), UserWarning, stacklevel=3)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, of which the first is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
