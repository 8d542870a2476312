"""One rank meets with a fault: who is named, how soon, and with which exit codes all end."""

import os
import pickle
import re
import signal
import socket
import sys
import time
from typing import Any

import pytest
from tests.faults import program
from tests.faults.ranks import run, run_in
from tests.training.lm_programs import tiny

import bmtrain as bmt
from bmtrain.errors import RanksDivergedError
from bmtrain.runtime import watchdog, world
from bmtrain.runtime.meeting import room
from bmtrain.runtime.process import Exit
from model_center.commands import train, vocabulary

WATCHDOG_S = 2.0
# Of the fault: what some rank must have said of rank 1, a pattern; exit codes of ranks 0 and 1.
TABLE = {
    "exception": ("it has failed: KeyError: 'the culprit'", Exit.PARTED, Exit.FAILED),
    "exit": ("rank 1 did not reach the next: it has left the run", Exit.PARTED, 3),
    "return": ("rank 1 did not reach the next: it has left the run", Exit.PARTED, 0),
    "save": (r"rank 1 did number \d+: exchange for errors", Exit.PARTED, Exit.PARTED),
    "skip": (r"rank 1 did number \d+: all_reduce \(sum\)", Exit.PARTED, Exit.PARTED),
    "batches": (r"rank 1 did number \d+: barrier", Exit.PARTED, Exit.PARTED),
    "sigkill": ("rank 1 did not reach the next: it has ended", Exit.PARTED, -signal.SIGKILL),
    "segfault": ("rank 1 did not reach the next: it has ended", Exit.PARTED, -signal.SIGSEGV),
    "abort": ("rank 1 did not reach the next: it has ended", Exit.PARTED, -signal.SIGABRT),
    "sigstop": (r"rank 1 is stopped \(SIGSTOP\)", Exit.HUNG, None),
    "sleep": ("rank 1 has not reached gather of storage 0", Exit.HUNG, Exit.HUNG),
    "lock": ("rank 1 runs, but Python does not", Exit.HUNG, None),
}
HANGS = ("sigstop", "sleep", "lock")


def faulty(fault, culprit=1):
    """The program of a rank."""
    program.train(fault, culprit, WATCHDOG_S)


@pytest.mark.parametrize(
    "fault",
    [
        name if name in {"sigkill", "skip"} else pytest.param(name, marks=pytest.mark.long)
        for name in TABLE
    ],
)
def test_the_culprit_is_named(fault, tmp_path):
    """Rank 1, in the first line of the first who speaks, and by nobody else's name."""
    words, first, second = TABLE[fault]
    left = run(faulty, fault, folder=tmp_path)
    said = "\n".join(left.printed)
    assert re.search(words, said), said
    assert left.codes == [first, second], said
    assert "gloo" not in said and "frame #" not in said, "noise of the transport"
    if fault in HANGS:
        report = next(text for text in left.printed if "the run hangs" in text)
        head = report.splitlines()[:2]
        assert "the run hangs" in head[0] and re.search(words, head[1]), "the cause comes first"
        assert WATCHDOG_S < left.seconds < 60
        assert said.count("the run hangs") == 1, "one report for all"
        assert "in step: loss = self.model(" in report, "where rank 0 waits, in the program"
    else:
        assert left.seconds < 20
    if fault in {"segfault", "abort"}:
        assert "program.py" in left.printed[1] and "Fatal Python error" in left.printed[1]


def faulty_without_waiting(fault):
    """As on GPUs, where the host goes ahead of its device."""
    program.train(fault, 1, WATCHDOG_S, is_immediate=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("save", r"\nrank(s 0, 2| 1) did number \d+: .*\nrank(s 0, 2| 1) did number \d+: "),
        ("sleep", r"\nrank 1 has not reached gather of storage 0 .*in which ranks 0, 2 wait"),
    ],
    ids=["save", "sleep"],
)
def test_the_culprit_is_named_where_the_host_does_not_wait(fault, words, tmp_path):
    """The watchdog says what the ledger would have said."""
    left = run(faulty_without_waiting, fault, ranks=3, folder=tmp_path)
    said = "".join(left.printed)
    assert left.codes == [Exit.HUNG] * 3 and re.search(words, said), said
    assert said.count("the run hangs") == 1


@pytest.mark.long
@pytest.mark.parametrize("fault", ["exception", "return", "sleep", "sigstop"])
def test_rank_0_is_named(fault, tmp_path):
    """Also where it takes the store with it, or where the store is stopped and nothing can be
    exchanged: each rank says what it knows, and ends.
    """
    words, second, first = TABLE[fault]
    left = run(faulty, fault, 0, folder=tmp_path, hosted=True)
    said = "\n".join(left.printed)
    assert left.codes == [first, second] and "frame #" not in said, said
    assert re.search(words.replace("rank 1", "rank 0"), said), said
    assert left.seconds < 60


@pytest.mark.long
def test_nothing_is_said_of_a_run_without_fault(tmp_path):
    """Steps, evaluation and end, also where rank 0 hosts the store."""
    for hosted in (False, True):
        folder = tmp_path / str(hosted)
        folder.mkdir()
        left = run(faulty, "none", folder=folder, hosted=hosted)
        assert (left.codes, left.printed) == ([0, 0], ["", ""])


