"""benchmarks/file_states.py on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from tests.modules import importable
from tests.ranks.runner import run_ranks

import bmtrain as bmt

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_files_and_updates_are_measured(tmp_path: Path) -> None:
    """The program, with sizes for a CPU."""
    (found,) = run_ranks(measured, 1, str(tmp_path), join=False, timeout=120)
    *disk, host, files = found
    assert len(disk) == 7
    assert all(r["gb_s"] >= r["settled_gb_s"] > 0 for r in disk)
    assert [host["states"], files["states"]] == ["in host memory", "in files"]
    assert host["states_gb"] == files["states_gb"] > 0
    assert not list(tmp_path.iterdir()), "files have no names"


def measured(folder: str) -> list[dict[str, Any]]:
    with importable(BENCHMARKS):
        program: Any = importlib.import_module("file_states")
    program.LOAD_BYTES, program.NUM_LOADS, program.DIM = 1 << 20, 2, 1024
    bmt.init_distributed(seed=0)
    updates = [program.update_record(2e6, 1, place) for place in (None, folder)]
    return [*program.disk_records(folder), *updates]


def test_both_ways_of_writing_arrive(tmp_path: Path) -> None:
    with importable(BENCHMARKS):
        program: Any = importlib.import_module("file_states")
    file = program.File(str(tmp_path))
    for fill, write in ((3, file.write), (4, file.write_directly)):
        file.load.fill_(fill)
        write(0)
        file.forget()
        for read in (file.read, file.read_directly):
            file.load.zero_()
            read(0)
            assert torch.all(file.load == fill)
