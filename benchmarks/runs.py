"""One run of throughput.py as processes of its own: its records, or why there are none.

Whatever happens to it, this goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from machine import machine_from_outside
from reports import LEFT_OUT

from options import Options, from_words

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "throughput.py"
USABLE = 0.95  # of a GPU's memory: the rest is the driver's, NCCL's and the allocator's waste
RAISED = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)")
KILLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID")
TOKEN = "BMTRAIN_BENCHMARK_RUN"  # in the environment of all processes of a run
# what ranks say whose peer has failed
LEFT_BEHIND = ("onnection reset by peer", "onnection closed by peer")
NOTHING: Mapping[str, str] = {}
NOTE = re.compile(r"(?:UserWarning: (?:\[rank \d+\] )?|^(?=recomputation for inputs))(.+)")


def run(
    words: str, gpus: int, timeout: float, variables: Mapping[str, str] = NOTHING
) -> list[dict[str, Any]]:
    """One record for each batch size of a backend: what was measured, or why it was not.

    The environment has these variables too.
    """
    options = from_words(words)
    obstacle = obstacle_to(options, gpus)
    if obstacle:
        return [failure(options, gpus, 0, obstacle)]
    records, log, in_time = launched(words, gpus, timeout, variables)
    if len(records) < len(options.batch):
        why = why_it_failed(log) if in_time else f"not done after {timeout:.0f} s"
        print("\n".join("    | " + line for line in last_words(log)))
        records.append(failure(options, gpus, len(records), why))
    notes = notes_of(log)
    return [{**record, "notes": notes} if notes else record for record in records]


def left_out(words: str, gpus: int, within: float) -> list[dict[str, Any]]:
    """The record of a run that was not begun."""
    return [failure(from_words(words), gpus, 0, f"not tried: the {within:.0f} s {LEFT_OUT}")]


def launched(
    words: str, gpus: int, timeout: float, variables: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str, bool]:
    """The records that throughput.py has left, what it and its ranks printed, and whether it ended
    in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = pathlib.Path(folder, "records"), pathlib.Path(folder, "log")
        out.touch()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={gpus}",
            str(PROGRAM),
            *shlex.split(words),
            "--out",
            str(out),
        ]
        in_time = finishes(command, log, timeout, variables)
        return (
            [json.loads(line) for line in out.read_text().splitlines()],
            log.read_text(errors="replace"),
            in_time,
        )


def obstacle_to(options: Options, gpus: int) -> str:
    """Why a run is not tried; empty if it may work.

    An estimate, of what is there before any activation.
    """
    if options.device == "cpu":
        return ""
    needed, total = options.state_bytes(gpus) / 2**30, float(str(machine_from_outside()["gpu_gib"]))
    if needed <= USABLE * total:
        return ""
    return (
        f"not tried: weights, gradients and optimizer states alone are {needed:.0f} GiB a "
        f"GPU by estimate, of {total:.0f}"
    )


def finishes(
    command: Sequence[str],
    log: pathlib.Path,
    timeout: float,
    variables: Mapping[str, str] = NOTHING,
) -> bool:
    """Whether the command, whose words go to the log, ends in time; if not, it and all that it
    started are ended.
    """
    with log.open("wb") as file:
        token = uuid.uuid4().hex
        paths = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, **variables, "PYTHONPATH": paths, TOKEN: token}
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            process.wait(timeout)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            end(process)
            kill_all(token)


def end(process: subprocess.Popen[bytes]) -> None:
    """Politely, so that torchrun ends its ranks; then not."""
    for wish, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, wish)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            print("    it does not end: killing it")


def kill_all(token: str) -> None:
    """What has the token and is alive still. torchrun, told to end while it starts a rank, does not
    know that rank yet.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or ended meanwhile
            if process.environ().get(TOKEN) == token:
                process.kill()


def notes_of(log: str) -> list[str]:
    """Warnings and decisions, once each: compiled code or a graph that could not be had, the plan
    of what is recomputed.
    """
    found = (match[1][:300] for line in log.splitlines() if (match := NOTE.search(line)))
    return list(dict.fromkeys(found))


def last_words(log: str) -> list[str]:
    """The end of what the ranks printed, without torchrun's words about them."""
    lines = log.splitlines()
    stop = next(
        (number for number, line in enumerate(lines) if "torch/distributed/elastic" in line),
        len(lines),
    )
    return lines[max(0, stop - 25) : stop]


def why_it_failed(log: str) -> str:
    """In a few words: the first exception that a rank printed, but for what others said of its end;
    or the signal.
    """
    if "OutOfMemoryError" in log or "CUDA out of memory" in log:
        return "out of memory"
    raised = [
        match[1][:200]
        for line in log.splitlines()
        if (match := RAISED.match(line)) and "ChildFailedError" not in line
    ]
    cause = next((text for text in raised if not any(words in text for words in LEFT_BEHIND)), None)
    killed = next(
        (
            f"a rank was ended by {match[1]}"
            for match in KILLED.finditer(log)
            if match[1] != "SIGTERM"
        ),
        None,
    )
    return cause or killed or next(iter(raised), "it ended without a word")


def failure(options: Options, gpus: int, done: int, why: str) -> dict[str, Any]:
    """A record for the first batch size that has none; larger ones would fare no better."""
    missing = options.batch[done]
    return {
        **options.mode(),
        "gpus": gpus,
        "seq": options.geometry.seq,
        "batch": missing,
        "failure": why,
    }
