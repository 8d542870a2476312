"""The programs that measure states in files and in few bits, with sizes for a CPU."""

import importlib

import pytest
import torch
from tests.benchmarks.conftest import BENCHMARKS
from tests.modules import importable
from tests.ranks.runner import run_ranks

import bmtrain as bmt


def program(name):
    with importable(BENCHMARKS):
        return importlib.import_module(name)


def file_states(folder):
    """On a rank, as the program's `main` begins."""
    files = program("file_states")
    files.LOAD_BYTES, files.NUM_LOADS, files.DIM = 1 << 20, 2, 1024
    bmt.init_distributed(seed=0)
    updates = [files.update_record(2e6, 1, place) for place in (None, folder)]
    return [*files.disk_records(folder), *updates]


@pytest.mark.long
def test_files_and_updates_are_measured(tmp_path):
    (found,) = run_ranks(file_states, 1, str(tmp_path), join=False, timeout=120)
    *disk, host, files = found
    assert len(disk) == 7
    assert all(r["gb_s"] >= r["settled_gb_s"] > 0 for r in disk)
    assert [host["states"], files["states"]] == ["in host memory", "in files"]
    assert host["states_gb"] == files["states_gb"] > 0
    assert not list(tmp_path.iterdir()), "files have no names"


def test_both_ways_of_writing_arrive(tmp_path):
    file = program("file_states").File(str(tmp_path))
    for fill, write in ((3, file.write), (4, file.write_directly)):
        file.load.fill_(fill)
        write(0)
        file.forget()
        for read in (file.read, file.read_directly):
            file.load.zero_()
            read(0)
            assert torch.all(file.load == fill)
