"""The modules of benchmarks/, imported as its programs import one another: by their bare names."""

import importlib
from pathlib import Path

import pytest
from tests.modules import importable

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Modules:
    """`bench.tables` is benchmarks/tables.py."""

    def __getattr__(self, name):
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def bench():
    """All of them on demand."""
    with importable(BENCHMARKS):
        yield Modules()