def slow_but_alive():
    """Twice the limit, in a step's middle and beside the steps, said to be long."""
    bmt.init_distributed(device="cpu", timeout=60, watchdog=1.0)
    time.sleep(1.5)  # nothing has been trained
    training = program.Training()
    for number in range(3):
        training.step(number)
        for _ in range(4):
            time.sleep(0.4)
            bmt.synchronize()  # progress
    with bmt.unwatched():
        time.sleep(1.5)
    training.step(4)


def made_by_one(words, stops):
    """Rank 0 makes a vocabulary and sleeps, and tokens, for longer than ranks wait without a word; or
    it is stopped.
    """
    watchdog.ASK_S = (0.5, 1.0, 30.0)
    module: Any = vocabulary
    right = module.byte_level_bpe

    def slow(*args):
        if stops:
            program.FAULTS["sigstop"]()
        time.sleep(4)
        return right(*args)

    module.byte_level_bpe = slow
    train.train(words)


@pytest.mark.long
@pytest.mark.parametrize("stops", [False, True])
def test_nothing_is_said_while_one_rank_works_for_all(stops, tmp_path):
    """Unless it is stopped: then the run ends."""
    folder = tiny("llama", tmp_path)
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(4000))))
    words = (
        f"--from-scratch --vocab-size 300 --max-length 32 --train-iters 1 --data {tmp_path}/a.txt"
    )
    words += f" --model-config {folder} --dtype fp32 --cache {tmp_path / 'cache'}"
    left = run(made_by_one, words.split(), stops, folder=tmp_path, hosted=True)
    said = "".join(left.printed)
    if stops:
        assert left.codes[1] == Exit.HUNG and re.search(TABLE["sigstop"][0].replace("1", "0"), said)
        return
    assert left.codes == [0, 0] and "vocabulary: 300 tokens" in said, said
    assert "no progress" not in said, said


def among_strangers():
    """One who has found out the names in the store, which has no password, says that the run ends,
    that a rank has ended, and that the others have been told.
    """
    bmt.init_distributed(device="cpu", timeout=60)
    training = program.Training()
    training.step(0)
    if bmt.rank() == 1:
        place = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        silent = [socket.create_connection(place) for _ in range(40)]
        for other in silent[:20]:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(64))
        stranger = room(world.current().store.clone(), "watch")
        for word in ("1.0", "the store ends: no", "ask 0 1 2", "leave", "\xff" * 40):
            for rank in (0, 1):
                number = stranger.add(f"words to {rank}", 1)
                stranger.set(f"to {rank} {number}", word)
                stranger.set(f"end {rank}", pickle.dumps("has failed: a lie"))
                stranger.set(f"part {rank}", "{}")
        stranger.set("told 0", "\xff" * 40)
        dog = world.current().watchdog
        dog.write(stranger, "note 1", "what only ranks read")
        assert dog.read(stranger, "note", [0, 1]) == {1: "what only ranks read"}
        copied = stranger.get("note 1")
        assert b"only" not in copied
        stranger.set("note 2", copied)
        stranger.set("note 1", copied[:-1] + bytes([copied[-1] ^ 1]))
        assert dog.read(stranger, "note", [1, 2]) == {} and dog.whereabouts([0]) == {}
    for number in range(1, 8):
        training.step(number)
        time.sleep(0.2)
    training.save()


def test_a_stranger_does_not_end_a_run(tmp_path):
    left = run(among_strangers, folder=tmp_path, hosted=True)
    assert (left.codes, left.printed) == ([0, 0], ["", ""])


def hangs_among_strangers():
    """A rank hangs, and a stranger says what ranks say in its place."""
    bmt.init_distributed(device="cpu", timeout=60, watchdog=WATCHDOG_S)
    training = program.Training()
    training.step(0)
    if bmt.rank() == 1:
        stranger = room(world.current().store.clone(), "watch")
        for rank in (0, 1):
            stranger.set(f"end {rank}", "has failed: a lie")
            stranger.set(f"part {rank}", "{}")
        stranger.set("told 0", "")
        time.sleep(600)
    training.step(1)


def test_a_stranger_does_not_keep_a_hang_from_being_told(tmp_path):
    left = run(hangs_among_strangers, folder=tmp_path, hosted=True, grace=15)
    said = "".join(left.printed)
    assert left.codes == [Exit.HUNG, Exit.HUNG] and said.count("the run hangs") == 1, said
    assert "rank 1 has not reached" in said and "a lie" not in said, said


ALL = -1  # ranks


def hangs_by_default(fault, culprit, number):
    """Without a limit of the program's; the times after which ranks ask are shortened."""
    watchdog.ASK_S = (1.0, 2.5, 30.0)
    bmt.init_distributed(device="cpu")
    training = program.Training()
    for step in range(3):
        if step == number and culprit in {bmt.rank(), ALL}:
            print(f"fault at {time.monotonic()}", flush=True)
            (program.FAULTS | {"work": work, "loop": loop})[fault]()
        training.step(step)


