"""Kills at random times: one long run, killed and resumed until it has come to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import signal
import time

import psutil
from scripts.fault_matrix.cells import LIMIT_S
from scripts.fault_matrix.jobs import Job, Left
from scripts.fault_matrix.programs import (
    SAVE_EVERY,
    Program,
    damaged,
    records,
    resumed_step,
    steps_done,
)

TARGETS = ("rank 0", "rank 1", "both ranks", "launcher")
LATER_S = 2.0  # kills come up to so much after the first step


@dataclasses.dataclass(frozen=True)
class Kill:
    """A SIGKILL; `wrong` says what is not as expected."""

    program: str
    target: str
    after: float
    steps: int
    code: int | None
    seconds: float
    lost: int | None
    wrong: list[str]


class Chain:
    """Kills of one program.

    A run that comes to its end is compared with the one that nobody killed, and another begins.

    Args:
        program: with `more` arguments, that make it long.
        folder: for the runs.
        seed: of the times and targets.
    """

    def __init__(self, program: Program, more: list[str], folder: pathlib.Path, seed: int) -> None:
        self.program, self.more, self.folder = program, more, folder
        self._random = random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        job = self._job(folder / "whole", resume=False)
        while not steps_done(folder / "whole"):
            if job.has_ended():
                raise RuntimeError(f"{program.name} does not run without a kill: {job.left(1)}")
        self._latest_s = time.monotonic() - job.began + LATER_S
        job.left(240)
        self.truth = records(folder / "whole")
        self.num_runs, self.wrong = 0, list[str]()

    def _job(self, folder: pathlib.Path, *, resume: bool) -> Job:
        command = self.program.command(folder, *self.more, resume=resume)
        return Job(folder.with_name(folder.name + "-job"), command, {}, is_warm=True)

    def kills(self, count: int) -> list[Kill]:
        """So many, and the end of the last run."""
        found: list[Kill] = []
        while len(found) < count:
            self._run(found, count)
        return found

    def _run(self, found: list[Kill], count: int) -> None:
        """One run, to its end."""
        self.num_runs += 1
        folder = self.folder / f"run-{self.num_runs}"
        pending: Kill | None = None
        while True:
            job = self._job(folder, resume=True)
            is_last = len(found) >= count
            after = self._random.uniform(0.0, self._latest_s)
            target = self._random.choice(TARGETS)
            is_over = job.has_ended(240.0 if is_last else after)
            if not is_over:
                target = self._kill(job, target)
            when = time.monotonic()
            left = job.left(LIMIT_S)
            if pending is not None:
                found[-1] = pending = with_step(pending, resumed_step(left.printed))
            if is_over:
                self._compare(folder, left)
                return
            wrong = damaged(folder)
            if left.code is None:
                wrong.append("had to be killed")
            pending = Kill(
                self.program.name, target, after, steps_done(folder), left.code, left.ended - when,
                None, wrong,
            )  # fmt: skip
            found.append(pending)

    def _kill(self, job: Job, target: str) -> str:
        """Returns who it was: the launcher if the ranks have not begun."""
        ranks = job.ranks()
        wanted = {"rank 0": [0], "rank 1": [1], "both ranks": [0, 1]}.get(target, [])
        numbers = [ranks[rank] for rank in wanted if rank in ranks]
        with contextlib.suppress(psutil.NoSuchProcess):
            own = {child.pid for child in psutil.Process(job.launcher).children()}
            numbers = [number for number in numbers if number in own]
        if not numbers:
            target, numbers = "launcher", [job.launcher]
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        return target

    def _compare(self, folder: pathlib.Path, left: Left) -> None:
        where = f"{self.program.name}, run {self.num_runs}"
        if left.code != 0:
            self.wrong.append(f"{where} ended with {left.code}: {left.printed[-500:]}")
        if records(folder) != self.truth:
            self.wrong.append(f"{where}: the record differs from that of the run without a kill")
        self.wrong += damaged(folder)
        if not self.wrong:
            shutil.rmtree(folder)


def with_step(kill: Kill, step: int | None) -> Kill:
    """With the step that the next part of the run went on from; None if that was killed before."""
    if step is None:
        return kill
    lost = kill.steps - step
    is_right = 0 <= lost <= 2 * SAVE_EVERY
    wrong = [] if is_right else [f"lost {lost} steps, expected at most {2 * SAVE_EVERY}"]
    return dataclasses.replace(kill, lost=lost, wrong=kill.wrong + wrong)
