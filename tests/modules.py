"""Modules of programs, which import one another by their bare names."""

import contextlib
import sys


@contextlib.contextmanager
def importable(folder):
    """The modules of this folder can be imported by their bare names, here alone.

    Folders have modules of the same names: those imported before are hidden, and come back.
    """
    names = {path.stem for path in folder.iterdir()}

    def taken():
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
