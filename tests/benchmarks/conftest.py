"""The modules of benchmarks/, imported as its programs import one another: by their bare names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = [path.stem for path in BENCHMARKS.glob("*.py")]


class Modules:
    """`bench.tables` is benchmarks/tables.py."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@pytest.fixture(scope="session")
def bench() -> Iterator[Modules]:
    """All of them on demand; forgotten afterwards, since other folders have modules of the same
    names.
    """
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield Modules()
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(before)
