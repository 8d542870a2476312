"""benchmarks/small_states.py on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tests.modules import importable
from tests.ranks.runner import run_ranks

import bmtrain as bmt

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_small_states_are_measured() -> None:
    """The program, with sizes for a CPU: bytes of states, losses of each seed and form."""
    (found,) = run_ranks(small_states, 1, join=False, timeout=120)
    steps = [r for r in found if r["what"] == "small states step"]
    assert [r["bytes_an_element"] for r in steps] == [12, 6.125, 10, 8, 4.125, 12, 6.125]
    losses = [r for r in found if r["what"] == "small states losses"]
    assert [r["seed"] for r in losses] == [3, 4]
    ends = [[kind["losses"][-1] for kind in r["kinds"].values()] for r in losses]
    assert len({*ends[0], *ends[1]}) >= 6  # split masters are fp32 masters but for rare weights
    assert all(kind["validation"] < 6 for r in losses for kind in r["kinds"].values())


def small_states() -> list[dict[str, Any]]:
    """On a rank, as the program's `main` begins."""
    with importable(BENCHMARKS):
        program: Any = importlib.import_module("small_states")
    program.WIDTH = 64
    arguments = "--steps 4 --layers 1 --dim 64 --seq 16 --batch 2 --seeds 3 4 --repeats 1"
    args = program.parsed([*arguments.split(), "--matrices", "2", "--host-matrices", "1"])
    bmt.init_distributed(seed=0, compile=False)
    found: list[dict[str, Any]] = program.measured(args)
    return found