def work():
    time.sleep(6)


def loop():
    end = time.monotonic() + 6
    while time.monotonic() < end:
        sum(range(1000))


@pytest.mark.parametrize(
    ("fault", "culprit", "step"),
    [
        ("work", 1, 0),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("sigstop", 1, 1),
                ("sigstop", 0, 0),
                ("work", ALL, 0),
                ("lock", 1, 0),
                ("lock", 0, 1),
                ("loop", 0, 1),
                ("loop", 1, 2),
                ("loop", ALL, 1),
                ("loop", ALL, 0),
            ]
        ),
    ],
)
def test_who_hangs_is_named_by_default(fault, culprit, step, tmp_path):
    """From the beginning on. A rank that answers nobody and does nothing ends the run; of one that
    is at work it is said where, once, and the run goes on; of all of them, too, unless they
    compute before the first step.
    """
    left = run(hangs_by_default, fault, culprit, step, folder=tmp_path, hosted=True)
    said = "".join(left.printed)
    if fault in HANGS:
        words = TABLE[fault][0].replace("rank 1", f"rank {culprit}")
        assert left.codes[1 - culprit] == Exit.HUNG and re.search(words, said), said
        assert said.count("the run hangs") == 1
        return
    assert left.codes == [0, 0], said
    does = "computes" if fault == "loop" else "uses no CPU"
    if culprit == ALL:
        found = re.findall(f"rank (.) {does}, and is at .*in {fault}: ", said)
        assert found == ([] if (fault, step) == ("loop", 0) else ["0", "1"]), said
        return
    words = f"rank {culprit} has not arrived: it answers, {does}, and is at .*in {fault}: "
    assert re.search(words, said) and said.count("has not arrived") == 1, said


def joins():
    bmt.init_distributed(device="cpu", timeout=6)
    bmt.synchronize()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("[::1]", ""),
        ("no-such-host.invalid", r"no-such-host\.invalid: .*[Nn]ame"),
        pytest.param("silent", "accepts connections but does not answer", marks=pytest.mark.long),
        pytest.param("absent", "rank 2 has not come", marks=pytest.mark.long),
        pytest.param("alone", "refused: rank 0 has not come", marks=pytest.mark.long),
        pytest.param("sizes", r"differ in their number of ranks \(2, 3\)", marks=pytest.mark.long),
    ],
)
def test_joining_ends_in_time(address, words, tmp_path):
    """On every rank, by the true cause: a name that nobody has, a port of another program, a rank
    that is not started, a port where nobody listens, sizes that differ. An address in brackets is
    one. No rank is aborted by a thread that comes back late.
    """
    with socket.socket(socket.AF_INET6 if address == "[::1]" else socket.AF_INET) as other:
        other.bind(("::1" if address == "[::1]" else "127.0.0.1", 0))
        port = other.getsockname()[1]
        if address == "silent":
            other.listen()
        else:
            other.close()
        started = range(1 if address in {"silent", "alone"} else 0, 2)
        environments = [
            {
                **{name: text for name, text in os.environ.items() if name != "DEVICE"},
                "RANK": str(rank),
                "WORLD_SIZE": "3"
                if address == "absent" or (address, rank) == ("sizes", 1)
                else "2",
                "LOCAL_RANK": str(rank),
                "MASTER_PORT": str(port),
                "MASTER_ADDR": address if address[:2] in {"[:", "no"} else "127.0.0.1",
            }
            for rank in started
        ]
        begin = time.monotonic()
        left = run_in(environments, joins, folder=tmp_path, grace=10)
    assert time.monotonic() - begin < 25
    assert left.codes == [1 if words else 0] * len(started), left.printed
    for text in left.printed if words else ():
        assert re.search(f"JoinError: rank . of . could not join.*{words}", text), text


def never_comes():
    """Before the first step, with and without a communicator of its own."""
    bmt.init_distributed(device="cpu", timeout=10, watchdog=None)
    if bmt.rank() == 1:
        time.sleep(600)
    begin = time.monotonic()
    with pytest.raises(RanksDivergedError, match="rank 1 did not reach"):
        bmt.synchronize()
    sys.exit(20 if 9 < time.monotonic() - begin < 30 else 21)


def one_rank_stands_still():
    bmt.init_distributed(device="cpu", watchdog=1.0)
    program.Training().step(0)
    time.sleep(600)


@pytest.mark.long
@pytest.mark.parametrize(
    ("work", "ranks", "code"),
    [(slow_but_alive, 2, 0), (never_comes, 2, 20), (one_rank_stands_still, 1, Exit.HUNG)],
)
def test_how_long_may_a_rank_take(work, ranks, code, tmp_path):
    """What takes long is no alarm; a rank that never comes ends the others after `timeout`, without
    the watchdog; one rank is watched when asked.
    """
    left = run(work, ranks=ranks, folder=tmp_path)
    assert left.codes[0] == code, left.printed
    assert code != 0 or left.codes == [0, 0]
    assert ranks != 1 or "time.sleep(600)" in left.printed[0]
