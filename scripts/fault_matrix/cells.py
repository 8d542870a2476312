"""The cells of the matrix: which fault comes at which moment, what is expected, and the verdict."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

from scripts.fault_matrix.faulty import FAULT, TWO, Fault
from scripts.fault_matrix.jobs import Job, Left
from scripts.fault_matrix.programs import (
    GPT2,
    OWN_LOOP,
    SAVE_EVERY,
    TRAIN,
    Program,
    damaged,
    records,
    resumed_step,
    steps_done,
)

from bmtrain.checkpoint import folder as folders
from bmtrain.checkpoint.shards import NAME

LIMIT_S = 60.0  # from a fault to the end of the job, or until who hangs is named
STOPPED_S = 35.0  # until torchrun kills a process that does not end
STEP, SAVED = 5, 6  # a step between checkpoints; one that is saved
NOT_ZERO, ANY = "not 0", "any"
RULE = f"""A cell is green if all of this holds:

* launcher and ranks have ended by themselves within {LIMIT_S:.0f} s of the fault, with an exit code
  that is expected: 0 for a stop that was asked for and for what a run survives, 75 for SIGUSR1 to a
  rank before the last step is done, otherwise another than 0 (what the launcher itself is sent may
  end it with any);
* {STOPPED_S:.0f} s more are for torchrun to kill a process that cannot end; a rank that is stopped
  or hangs is named within {LIMIT_S:.0f} s; one that hangs and answers may be at work: then the job
  is killed;
* every checkpoint with a manifest is whole, as `python -m bmtrain check` sees it, after the fault
  and after the resumed run;
* the resumed run ends with 0, and its record, with losses, gradient norms and validation, is
  bitwise that of the run without a fault;
* no more steps are lost than expected: the last step done less the step of the checkpoint that the
  resumed run went on from is at most {SAVE_EVERY - 1} where checkpoints come every {SAVE_EVERY}
  steps and the one before was written, {2 * SAVE_EVERY} where that one is hit, 0 where the run was
  asked to stop;
