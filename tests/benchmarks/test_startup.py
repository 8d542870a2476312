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


def test_what_is_started(bench: Any) -> None:
    """The smallest batch of each run that compiles, and no profile."""
    (start,) = bench.startup.starts_of(arguments(run=[WORDS, f"{WORDS} --no-compile"]), 1)
    options = bench.options.from_words(start.words)
    assert (options.batch, options.warmup, options.steps, options.profile) == ([2], 0, 1, None)
    found = list(bench.startup.starts_of(arguments(suite=["gpt2", "2.7b"]), 4))
    assert {(start.suite, start.gpus) for start in found} == {("gpt2", 1), ("2.7b", 4)}
    chosen = [bench.options.from_words(start.words) for start in found]
    assert {options.backend for options in chosen} == {"bmtrain", "plain"}
    assert all(options.compile for options in chosen)


def test_all_suites_are_understood(bench: Any) -> None:
    """With every backend that compiles; none of them twice."""
    every = arguments(suite=[suite.name for suite in bench.suites.SUITES], backends=["bmtrain"])
    every.suite.remove("gpt2")  # for one GPU only
    found = list(bench.startup.starts_of(every, 8))
    assert len(found) == len(set(found)) > len(every.suite)


def found_by(states: list[dict[str, Any]], folders: list[str]) -> Any:
    """In the place of a run: the next state, after a file of code in the cache if it says so."""

    def run(
        words: str, gpus: int, timeout: float, variables: dict[str, str]
    ) -> list[dict[str, Any]]:
        folder = Path(variables["TORCHINDUCTOR_CACHE_DIR"])
        assert Path(variables["TRITON_CACHE_DIR"]).parent == folder
        folders.append(str(folder))
        state = states.pop(0)
        for name in state.get("writes", ()):
            (folder / name).write_text("")
        return [state]

    return run


def test_what_is_written(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After each run, failures too; a run cut off by a later one is kept. Folders are new ones."""
    folders: list[str] = []
    cold = {"first_step_s": 40.0, "loss": 6.5, "writes": ["a.so", "b.cubin", "c.py"]}
    states: list[dict[str, Any]] = [
        cold,
        {"first_step_s": 8.25, "loss": 6.5, "writes": ["d.json"]},
        cold,
        {"failure": "not done after 60 s"},
    ]
    monkeypatch.setattr(bench.startup, "run", found_by(states, folders))
    starts = list(bench.startup.starts_of(arguments(run=[WORDS, f"{WORDS} --fp8"]), 1))
    starts.append(starts[0])  # for which there is no state: as if the machine went away
    report: dict[str, Any] = {"records": []}
    args = arguments(folder=tmp_path, name="first")
    with pytest.raises(IndexError):
        bench.startup.measure_all(starts, report, args)
    records = json.loads((tmp_path / "first.json").read_text())["records"]
    assert [record.get("failure") for record in records] == [
        None,
        "cache warm: not done after 60 s",
    ]
    times = ("cold_s", "cold_compiled", "warm_s", "warm_compiled")
    assert [records[0][name] for name in times] == [40.0, 2, 8.25, 0]
    assert folders[0] == folders[1] != folders[2]
    assert not any(map(os.path.exists, folders))
    mode, why = "bmtrain + compile", "cache warm: not done after 60 s"
    assert bench.tables.tables_of({"records": records}).splitlines() == [
        "| suite | backend | model | first step, cold cache, s | files compiled, cold "
        "| first step, warm cache, s | files compiled, warm | failed |",
        "|---|---|---|---|---|---|---|---|",
        f"| - | {mode} | tiny, 1 x 2 | 40.0 | 2 | 8.2 | 0 |  |",
        f"| - | {mode} + fp8 | tiny, 1 x 2 | 40.0 | 2 |  |  | {why} |",
    ]


def test_the_command_names_no_place(bench: Any) -> None:
    said = bench.startup.command_of(
        arguments(suite=["gpt2"], folder=Path("/somewhere"), backends=["bmtrain"]), 2
    )
    assert said == ("benchmarks/startup.py --gpus 2 --timeout 60 --suite gpt2 --backends bmtrain")


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """The whole program, on the CPU."""
    command = [
        sys.executable,
        "benchmarks/startup.py",
        *f"--device cpu --gpus 1 --name try --folder {tmp_path} --run".split(),
        WORDS,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "try.json").read_text()
    (record,) = json.loads(written)["records"]
    assert "failure" not in record, record
    assert str(tmp_path) not in written
    assert record["cold_compiled"] > 0
    assert record["warm_compiled"] == 0
    assert record["cold_s"] > record["warm_s"] > 0
    assert record["warm_loss"] == record["cold_loss"]
