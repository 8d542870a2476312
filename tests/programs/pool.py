"""Processes that run one program after the other, each in a run of its own, and are replaced when
one does not end well.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
import time
import traceback
import warnings
from multiprocessing import connection
from types import TracebackType
from typing import Any

import torch
from tests.programs import running
from tests.programs.features import Spec
from tests.ranks import runner

from bmtrain.runtime import world
from bmtrain.shard import gradient
from bmtrain.verification.processes import REFUSALS

LIMIT_S = 30.0
GRACE_S = 2.0
MAX_RANKS = 3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """right, refused, wrong, crash or hang; invalid where it fails in one process; and why."""

    word: str
    detail: str = ""

    @property
    def sort(self) -> str:
        """The same for faults that may be the same: of what a wrong number is, or the class of an
        exception.
        """
        words = self.detail.partition(": ")[2]
        return (
            f"{self.word} "
            f"{words.partition(', ')[2].split(' ')[0] if self.word == 'wrong' else words.partition(':')[0]}"
        )

    def __bool__(self) -> bool:
        return self.word in ("right", "refused")


class Pool:
    """Some processes, forked from the server of the tests. Use it in a `with`."""

    def __init__(self) -> None:
        self._members: list[tuple[Any, connection.Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        self._number = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._folder.cleanup()

    def judge(self, spec: Spec, limit: float = LIMIT_S) -> Verdict:
        """Run a program."""
        if not self._members:
            self._members = [_started(rank) for rank in range(MAX_RANKS)]
        self._number += 1
        meeting = pathlib.Path(self._folder.name, str(self._number)).as_uri()
        members = self._members[: spec.ranks]
        for _, pipe in members:
            pipe.send((spec, meeting))
        said = _collected(members, time.monotonic() + limit)
        verdict = _verdict(said, spec.ranks)
        if verdict.word != "right":  # what it has left behind is nobody else's business
            self.end()
        return verdict

    def end(self) -> None:
        """Kill the processes."""
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []


def _started(rank: int) -> tuple[Any, connection.Connection]:
    here, there = runner.fork_server().Pipe()
    process = runner.fork_server().Process(target=_serve, args=(rank, there), daemon=True)
    process.start()
    there.close()
    return process, here


def _collected(
    members: list[tuple[Any, connection.Connection]], deadline: float
) -> dict[int, tuple[str, str]]:
    waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(members)}
    said: dict[int, tuple[str, str]] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready: list[Any] = connection.wait(list(waiting), timeout=left)
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                said[rank] = pipe.recv()
            except EOFError:
                said[rank] = ("crash", "the process died")
            if said[rank][0] not in ("right", "wrong", "invalid"):
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return said


def _verdict(said: dict[int, tuple[str, str]], ranks: int) -> Verdict:
    kinds = [kind for kind, _ in said.values()]
    first = {
        kind: next(f"rank {rank}: {text}" for rank, (k, text) in said.items() if k == kind)
        for kind in kinds
    }
    late = (
        ""
        if len(said) == ranks
        else f" (ranks {sorted(set(range(ranks)) - set(said))} did not end)"
    )
    for kind in ("invalid", "crash", "refused", "wrong"):
        if kind in first:
            word = "crash" if kind == "refused" and kinds.count(kind) < ranks else kind
            return Verdict(word, first[kind] + late)
    return Verdict("hang", late.strip()) if late else Verdict("right", first["right"])


def _serve(rank: int, pipe: connection.Connection) -> None:
    """The life of a process."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    gradient.LEAST_FREED = 0  # the models are small
    warnings.simplefilter("ignore")
    while True:
        try:
            spec, meeting = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            said = running.judge(spec, meeting)
        except REFUSALS as error:
            said = ("refused", f"{type(error).__name__}: {error}")
        except BaseException as error:
            where = " < ".join(
                f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
                for frame in reversed(traceback.extract_tb(error.__traceback__)[-4:])
            )
            said = (
                "crash",
                f"{type(error).__name__}: {str(error)[:300]} ({where})".replace("\n", " "),
            )
        pipe.send(said)
        if said[0] == "right":
            world.shutdown()
