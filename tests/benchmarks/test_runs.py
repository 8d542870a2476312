"""Runs as processes: what they leave, how they fail, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SLEEPY = (
    "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', "
    "'import time; time.sleep(99)']).pid, flush=True)"
)


def test_what_takes_too_long_is_ended_with_all_it_started(bench: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    began = time.monotonic()
    assert not bench.runs.finishes([sys.executable, "-c", f"{SLEEPY}; time.sleep(99)"], log, 3.0)
    assert time.monotonic() - began < 20
    child = int(log.read_text())
    state = Path(f"/proc/{child}/stat")
    wait_for(
        lambda: not state.exists() or state.read_text().split()[2] == "Z",
        f"the end of process {child}",
        seconds=10,
    )


def test_what_ends_in_time(bench: Any, tmp_path: Path) -> None:
    assert bench.runs.finishes([sys.executable, "-c", "print('done')"], tmp_path / "log", 60.0)
    assert (tmp_path / "log").read_text() == "done\n"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (
            "...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate\nValueError: x",
            "out of memory",
        ),
        ("Traceback\n  File\nValueError: first\nRuntimeError: second", "ValueError: first"),
        ("[rank1]: RuntimeError: NCCL", "RuntimeError: NCCL"),
        ("a.b.ConfigurationError: what\n", "a.b.ConfigurationError: what"),
        (
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
            "it ended without a word",
        ),
        (
            "RuntimeError: Connection closed by peer [127.0.0.1]\nValueError: cause",
            "ValueError: cause",
        ),
        (
            "RuntimeError: Connection reset by peer\n traceback : Signal 11 (SIGSEGV) "
            "received by PID 7",
            "a rank was ended by SIGSEGV",
        ),
        (
            "RuntimeError: Connection reset by peer\nSignal 15 (SIGTERM) received by PID 7",
            "RuntimeError: Connection reset by peer",
        ),
        ("no Error at the start", "it ended without a word"),
    ],
)
def test_why_it_failed(bench: Any, log: str, why: str) -> None:
    assert bench.runs.why_it_failed(log) == why


def test_notes(bench: Any) -> None:
    """Of several ranks once."""
    log = (
        "/x/src/bmtrain/compile/programs.py:84: UserWarning: [rank 0] Head runs "
        "uncompiled: because.\n  warn(\n"
        "/x/src/bmtrain/compile/programs.py:84: UserWarning: [rank 1] Head runs "
        "uncompiled: because.\n"
        "recomputation for inputs (2, 3): 4 blocks nothing\nW1121 other words\n"
    )
    assert bench.runs.notes_of(log) == [
        "Head runs uncompiled: because.",
        "recomputation for inputs (2, 3): 4 blocks nothing",
    ]


def test_comparing_goes_on_after_a_failure(tmp_path: Path) -> None:
    """The whole program on the CPU; a run that cannot work comes first."""
    words = "--device cpu --shape tiny --no-compile --warmup 1 --steps 2 --batch"
    runs = [f"--backend bmtrain --tp 2 {words} 2", f"--backend bmtrain {words} 2 4"]
    command = [
        sys.executable,
        "benchmarks/compare.py",
        *f"--device cpu --gpus 1 --name try --folder {tmp_path}".split(),
    ]
    command += [word for run in runs for word in ("--run", run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = json.loads((tmp_path / "try.json").read_text())["records"]
    assert "tp_size" in first["failure"]
    assert [(record["batch"], record["gpus"], record["mfu"]) for record in others] == [
        (2, 1, None),
        (4, 1, None),
    ]
    assert others[1]["loss"] < 6.2  # it has learned something of its one batch
    assert (tmp_path / "try.md").read_text().count("\n") == 5
    assert "bmtrain + eager, tiny, batch 4: " in done.stdout


def test_what_does_not_fit_in_time_is_left_out(tmp_path: Path) -> None:
    """It is in the records and the table, with the reason; nothing is started for it."""
    command = [
        sys.executable,
        "benchmarks/compare.py",
        *f"--device cpu --gpus 1 --name try --folder {tmp_path} --within 7".split(),
    ]
    command += ["--run", "--backend bmtrain --device cpu --shape tiny --batch 2 4", "--repeat", "2"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "try.json").read_text())
    assert [record["failure"] for record in report["records"]] == 2 * [
        "not tried: the 7 s of --within were over"
    ]
    assert report["command"].endswith("--repeat 2")


def num_processes_that_name(text: str) -> int:
    """How many there are whose words hold it."""
    number = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            number += text in path.read_text()
    return number


def test_who_ends_the_comparison_ends_its_ranks(tmp_path: Path) -> None:
    """They are in a session of their own, which no signal to the program reaches."""
    command = [
        sys.executable,
        "benchmarks/compare.py",
        *f"--device cpu --gpus 1 --name try --folder {tmp_path}".split(),
    ]
    command += [
        "--run",
        "--backend bmtrain --device cpu --shape tiny --no-compile --batch 2 --steps 1000000",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "TMPDIR": str(tmp_path)}
    # of the file for records, which torchrun and its ranks are told
    name = f"--out {tmp_path}".replace(" ", "\0")
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: num_processes_that_name(name) > 1, "torchrun and a rank")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    wait_for(lambda: num_processes_that_name(name) == 0, "the end of all ranks")


def test_a_machine_without_gpus_is_told(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "benchmarks/compare.py", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "torch finds none here" in done.stderr
    assert not list(tmp_path.iterdir())
