"""A rank ends right after a checkpoint has begun to be written in the background."""

import contextlib
import os
import signal
import sys
import time

import pytest
from scripts.fault_matrix.programs import damaged
from tests.faults import program
from tests.faults.ranks import run

import bmtrain as bmt
from bmtrain.checkpoint import folder as folders
from bmtrain.checkpoint import writing
from bmtrain.runtime import watchdog
from bmtrain.runtime.process import Exit

STEPS, LAST = 6, 4  # steps of a run; after this one a rank ends
WRITES_S = 1.5  # for which a slow rank writes
FAULTS = {
    "exception": program.fail,
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "none": lambda: None,
}


def loop(folder, faults, slow, is_with):
    """A user's own loop; each rank may meet with a fault, and the slow one writes for long."""
    watchdog.ASK_S = (0.5, 1.0, 30.0)
    bmt.init_distributed(device="cpu")
    training = program.Training()
    checkpoints = bmt.CheckpointManager(folder)
    with checkpoints if is_with else contextlib.nullcontext():
        restored = checkpoints.restore(training.model, training.manager)
        begin = restored.step if restored else 0
        for number in range(begin, STEPS):
            loss = training.step(number)
            print(f"step {number + 1}: {loss!r}", flush=True)
            if number + 1 == LAST - 2:
                checkpoints.save(LAST - 2, training.model, training.manager).wait()
            if number + 1 == LAST and faults:
                make_slow(bmt.rank() == slow)
                checkpoints.save(LAST, training.model, training.manager)
                print(f"fault at {time.monotonic()}", flush=True)
                FAULTS[faults[bmt.rank()]]()
    if not is_with:
        checkpoints.close()


def make_slow(is_here):
    right = writing._write_at

    def slow(*args):
        time.sleep(WRITES_S)
        right(*args)

    if is_here:
        writing._write_at = slow


def losses(left):
    return [line for line in left.printed[0].splitlines() if line.startswith("step")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    left = run(loop, str(folder / "run"), (), None, True, folder=folder)
    assert left.codes == [0, 0], left.printed
    return losses(left)


@pytest.mark.parametrize(
    ("faults", "slow", "is_with", "step", "hosted"),
    [
        pytest.param(
            *case,
            hosted,
            marks=()
            if (number, hosted) in {(0, True), (4, False), (6, True)}
            else pytest.mark.long,
        )
        for hosted in (True, False)
        for number, case in enumerate(
            [
                (("none", "exception"), 1, False, LAST),
                (("none", "exception"), 0, True, LAST),
                (("exception", "none"), 1, True, LAST),
                (("exception", "exception"), 0, False, LAST),
                (("none", "exit"), 0, True, LAST),
                (("exit", "none"), 1, False, LAST),
                (("none", "sigkill"), 1, True, LAST - 2),
                (("sigkill", "none"), 1, False, LAST - 2),
                (("exception", "sigkill"), 1, True, LAST - 2),
                (("exception", "sigstop"), 1, False, LAST - 2),
                (("interrupt", "interrupt"), 1, True, LAST),
                (("interrupt", "interrupt"), 0, False, LAST),
            ]
        )
    ],
)
def test_the_last_save_counts(faults, slow, is_with, step, hosted, whole, tmp_path):
    """Unless a rank is killed or stopped before its part is written: then the one before does. All
    ranks end, and the next run goes on bitwise from there.
    """
    folder = tmp_path / "run"
    left = run(loop, str(folder), faults, slow, is_with, folder=tmp_path, hosted=hosted, grace=15)
    codes: dict[str, set[int | None]] = {
        "none": {Exit.PARTED, Exit.HUNG},
        "exception": {1, Exit.HUNG},
        "exit": {3},
        "interrupt": {Exit.INTERRUPTED},
        "sigkill": {-signal.SIGKILL},
        "sigstop": {None},
    }
    for code, fault in zip(left.codes, faults, strict=True):
        assert code in codes[fault], left.printed
    assert left.seconds < 30
    assert folders.step_of(folders.complete(folder)[-1]) == step, left.printed
    assert damaged(folder) == []
    for log in tmp_path.glob("*.log"):
        log.unlink()
    again = run(loop, str(folder), (), None, True, folder=tmp_path)
    assert again.codes == [0, 0] and losses(again) == whole[step:], again.printed
