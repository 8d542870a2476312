"""Runs as processes: what they leave, how they fail, and that nothing of them stays."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SLEEPY = (
    "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', "
    "'import time; time.sleep(99)']).pid, flush=True); time.sleep(99)"
)


def test_what_takes_too_long_is_ended_with_all_it_started(bench, tmp_path):
    log, began = tmp_path / "log", time.monotonic()
    assert not bench.runs.finishes([sys.executable, "-c", SLEEPY], log, 3.0)
    assert time.monotonic() - began < 20
    state = Path(f"/proc/{int(log.read_text())}/stat")
    wait_for(
        lambda: not state.exists() or state.read_text().split()[2] == "Z",
        "the end of the child",
        seconds=10,
    )
    assert bench.runs.finishes([sys.executable, "-c", "print('done')"], log, 60.0)
    assert log.read_text() == "done\n"


LOGS = r"""
...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate\nValueError: x => out of memory
Traceback\n  File\nValueError: first\nRuntimeError: second => ValueError: first
[rank1]: RuntimeError: NCCL => RuntimeError: NCCL
a.b.ConfigurationError: what\n => a.b.ConfigurationError: what
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n => it ended without a word
RuntimeError: Connection closed by peer [127.0.0.1]\nValueError: cause => ValueError: cause
RuntimeError: Connection reset by peer\n traceback : Signal 11 (SIGSEGV) received by PID 7 => a rank was ended by SIGSEGV
RuntimeError: Connection reset by peer\nSignal 15 (SIGTERM) received by PID 7 => RuntimeError: Connection reset by peer
no Error at the start => it ended without a word
"""


def test_what_logs_say(bench):
    """Why it failed; and notes, of several ranks once."""
    for line in LOGS.strip().splitlines():
        log, why = line.split(" => ")
        assert bench.runs.why_it_failed(log.replace(r"\n", "\n")) == why
    warned = "/x/programs.py:84: UserWarning: [rank {}] Head runs uncompiled: because.\n  warn(\n"
    planned = "recomputation for inputs (2, 3): 4 blocks nothing"
    log = f"{warned.format(0)}{warned.format(1)}{planned}\nW1121 other words\n"
    assert bench.runs.notes_of(log) == ["Head runs uncompiled: because.", planned]


def compare(folder, *words, runs, **variables):
    """`subprocess` arguments of the program on the CPU."""
    command = f"benchmarks/compare.py --device cpu --gpus 1 --name try --folder {folder}".split()
    command += [
        *words,
        *(word for run in runs for word in ("--run", f"{run} --device cpu --shape tiny")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **variables}
    return {"args": [sys.executable, *command], "cwd": ROOT, "env": environment}


@pytest.mark.long
def test_comparing_goes_on_after_a_failure(tmp_path):
    """The whole program on the CPU; a run that cannot work comes first."""
    words = "--no-compile --warmup 1 --steps 2 --batch"
    runs = (f"--backend bmtrain --tp 2 {words} 2", f"--backend bmtrain {words} 2 4")
    done = subprocess.run(
        **compare(tmp_path, runs=runs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = json.loads((tmp_path / "try.json").read_text())["records"]
    assert "tp_size" in first["failure"]
    found = [(record["batch"], record["gpus"], record["mfu"]) for record in others]
    assert found == [(2, 1, None), (4, 1, None)]
    assert others[1]["loss"] < 6.2  # it has learned something of its one batch
    assert (tmp_path / "try.md").read_text().count("\n") == 5
    assert "bmtrain + eager, tiny, batch 4: " in done.stdout


def test_what_does_not_fit_in_time_is_left_out(tmp_path):
    """It is in the records and the table, with the reason; nothing is started for it."""
    runs = ("--backend bmtrain --batch 2 4",)
    given = compare(tmp_path, "--within", "7", "--repeat", "2", runs=runs)
    subprocess.run(**given, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((tmp_path / "try.json").read_text())
    why = "not tried: the 7 s of --within were over"
    assert [record["failure"] for record in report["records"]] == [why] * 2
    assert "--repeat 2" in report["command"]
