"""First steps with cold and warm caches: what is started, what is written, and how it looks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = "--backend bmtrain --device cpu --shape tiny --batch 4 2 --profile"


def arguments(**others: Any) -> argparse.Namespace:
    common = {"run": None, "suite": None, "backends": ["bmtrain", "plain"], "timeout": 60.0}
    return argparse.Namespace(**(common | others))


def test_what_is_written(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After each run, failures too; a run cut off by a later one is kept. Folders are new ones."""
    cold = {"first_step_s": 40.0, "loss": 6.5, "writes": ["a.so", "b.cubin", "c.py"]}
    warm = {"first_step_s": 8.25, "loss": 6.5, "writes": ["d.json"]}
    states: list[dict[str, Any]] = [cold, warm, cold, {"failure": "not done after 60 s"}]
    folders: list[Path] = []

    def run(_: str, __: int, ___: float, variables: dict[str, str]) -> list[dict[str, Any]]:
        """The next state, after files in the cache that it says."""
        folders.append(Path(variables["TORCHINDUCTOR_CACHE_DIR"]))
        assert Path(variables["TRITON_CACHE_DIR"]).parent == folders[-1]
        state = states.pop(0)
        for name in state.get("writes", ()):
            (folders[-1] / name).write_text("")
        return [state]

    monkeypatch.setattr(bench.startup, "run", run)
    starts = list(bench.startup.starts_of(arguments(run=[WORDS, f"{WORDS} --fp8"]), 1))
    starts.append(starts[0])  # for which there is no state: as if the machine went away
    with pytest.raises(IndexError):
        bench.startup.measure_all(starts, {"records": []}, arguments(folder=tmp_path, name="first"))
    records = json.loads((tmp_path / "first.json").read_text())["records"]
    mode, why = "bmtrain + compile", "cache warm: not done after 60 s"
    assert [record.get("failure") for record in records] == [None, why]
    times = ("cold_s", "cold_compiled", "warm_s", "warm_compiled")
    assert [records[0][name] for name in times] == [40.0, 2, 8.25, 0]
    assert folders[0] == folders[1] != folders[2] and not any(map(Path.exists, folders))
    assert bench.tables.tables_of({"records": records}).splitlines() == [
        "| suite | backend | model | first step, cold cache, s | files compiled, cold "
        "| first step, warm cache, s | files compiled, warm | failed |",
        "|---|---|---|---|---|---|---|---|",
        f"| - | {mode} | tiny, 1 x 2 | 40.0 | 2 | 8.2 | 0 |  |",
        f"| - | {mode} + fp8 | tiny, 1 x 2 | 40.0 | 2 |  |  | {why} |",
    ]


@pytest.mark.long
@pytest.mark.compiler
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """The whole program, on the CPU."""
    words = f"benchmarks/startup.py --device cpu --gpus 1 --name try --folder {tmp_path} --run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, *words.split(), WORDS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "try.json").read_text()
    (record,) = json.loads(written)["records"]
    assert "failure" not in record, record
    assert str(tmp_path) not in written
    assert record["cold_compiled"] > 0 == record["warm_compiled"]
    assert record["cold_s"] > record["warm_s"] > 0
    assert record["warm_loss"] == record["cold_loss"]
