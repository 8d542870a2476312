"""What torch.compile needs on this machine in addition to torch."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence

C_COMPILERS = ("cc", "gcc", "clang")


def missing_for_gpu(compilers: Sequence[str] = C_COMPILERS) -> str | None:
    """The missing tool without which GPU code cannot be compiled, or None.

    Args:
        compilers: names or paths of C compilers; one of them must be found.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    if not any(shutil.which(name) for name in compilers):
        return f"a C compiler ({', '.join(compilers)})"
    return None
