"""Asked to stop: by signals and by calls, on one rank, in time and out of it."""

import os
import signal
import threading
import time

import pytest
import torch
from tests.faults.ranks import run
from tests.ranks.runner import run_ranks
from tests.training.test_lm_verbs import Points, flags, net, steps_of

import bmtrain as bmt
from bmtrain.runtime import world
from bmtrain.runtime.process import Exit
from model_center.errors import ConfigError
from model_center.training import Run, make_loader
from model_center.training.metrics_file import read_metrics
from model_center.training.stop import SIGNALS, StopRequest


def train(folder, last, how, more):
    """A run that rank 1 is asked to stop in step `last`."""
    bmt.init_distributed(device="cpu")
    args = flags(f"--save {folder} {more}")

    def ask_in_time(values):
        if values["step"] + 1 == last and bmt.rank() == 1:
            ask(going, how)

    loader = make_loader(Points(), args, shuffle=False)
    with Run(net(), loader, args, on_step=ask_in_time) as going:
        for _ in going.epochs():
            steps_of(going)
    print("after the run")


def ask(going, how):
    """By a signal, or by a call from another thread."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        return
    thread = threading.Thread(target=lambda: going.request_stop(requeue=how == "requeue"))
    thread.start()
    thread.join()


def lines(folder):
    return [(record["step"], record["loss"]) for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Steps and losses of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    left = run(train, str(folder), None, "", "", folder=folder)
    assert left.codes == [0, 0], left.printed
    return lines(folder)


@pytest.mark.parametrize(
    "how",
    [
        "SIGTERM",
        "requeue",
        pytest.param("SIGUSR1", marks=pytest.mark.long),
        pytest.param("call", marks=pytest.mark.long),
    ],
)
def test_a_run_stops_and_goes_on(how, whole, tmp_path):
    """All ranks after the step at hand, with a checkpoint from which the rest is bitwise that of a
    run that nobody stopped; the exit code tells a scheduler whether to start it again.
    """
    left = run(train, str(tmp_path), 2, how, "", folder=tmp_path)
    is_requeue = how in {"SIGUSR1", "requeue"}
    assert left.codes == [Exit.REQUEUE if is_requeue else 0] * 2, left.printed
    assert all(("after the run" in text) != is_requeue for text in left.printed)
    assert lines(tmp_path) == whole[:2] and len(whole) > 2
    again = run(train, str(tmp_path), None, "", "--resume", folder=tmp_path)
    assert again.codes == [0, 0], again.printed
    assert lines(tmp_path) == whole


def stuck(how, patience):
    """Rank 1 is in C when it is asked, and stays there; rank 0 waits for it."""
    bmt.init_distributed(device="cpu")
    StopRequest(patience)
    if bmt.rank() == 1:
        for delay in (0.5, 1.0) if how == "twice" else (0.5,):
            number = signal.SIGINT if how == "twice" else signal.SIGTERM
            threading.Timer(delay, os.kill, (os.getpid(), number)).start()
        print(f"fault at {time.monotonic()}")
    # all in C, in one call, where Python's handlers are not run: rank 0 waits for rank 1
    if bmt.rank() == 1:
        ranks = world.current().mesh.world
        torch.distributed.recv(torch.zeros(1), src=0, group=ranks.group)
    else:
        time.sleep(40)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "patience", "code", "words"),
    [
        ("once", 1.5, Exit.OUT_OF_PATIENCE, "The previous checkpoint is intact."),
        ("twice", None, Exit.INTERRUPTED, "interrupted twice"),
    ],
)
def test_a_step_that_does_not_end(how, patience, code, words, tmp_path):
    """When patience ends, said, and the process ends; a second interrupt ends it at once, though
    the main thread never comes back to Python.
    """
    left = run(stuck, how, patience, folder=tmp_path)
    assert left.codes[1] == code, left.printed
    assert words in left.printed[1] and left.seconds < 30


def handlers():
    """Taken, called for what they are, and put back."""
    said = []

    def own(number, frame):
        said.append(number)

    signal.signal(signal.SIGTERM, own)
    for patience in (0, -1, float("nan"), "long", True):
        with pytest.raises(ConfigError, match="patience is"):
            StopRequest(patience)  # type: ignore[arg-type]
    request = StopRequest()
    assert request.earlier[signal.SIGTERM] is own
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.asked and not said
    request.restore()
    request.restore()
    assert signal.getsignal(signal.SIGTERM) is own
    os.kill(os.getpid(), signal.SIGTERM)
    assert said == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1


def test_earlier_handlers_come_back(tmp_path):
    left = run(handlers, ranks=1, folder=tmp_path)
    assert left.codes == [0], left.printed


def beside_the_main_thread():
    """The loop runs in another thread; a third one of rank 1 asks."""
    answers = []
    before = [signal.getsignal(number) for number in SIGNALS]

    def loop():
        request = StopRequest()
        answers.append(request.agreed())
        if bmt.rank() == 1:
            asking = threading.Thread(target=request.request_stop)
            asking.start()
            asking.join()
        answers.extend((request.agreed(), request.is_requeue()))
        if bmt.rank() == 0:
            request.request_stop(requeue=True)
        answers.append(request.is_requeue())
        request.restore()

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    return [*answers, [signal.getsignal(number) for number in SIGNALS] == before]


def test_a_request_beside_the_main_thread():
    assert run_ranks(beside_the_main_thread, 2) == [[False, True, False, True, True]] * 2
