"""Messages and warnings printed by the library."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

from bmtrain.runtime import world


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """`print(*args, **kwargs)` on one `rank` of the run; the others print nothing."""
    if world.rank() == rank:
        print(*args, **kwargs)


_CONTROLS = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_HARMLESS = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A text of others as a terminal may show it: what would control it is written out."""
    return text.translate(_HARMLESS)


def tell(message: str) -> None:
    """Print on rank 0, and go on where nobody can read it, or the terminal lacks a letter."""
    with contextlib.suppress(OSError, ValueError):
        print_rank(message, flush=True)


def warn(message: str) -> None:
    """Warn once per call site and text; the message names the rank if there are several."""
    prefix = f"[rank {world.rank()}] " if world.world_size() > 1 else ""
    warnings.warn(prefix + message, UserWarning, stacklevel=3)


def rich(name: str) -> Any:
    """A module of rich, by its name in it.

    When it is used: all of them would be a seventh of the time of `import bmtrain`.
    """
    return importlib.import_module(f"rich.{name}")
