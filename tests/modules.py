"""Modules of programs, which import one another by their bare names."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The modules of this folder can be imported by their bare names, here alone.

    Folders have modules of the same names: those imported before are hidden, and come back.
    """
    names = {path.stem for path in folder.iterdir()}

    def taken() -> dict[str, ModuleType]:
        found = [name for name in sys.modules if name.partition(".")[0] in names]
        return {name: sys.modules.pop(name) for name in found}

    before = taken()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        taken()
        sys.modules.update(before)
