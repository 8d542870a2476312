"""What torch.compile needs on this machine beyond torch."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence

C_COMPILERS = ("cc", "gcc", "clang")


def missing_for_gpu(compilers: Sequence[str] = C_COMPILERS) -> str | None:
    """What is missing to compile code for a GPU, as a phrase; None if nothing is known to be.

    Args:
        compilers: names or paths of C compilers, of which one must be found.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    if not any(shutil.which(name) for name in compilers):
        return f"a C compiler ({', '.join(compilers)})"
    return None