* where one rank is the cause, it is named, and no other alone; where two ranks cannot tell which
  of them is wrong, both are."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A fault of a program.

    Attributes:
        kind, moment: of the fault.
        step: see `faulty.Fault`.
        rank: to whom; None for both.
        codes: exit codes that are expected: a number, NOT_ZERO or ANY.
        lost: the most steps that may be lost.
        names: the ranks of which one of the sets must be named; empty for nobody.
        words: a pattern that must be in what is printed.
        start: what the folder holds before: "" nothing, "stopped" a run stopped after step 7,
            "damaged" one whose newest checkpoint is damaged, "killed" one that was resumed then and
            killed in step 12, "finished" a whole one.
        is_warm: see `jobs`.
        is_equal: whether the record is that of the run without a fault; else it is so before
            the fault, and one loss is not finite.
        answers: whether it hangs and answers, so that it is named and nothing is ended.
        programs: the names of those that it is of.
    """

    kind: str
    moment: str
    step: int = STEP
    rank: int | None = 1
    codes: int | str = NOT_ZERO
    lost: int = SAVE_EVERY - 1
    names: tuple[frozenset[int], ...] = (frozenset({1}),)
    words: str = ""
    start: str = ""
    is_warm: bool = True
    is_equal: bool = True
    answers: bool = False
    programs: tuple[str, ...] = (GPT2, TRAIN)

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What tells it from the others: as that of its result, without the program."""
        return self.kind, self.moment, None if self.kind in DAMAGES else self.rank


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a cell; `wrong` says what is not as expected.

    Attributes:
        seconds: from the fault to the end of the last process.
        told: from the fault until the rank was named.
        commit: of the source.
    """

    program: str
    kind: str
    moment: str
    rank: int | None
    code: int | None
    seconds: float | None
    told: float | None
    lost: int | None
    equal: bool
    named: list[int]
    wrong: list[str]
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        """What tells it from the others."""
        return self.program, self.kind, self.moment, self.rank

    @property
    def is_green(self) -> bool:
        """The verdict."""
        return not self.wrong


def hit(moment: str, one: frozenset[int]) -> dict[str, Any]:
    """What is expected of a job that a fault ends at this moment."""
    own: dict[str, Any] = {"moment": moment, "names": (one,) if one else ()}
    if moment == "import":
        own |= {"step": 0, "lost": 0, "is_warm": False}
    elif moment == "loading":
        own |= {"step": 0, "lost": 0, "start": "stopped"}
    elif moment in (JUST_SAVED, "saving", "before the manifest", "pruning"):
        own |= {"step": SAVED, "lost": 2 * SAVE_EVERY}
    elif moment == "first exchange":
        own |= {"step": 0, "lost": 0}
    elif moment == "first step":
        own |= {"step": 1, "lost": 0}
    elif moment == "ending":
        own |= {"step": 0, "lost": 2 * SAVE_EVERY}
    return own


JUST_SAVED = "just saved"
IN_STEP = ("forward", "backward", "optimizer")
WRITING = ("saving", "before the manifest")
AROUND = ("import", "loading", *IN_STEP, *WRITING, "ending")
NOBODY, ONE, ZERO, EITHER = frozenset[int](), frozenset({1}), frozenset({0}), frozenset({0, 1})
STOPPED = "SIGSTOP of a rank"
CANNOT_END = (STOPPED, "call that holds Python's lock")
LEFT_OUT = {
    "exceptions, sys.exit, sleeps while files are written": "the writer is a thread of the library "
    "that calls nothing of the program; an error of the disk stands for what it can meet",
    "signals that ask for a stop at import, loading": "nothing has begun, and Python does with "
    "them what it does: the kills at these moments stand for them",
    "NaN outside of forward, backward, optimizer": "numbers are computed there only",
    "damaged checkpoints at other moments than before resuming": "they are read then only",
    "fewer batches, a deadlock in the loader in examples/gpt2": "it has no loader: an early return "
    "and a sleep are the same there",
    "ENOSPC where files are read": "no system answers so",
    "exporting, in examples/gpt2": "it writes no model beside its checkpoints",
    "a real read-only mount": "it needs another user's rights: opening and making files fail as "
    "they would",
}


def cells() -> Iterator[Cell]:
    """The matrix."""
    for moment in AROUND:
        yield Cell("SIGKILL of a rank", **hit(moment, ONE))
    for moment in ("forward", *WRITING, "pruning"):
        yield Cell("SIGKILL of a rank", rank=0, **hit(moment, ZERO))
    for moment in ("import", "optimizer", *WRITING, "pruning"):
        yield Cell("SIGKILL of both ranks", rank=0, **hit(moment, NOBODY))
    yield Cell("SIGKILL of the launcher", rank=0, codes=ANY, **hit("pruning", NOBODY))
    second: dict[str, Any] = {"start": "killed", "lost": SAVE_EVERY, "names": (ONE,)}
    for moment, step in (("loading", 0), ("forward", 2), ("saving", 3)):
        yield Cell("SIGKILL of a rank", f"{moment}, second resume", step, **second)
    for moment in ("import", "loading", "backward", *WRITING, "ending"):
        # ranks that load go on until they notice
        lost = {"lost": max(hit(moment, NOBODY).get("lost", 0), SAVE_EVERY - 1)}
        yield Cell("SIGKILL of the launcher", codes=ANY, **hit(moment, NOBODY) | lost)
    for kind in ("segmentation fault", "abort"):
        for moment in ("import", "forward", "backward"):
            yield Cell(kind, **hit(moment, ONE))
    yield Cell("abort", **hit("saving", ONE))
    for kind in ("exception", "sys.exit(3)", "early return"):
        for moment in ("import", "loading", *IN_STEP, "ending"):
            if moment not in ("backward", "optimizer") or kind == "exception":
                # torchrun lets the others go on, who name it and wait for as long as `timeout` says
                is_unknown = (kind, moment) == ("early return", "import")
                yield Cell(kind, answers=is_unknown, **hit(moment, ONE))
    every = (GPT2, TRAIN, OWN_LOOP)
    for kind, rank, one in (
        ("exception", 1, ONE),
        ("exception", 0, ZERO),
        ("sys.exit(3)", 1, ONE),
        ("sys.exit(3)", 0, ZERO),
    ):
        yield Cell(kind, rank=rank, programs=every, **{**hit(JUST_SAVED, one), "lost": 0})
    yield Cell("SIGKILL of a rank", programs=every, **hit(JUST_SAVED, ONE))
    for rank, one in ((1, ONE), (0, ZERO)):
        for moment in ("import", "first exchange", "loading", "first step", *IN_STEP, "exchange"):
            if rank == 1 or moment not in ("import", "optimizer"):
                # before the ranks have met nobody can look at the others
                yield Cell(STOPPED, rank=rank, answers=moment == "import", **hit(moment, one))
        for moment in WRITING:
            yield Cell(STOPPED, rank=rank, **hit(moment, one))
    for moment in ("forward", "backward", "ending"):
        yield Cell("endless sleep", answers=True, **hit(moment, ONE))
    yield Cell("endless sleep", rank=0, answers=True, **hit("forward", ZERO))
    for rank, one in ((1, ONE), (0, ZERO)):
        yield Cell("deadlock", rank=rank, answers=True, programs=(TRAIN,), **hit("batch", one))
    yield Cell("call that holds Python's lock", **hit("optimizer", ONE))
    yield from _stops()
    yield from _numbers()
    yield from _disks()
    yield from _refused_calls()
    yield from _two_faults()


def _stops() -> Iterator[Cell]:
    stop: dict[str, Any] = {"lost": 0, "names": ()}
    for moment in ("forward", "optimizer", "saving", "before the manifest", "ending"):
        after: dict[str, Any] = hit(moment, NOBODY) | stop
        yield Cell("SIGTERM to a rank", codes=0, **after)
        yield Cell("SIGINT to a rank", codes=0, **after)
        # after its last step a run need not be started again
        yield Cell("SIGUSR1 to a rank", codes=0 if moment == "ending" else 75, **after)
        yield Cell("SIGTERM to the launcher", codes=ANY, **after)
        yield Cell("SIGINT to the launcher", codes=ANY, **after)
        yield Cell("SIGUSR1 to the launcher", codes=ANY, **after)


def _numbers() -> Iterator[Cell]:
    culprit: dict[str, Any] = {"step": 4, "lost": SAVE_EVERY, "names": (ONE,)}
    yield Cell("NaN in the losses of a rank", "forward", **culprit)
    yield Cell("NaN in the gradients of a rank", "backward", **culprit)
    # the rank's part of a weight is all ranks' weight
    yield Cell("NaN in a weight", "optimizer", **{**culprit, "names": ()}, words="not finite")
    yield Cell(
        "NaN in one loss of a rank", "forward", codes=0, names=(), is_equal=False, words="step"
    )
    culprit |= {"names": (), "programs": (OWN_LOOP,)}
    for kind, moment in (("losses of a rank", "forward"), ("gradients of a rank", "backward")):
        yield Cell(f"NaN in the {kind}", f"{moment}, own loop", words="not finite", **culprit)
    yield Cell("NaN in a weight", "optimizer, own loop", words="not finite", **culprit)
    both: dict[str, Any] = {"names": (EITHER, ONE)}
    yield Cell("skipped step", "optimizer", **both)
    yield Cell("one collective more", "backward", **both)


def _disks() -> Iterator[Cell]:
    at: dict[str, Any] = {"step": SAVED, "lost": 2 * SAVE_EVERY, "names": ()}
    yield Cell("full disk", "saving", words="No space left on device", **at)
    yield Cell("full disk", "saving", rank=0, words="No space left on device", **at)
    yield Cell("limit of file sizes", "saving", rank=None, words="File too large", **at)
    yield Cell("read-only file system", "saving", rank=None, words="Read-only file system", **at)
    for kind, words in DAMAGES.items():
        yield Cell(
            kind, "before resuming", codes=0, lost=2 * SAVE_EVERY, names=(), words=words[1],
            start="stopped",
        )  # fmt: skip
    loading: dict[str, Any] = {"moment": "loading", "step": 0, "start": "stopped"}
    yield Cell("unreadable files on a rank", lost=0, words="Input/output error", **loading)
    # two faults at once
    loading["start"] = "damaged"
    yield Cell(
        "SIGKILL of a rank", lost=2 * SAVE_EVERY, **{**loading, "moment": "loading, damaged"}
    )
    yield Cell(
        "unreadable files on a rank", lost=2 * SAVE_EVERY, words="Input/output error",
        **{**loading, "moment": "loading, damaged"},
    )  # fmt: skip
    yield Cell("two runs in one folder", "forward", codes=0, lost=0, names=())
    yield Cell("closed pipe", "forward", codes=0, lost=0, names=())
    yield Cell("closed pipe and SIGINT", "forward", codes=ANY, lost=0, names=())
    for kind in ("SIGKILL of a rank", "SIGKILL of the launcher"):
        yield Cell(
            kind, "exporting", rank=0, step=0, codes=ANY, lost=SAVE_EVERY, names=(),
            start="finished", programs=(TRAIN,),
        )  # fmt: skip


WORDS = {
    "EIO": "Input/output error",
    "ENOSPC": "No space left on device",
    "EACCES": "Permission denied",
}


def _refused_calls() -> Iterator[Cell]:
    """The system answers with an error, from then on: a save fails, pruning does not, and what
    cannot be read is not taken for damaged.
    """
    saving: dict[str, Any] = {**hit("saving", NOBODY), "lost": 2 * SAVE_EVERY}
    pruning: dict[str, Any] = {**hit("pruning", NOBODY), "codes": 0, "lost": 0}
    for name, words in WORDS.items():
        yield Cell(f"{name} at fsync", rank=1, words=words, **{**saving, "names": (ONE,)})
        for call in ("fsync", "rename", "mkdir", "manifest"):
            yield Cell(f"{name} at {call}", rank=0, words=words, **saving)
        yield Cell(f"{name} at unlink", rank=0, words=f"could not be removed: {words}", **pruning)
    for name in ("EIO", "EACCES"):
        for call in ("list", "stat"):
            yield Cell(f"{name} at {call}", rank=0, words=WORDS[name], **pruning)
        for call, rank in (("list", 0), ("stat", 1), ("manifest", 1)):
            found = hit("loading", frozenset({rank}))
            yield Cell(f"{name} at {call}", rank=rank, words=WORDS[name], **found)


def _two_faults() -> Iterator[Cell]:
    """One comes to rank 0, another to rank 1, at once: one of them is named, or both."""
    killed, failed, asked = "SIGKILL of a rank", "exception", "SIGTERM to a rank"
    one: dict[str, Any] = {"rank": None, "names": (ZERO, ONE, EITHER)}
    for first, second, moment in (
        (failed, failed, "backward"),
        (failed, killed, "forward"),
        (killed, STOPPED, "forward"),
        (STOPPED, killed, "exchange"),
        ("abort", "sys.exit(3)", "forward"),
        ("full disk", killed, "saving"),
        ("EIO at fsync", "EIO at fsync", "saving"),
        ("EIO at rename", killed, "before the manifest"),
    ):
        yield Cell(first + TWO + second, **{**hit(moment, ONE), **one})
    for second, moment in ((killed, "forward"), (failed, "optimizer")):
        yield Cell(asked + TWO + second, **{**hit(moment, ONE), "rank": None})
    both = {**hit("forward", NOBODY), "rank": None, "lost": 0}
    yield Cell(asked + TWO + "SIGUSR1 to a rank", codes=75, **both)
    yield Cell("SIGINT to a rank" + TWO + asked, codes=0, **both)


def _of_rank(path: pathlib.Path, suffix: str = "bin") -> pathlib.Path:
    return next(path.glob(f"rank-00001-*.{suffix}"))


def _flip(path: pathlib.Path) -> None:
    file = _of_rank(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def _cut(path: pathlib.Path) -> None:
    file = _of_rank(path)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _garble(path: pathlib.Path) -> None:
    (path / NAME).write_bytes(random.Random(0).randbytes(500))


# What is done to the newest checkpoint, and what is to be printed of it.
DAMAGES: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "flipped bit": (_flip, r"rank-00001-\S+\.bin"),
    "truncated file": (_cut, r"rank-00001-\S+\.bin"),
    "missing file": (lambda path: _of_rank(path, "pt").unlink(), r"rank-00001-\S+\.pt"),
    "garbage in the manifest": (_garble, "manifest"),
    "empty manifest": (lambda path: (path / NAME).write_bytes(b""), "manifest"),
    "no manifest": (lambda path: (path / NAME).unlink(), "resuming"),
}


class Bench:
    """Runs cells of one program.

    Args:
        folder: for the runs.

    Attributes:
        whole: the folder of a finished run without a fault.
    """

    def __init__(self, program: Program, folder: pathlib.Path) -> None:
        self.program, self.folder = program, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.whole = folder / "whole"
        self._run(self.whole, None, is_warm=True)
        self.truth = records(self.whole)
        if self.truth[-1]["step"] != 14:
            raise RuntimeError(f"{program.name} does not run without a fault: see {folder}")
        self._begun: dict[str, pathlib.Path] = {"finished": self.whole}
        self._beginning = threading.Lock()

    def begun(self, start: str) -> pathlib.Path:
        """The folder of a run that has come so far: see `Cell`."""
        if start in self._begun:
            return self._begun[start]
        found, mark = self.folder / start, str(self.folder / f"{start}-mark")
        if start == "stopped":
            self._run(found, Fault("SIGTERM to a rank", "forward", 1, 7, mark))
        else:
            shutil.copytree(self.begun("stopped"), found)
        if start == "killed":
            self._run(found, Fault("SIGKILL of a rank", "forward", 1, 5, mark), resume=True)
        if start == "damaged":
            _flip(folders.complete(found)[-1])
        if steps_done(found) != (11 if start == "killed" else 7):
            raise RuntimeError(f"{self.program.name}: see {found}")
        self._begun[start] = found
        return found

    def _run(
        self,
        folder: pathlib.Path,
        fault: Fault | None,
        *,
        resume: bool = False,
        is_warm: bool = True,
        wanted: tuple[frozenset[int], ...] = (),
    ) -> Left:
        environment = {} if fault is None else {FAULT: fault.dumped()}
        command = self.program.command(folder, resume=resume)
        job = Job(folder.with_name(folder.name + "-job"), command, environment, is_warm=is_warm)
        mark = None if fault is None else pathlib.Path(fault.mark)
        left = job.left(240, mark, LIMIT_S + 2 * STOPPED_S, lambda text: blamed(text) in wanted)
        said = folder.with_name(folder.name + "-job") / f"said-{job.launcher}"
        said.write_text(left.printed, encoding="utf-8")
        return left

    def result(self, cell: Cell, number: int) -> Result:
        """Run the cell: the fault, and the resumed run."""
        folder = self.folder / f"cell-{number}"
        if cell.start:
            with self._beginning:
                start = self.begun(cell.start)
            shutil.copytree(start, folder)
        if cell.kind in DAMAGES:
            return self._damaged(cell, folder)
        if cell.kind == "two runs in one folder":
            return self._two(cell, folder)
        mark = folder.with_name(folder.name + "-mark")
        fault = Fault(cell.kind, cell.moment.split(",")[0], cell.rank, cell.step, str(mark))
        wanted = cell.names if cell.answers else ()
        if cell.kind.startswith("closed pipe"):
            left = self._unread(folder, fault, is_interrupted="SIGINT" in cell.kind)
        else:
            left = self._run(
                folder, fault, resume=bool(cell.start), is_warm=cell.is_warm, wanted=wanted
            )
        when = float(mark.read_text()) if mark.exists() else None
        wrong = [] if when is not None else ["the fault did not come"]
        seconds = None if when is None else left.ended - when
        is_stuck = any(kind in CANNOT_END for kind in cell.kind.split(TWO))
        limit = LIMIT_S + STOPPED_S * (is_stuck and not cell.answers)
        told = left.first(lambda text: frozenset(blamed(text)) in cell.names)
        told = None if told is None or when is None else told - when
        if left.code is None and not cell.answers:
            wrong.append("had to be killed")
        elif seconds is not None and seconds > limit:
            wrong.append(f"ended {seconds:.0f} s after the fault")
        if left.code is not None and not _fits(left.code, cell.codes):
            wrong.append(f"exit code {left.code}, expected {cell.codes}")
        named = sorted(blamed(left.printed))
        if cell.names and frozenset(named) not in cell.names:
            wrong.append(f"named {named}, expected {[sorted(one) for one in cell.names]}")
        elif told is not None and told > LIMIT_S:
            wrong.append(f"named {told:.0f} s after the fault")
        if cell.words and not re.search(cell.words, left.printed):
            wrong.append(f"does not say {cell.words!r}")
        return self._resumed(cell, folder, (left.code, seconds, told, named), wrong)

    def _resumed(
        self,
        cell: Cell,
        folder: pathlib.Path,
        ended: tuple[int | None, float | None, float | None, list[int]],
        wrong: list[str],
    ) -> Result:
        """Go on, and compare."""
        wrong += damaged(folder) if cell.start != "damaged" else []
        done = steps_done(folder)
        again = self._run(folder, None, resume=True)
        step = resumed_step(again.printed)
        lost = None if step is None else done - step
        if again.code != 0:
            wrong.append(f"the resumed run ended with {again.code}")
        if lost is None or not 0 <= lost <= cell.lost:
            wrong.append(f"lost {lost} steps, expected at most {cell.lost}")
        found = records(folder)
        if cell.is_equal:
            equal = found == self.truth
        else:
            equal = found[: cell.step - 1] == self.truth[: cell.step - 1]
            equal &= [one["step"] for one in found] == [one["step"] for one in self.truth]
            # json writes NaN, which is unequal to itself
            equal &= sum(one.get("loss", 0.0) != one.get("loss", 0.0) for one in found) == 1
        if not equal:
            wrong.append("the record differs from that of the run without a fault")
        wrong += damaged(folder) + (self._exported(folder) if cell.is_equal else [])
        if not wrong:
            shutil.rmtree(folder)
        code, seconds, told, named = ended
        return Result(
            self.program.name, cell.kind, cell.moment, cell.rank, code, seconds, told, lost, equal,
            named, wrong,
        )  # fmt: skip

    def _exported(self, folder: pathlib.Path) -> list[str]:
        """What of the finished model is not that of the run without a fault."""
        if self.program.exports is None:
            return []
        want = contents(self.whole / self.program.exports)
        found = contents(folder / self.program.exports)
        differing = [name for name in want if found.get(name) != want[name]]
        return [f"the model's file {name} differs" for name in differing]

    def _damaged(self, cell: Cell, folder: pathlib.Path) -> Result:
        newest = folders.complete(folder)[-1]
        DAMAGES[cell.kind][0](newest)
        copy = folder.with_name(folder.name + "-first")
        shutil.copytree(folder, copy)
        first = self._run(copy, None, resume=True)
        wrong = [] if first.code == 0 else [f"exit code {first.code}, expected 0"]
        if not re.search(cell.words, first.printed.replace("\n", "")):
            wrong.append(f"does not say {cell.words!r}")
        step, done = resumed_step(first.printed), steps_done(folder)
        lost = None if step is None else done - step
        if lost is None or not 0 < lost <= cell.lost:
            wrong.append(f"lost {lost} steps, expected 1 to {cell.lost}")
        equal = records(copy) == self.truth
        if not equal:
            wrong.append("the record differs from that of the run without a fault")
        wrong += damaged(copy)
        ended = first.ended - first.began
        return Result(
            self.program.name, cell.kind, cell.moment, None, first.code, ended, None, lost, equal,
            [], wrong,
        )  # fmt: skip

    def _unread(self, folder: pathlib.Path, fault: Fault, *, is_interrupted: bool) -> Left:
        """A job of which nobody reads what it prints."""
        job = Job(
            folder.with_name(folder.name + "-job"), self.program.command(folder),
            {FAULT: fault.dumped()}, is_warm=True,
        )  # fmt: skip
        return job.unread(LIMIT_S, pathlib.Path(fault.mark), is_interrupted=is_interrupted)

    def _two(self, cell: Cell, folder: pathlib.Path) -> Result:
        """The second is refused, and the first goes on to its end."""
        mark = folder.with_name(folder.name + "-mark")
        fault = Fault("pause", "forward", 0, STEP, str(mark), timeout=90)
        command = self.program.command(folder)
        job = Job(
            folder.with_name(folder.name + "-job"), command, {FAULT: fault.dumped()}, is_warm=True
        )
        while not mark.exists():
            if job.has_ended():
                break
        second = self._run(folder, None, resume=True)
        first = job.left(120)
        wrong = [] if first.code == 0 else [f"the first ended with {first.code}"]
        if second.code in (0, None):
            wrong.append(f"the second ended with {second.code}")
        if "belongs to another run" not in second.printed.replace("\n", " "):
            wrong.append("the second does not say 'belongs to another run'")
        result = self._resumed(
            cell, folder, (second.code, second.ended - second.began, None, []), wrong
        )
        return dataclasses.replace(result, moment=cell.moment)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """All files of a folder; none if there is none."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _fits(code: int, codes: int | str) -> bool:
    if codes == ANY:
        return True
    return code != 0 if codes == NOT_ZERO else code == codes


# Most certain first: where an error was that all ranks have raised, who is missing or has failed,
# who did something else, torchrun's own words.
_ABSENT = (
    r"rank (\d+) (?:did not reach|has ended|has left|has failed|is stopped|"
    r"has not (?:arrived|reached)|does not wait for the others, which|does not answer|"
    r"runs, but Python)",
    r"\[rank (\d+)\] this rank failed; the run ends\.(?! rank \d)(?! bmtrain\.errors)",
)
_BLAMES = (
    # the first line of the watchdog's report: what others say is of the end that it brings
    (r"hangs: no progress for \d+ s\. It ends with exit code 81\. rank (\d+)",),
    (r"\(on rank (\d+)\)", r"In the last one: rank (\d+):"),
    _ABSENT,
    (r"rank (\d+) did number",),
    (r"failed \(exitcode: -?\d+\) local_rank: (\d+)",),
)


def blamed(printed: str) -> set[int]:
    """The ranks that are named as the cause."""
    text = " ".join(printed.split())
    for patterns in _BLAMES:
        found = {int(match) for pattern in patterns for match in re.findall(pattern, text)}
        if found:
            return found
    return set()
