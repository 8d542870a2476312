"""The modules of benchmarks/, imported as its programs import one another: by their bare names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.modules import importable

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Modules:
    """`bench.tables` is benchmarks/tables.py."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def bench() -> Iterator[Modules]:
    """All of them on demand."""
    with importable(BENCHMARKS):
        yield Modules()
