"""The watchdog: a run that hangs is reported, rank by rank, and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import itertools
import math
import operator
import os
import pathlib
import pickle
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from bmtrain.runtime import process
from bmtrain.runtime.meeting import FOREVER, Store, room
from bmtrain.runtime.process import Exit, say
from bmtrain.torch_internals import flight_record

# without progress, after which a rank that waits asks the others where they are, and again
ASK_S = (20.0, 35.0, 600.0)
_LATER = 1.25  # times these, if it does not wait
SHARE = 0.9  # of the time limit of NCCL's collectives, which end the run with less to say
AFTER_S = 10.0  # time to raise RanksDivergedError, where collectives that time out can
ANSWER_S = 5.0  # how long ranks may take to say where they are
_END_S = 12.0  # after which a process ends whatever the store does
_WORDS_S = 2.0  # how long the last words of a rank may take
_PARTING_S = 60.0  # how long threads may stay in the store when the run is over
_HEARD_S = 1.0  # how long the store stays for those who have not heard
_LOOKS = 20  # per limit
_STORE_ENDS, _ASK, _LEAVE = "the store ends: ", "ask ", "leave"
_BUSY_TICKS = 50  # of 10 ms: what a process takes between two looks that does anything
_COMPUTES = "computes"
_SEAL = 32  # bytes of a SHA-256
_MOST_STACKS = 20_000  # characters of a rank's stacks that travel
_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "D": "is waiting for a disk or a network file system",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Which rank this is, and where.

    Attributes:
        timeout: seconds that a collective may wait.
        is_host: whether the store of the run lives in this process.
        is_guest: whether the process belongs to somebody else, who decides about its end.
    """

    rank: int
    size: int
    device: torch.device
    timeout: float
    is_host: bool
    is_guest: bool = False


@dataclasses.dataclass(frozen=True)
class Line:
    """The collectives of a rank on one axis.

    Attributes:
        ranks: of the axis.
        number: how many it has begun.
        digest: of their names, so that ranks that did different things can be told.
        last: the last of them, at most a few, the newest last.
    """

    ranks: tuple[int, ...]
    number: int
    digest: int
    last: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rank reports when the run hangs.

    Attributes:
        idle: seconds since its last progress.
        is_waiting: whether it waits for others or for its device.
        is_off: whether it does what may take long; see `off`.
        place: in the user's program.
        lines: its collectives.
        stacks: of its threads.
        extra: what the backend knows.
    """

    rank: int
    idle: float
    is_waiting: bool
    is_off: bool
    place: str
    lines: Sequence[Line]
    stacks: str = ""
    extra: str = ""


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class Watchdog:
    """Notices that a run hangs. One per rank, from `init_distributed` to `shutdown`.

    What goes on is progress: collectives that are entered in the ledger, and optimizer steps.
    After ASK_S without any a rank asks the others where they are, one that waits for others first,
    and says who does not wait, where that one is, and whether it computes. One that answers may be
    at work, and nothing is ended. One of the same host that answers nobody while another waits, and
    is stopped or uses no CPU, as two looks say, ends the run: within a minute, before the first
    step too. If after the last of ASK_S all of them wait, none of them works, and the run ends.
    Before the first step, while no rank waits and one computes, nothing is said: a program loads
    and prepares there.

    A rank without progress for the limit raises the alarm: all ranks say what they wait in, where
    they are in the program and the stacks of their threads; the lowest that answers prints it all
    in one report, which names who has not come and who does not answer, and all processes end with
    Exit.HUNG. In a process that is somebody else's they report, once, and go on: ranks that wait
    get an error when their collective's time is up.

    The limit is `seconds` if given, from the first optimizer step on. Otherwise it is the most that
    ranks wait for each other: SHARE of `timeout` on GPUs; on a CPU `timeout` and AFTER_S, because
    there a collective that has timed out raises RanksDivergedError first. Before the first step,
    while a program loads, prepares data or compiles, and inside of `off`, only ranks that wait are
    watched.

    Alone a rank is watched if `seconds` are given: a notebook may stand still.

    The thread runs while the main thread waits in C without Python's lock, as it does in
    collectives and for its device. If the lock is held, the other ranks say so.

    Attributes:
        progress: collectives and optimizer steps so far; whoever makes progress adds to it.
        num_steps: optimizer steps so far.
        collectives: the ledger, as lines for the report; set by it.
        store_is_gone: whether rank 0 has failed and taken the store with it.
    """

    def __init__(self, place: Place, seconds: float | None, store: Store | None) -> None:
        self.progress = self.num_steps = 0
        self.store_is_gone = False
        self.collectives: Callable[[], list[Line]] = list
        self._place, self._seconds = place, seconds
        self._off = 0
        self._store: Store | None = None
        if store is not None:
            # A connection of its own: a thread that waits in one keeps others from using it.
            self._store = room(store.clone(), "watch")
        self._processes: Sequence[tuple[str, int]] = ()
        self._secret = b""
        self._ending = threading.Event()
        self._is_cpu = place.device.type == "cpu"
        self._last = place.timeout + AFTER_S if self._is_cpu else place.timeout * SHARE
        self._seen, self._since = 0, time.monotonic()
        self._alarm = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0.0
        self._host_words = ""
        # the one that trains, which is not the main one in a worker of others
        self._thread = threading.current_thread()
        self._asked, self._was_asked = 0, False  # while nothing goes on
        self._looks: dict[int, _Look] = {}  # at the ranks of this host, when it asked last

    def start(self, processes: Sequence[tuple[str, int]], secret: bytes, *, is_on: bool) -> None:
        """Begin to watch and, with other ranks, to listen to them.

        Args:
            processes: host and number of the process of each rank.
            secret: of the ranks. Other users of a host reach the store, which has no password, and
                could end the run by a word.
            is_on: whether this rank watches itself. It answers the others in any case.
        """
        self._processes, self._secret = processes, secret
        if is_on:
            self._start(self._watch, "watch")
        if self._store is not None:
            ear = self._store.clone()
            self._start(lambda: self._listen(ear), "listen")

    def _start(self, job: Callable[[], object], name: str) -> threading.Thread:
        thread = threading.Thread(target=job, name=f"watchdog {name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def stop(self) -> None:
        """The run is over on this rank; the others can read so.

        A thread that came back from the store while the interpreter ends would abort the process:
        Python unwinds it through torch's C++. So all of them are waited for. They are quick, unless
        the store's host is stopped, or waits for a name server: it looks up each client.
        """
        self._ending.set()
        self.say_last("has left the run: its program has finished")
        self._post(_LEAVE, [self._place.rank])
        end = time.monotonic() + _PARTING_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def see_off(self) -> None:
        """Where the store lives here, wait a little for the others, who may still need it."""
        store, end = self._store if self._place.is_host else None, time.monotonic() + ANSWER_S
        keys = [f"end {rank}" for rank in range(self._place.size)]
        with contextlib.suppress(RuntimeError):
            while store is not None and not store.check(keys) and time.monotonic() < end:
                time.sleep(0.02)

    def step(self) -> None:
        """An optimizer step is taken."""
        self.num_steps += 1
        self.progress += 1

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """For work that may take long without progress; on all ranks that wait for it too."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1
            self.progress += 1

    # Last words
    # ----------------------------------------------------------------------------------------------

    def say_last(self, words: str) -> None:
        """Leave for the others why this rank is gone; the form continues "rank 1 "."""
        self._patiently(lambda store: self.write(store, f"end {self._place.rank}", words))

    def take_store_down(self, words: str) -> None:
        """`say_last`, when this process is about to end and the others are not.

        Where it hosts the store, the others are told that they have none from now on. Asking one
        that is gone, they would print pages of C++.
        """
        self.say_last(words)
        if self._place.is_host:
            self._post(_STORE_ENDS + words, range(self._place.size))
            time.sleep(_HEARD_S)

    def whereabouts(self, ranks: Collection[int]) -> dict[int, str]:
        """Why ranks do not come, as far as is known; without those that may still come."""
        found: dict[int, str] = {}
        if not self.store_is_gone:
            self._patiently(lambda store: found.update(self.read(store, "end", ranks)))
        elif 0 in ranks:
            found[0] = self._host_words
        for rank in {*ranks} - found.keys():
            state = _state(*self._processes[rank])
            if state.startswith(("has ended", "is stopped")):
                found[rank] = state
        return dict(found)

    def is_first(self, deed: str) -> bool:
        """Whether no other rank has asked this before, as far as is known."""
        found = list[int]()
        if not self.store_is_gone:
            self._patiently(lambda store: found.append(store.add(f"first {deed}", 1)))
        return found in ([], [1]) and not self.store_is_gone

    def _patiently(self, deed: Callable[[Store], object], seconds: float = _WORDS_S) -> bool:
        """Do what needs the store, unless that takes long or fails: its host may be gone, or
        stopped. Returns whether there is one, and it has not taken long.
        """
        store = self._store

        def attempt() -> None:
            with contextlib.suppress(RuntimeError):
                deed(store)

        if store is None:
            return False
        thread = self._start(attempt, "store")
        thread.join(seconds)
        return not thread.is_alive()

    def write(self, store: Store, key: str, value: object) -> None:
        """Leave a value under a key; only the ranks of this run can read it."""
        data = pickle.dumps(value)
        seal = hmac.digest(self._secret, key.encode() + data, "sha256")
        store.set(key, seal + self._masked(seal, data))

    def read(self, store: Store, key: str, numbers: Collection[int]) -> dict[int, Any]:
        """What ranks have left under a key with these numbers, without what strangers have."""
        found = {}
        for number in numbers:
            name = f"{key} {number}"
            sealed = store.get(name) if store.check([name]) else b""
            seal, data = sealed[:_SEAL], sealed[_SEAL:]
            data = self._masked(seal, data)
            if hmac.compare_digest(seal, hmac.digest(self._secret, name.encode() + data, "sha256")):
                found[number] = pickle.loads(data)
        return found

    def let_speak(self) -> None:
        """Wait for the end of this process, if the alarm is raised.

        An error that comes then is of connections to ranks that have ended already.
        """
        if self._alarm.locked() and not self._place.is_guest:
            time.sleep(2 * _END_S)

    # Alarm
    # ----------------------------------------------------------------------------------------------

    def _limit(self) -> float:
        """Seconds without progress after which this rank raises the alarm, as things are."""
        is_settled = self.num_steps > 0 and not self._off
        if self._seconds is not None and is_settled:
            return self._seconds
        is_free = not is_settled and self._idle > self._last and not self._is_waiting()
        return math.inf if self._place.size == 1 or is_free else self._last

    def _is_waiting(self) -> bool:
        if process.is_communicating():
            return True
        if self._is_cpu:
            return False
        try:
            return not torch.cuda.default_stream(self._place.device).query()
        except RuntimeError:  # a capture is under way: not waiting
            return False

    def _watch(self) -> None:
        pause = min(self._place.timeout, self._seconds or ASK_S[0], ASK_S[0]) / _LOOKS
        now = time.monotonic()
        while not self._ending.wait(pause):
            before, now = now, time.monotonic()
            if now - before > pause + ANSWER_S:  # this process was stopped, which is not its doing
                self._since += now - before - pause
            if self.progress != self._seen:
                self._seen, self._since = self.progress, now
                self._asked, self._was_asked, self._looks = 0, False, {}
            self._idle = now - self._since
            limit = self._limit()
            is_over = self._idle > limit
            if self._store is not None and not is_over and self._asked < len(ASK_S):
                waits = self._is_waiting()
                # One that does not wait asks later, unless another has.
                due = ASK_S[self._asked] * (1 if waits else _LATER)
                if self._idle > due and (waits or not self._was_asked):
                    is_over, limit = self._one_hangs(limit), self._idle
                    now = time.monotonic()
            if is_over and self._seen == self.progress:
                # The alarm: all ranks say where they are, and end.
                self._post(str(limit), range(self._place.size))
                self._end(limit)
                return

    def _one_hangs(self, limit: float) -> bool:
        """Ask the other ranks where they are; from the second time on say who does not wait.

        The rank that comes first does so. Returns whether another cannot come.
        """
        self._asked += 1
        before, self._looks = self._looks, _looks(self._processes)
        own = self._report()
        reports, rank = {own.rank: own}, own.rank
        question = f"{_ASK}{rank} {self._seen} {self._asked}"
        others = [other for other in range(self._place.size) if other != rank]
        is_anothers = threading.Event()

        def ask(store: Store) -> None:
            mine = store.clone()
            if mine.add(f"asked at {self._seen} {self._asked}", 1) > 1:
                is_anothers.set()
                return
            self._post(question, others)
            self._collect(mine, question, reports)

        # a store that does not answer is that of a process that is stopped
        is_answered = self._patiently(ask, ANSWER_S + 2 * _WORDS_S)
        if is_anothers.is_set() or self._asked == 1:
            return False
        silent = [other for other in others if other not in reports]
        if not is_answered and rank:
            silent = [0]
        waiting = [other for other, one in sorted(reports.items()) if one.is_waiting]
        if waiting and any(_is_still(self._looks.get(one), before.get(one)) for one in silent):
            return True
        late = {
            other: _doing(self._looks.get(other), before.get(other))
            for other, one in sorted(reports.items())
            if not (one.is_waiting or one.is_off) and one.idle > ASK_S[0]
        }
        stopped = [one for one in silent if one in self._looks and self._looks[one].state == "T"]
        is_loading = self.num_steps == 0 and _COMPUTES in late.values()
        if (late and not is_loading) or stopped or (waiting and (late or silent)):
            has = "has not arrived: it answers, " if waiting else ""
            at = f", and {named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for others"
            end = f"before {limit:.0f} s without progress" if limit < math.inf else "for it"
            say(
                f"[rank {rank}] no progress for {self._idle:.0f} s"
                + (f"{at} at {reports[waiting[0]].place}.\n" if waiting else ".\n")
                + "".join(
                    f"rank {other} {has}{doing}, and is at {reports[other].place}.\n"
                    for other, doing in late.items()
                )
                + "".join(f"rank {other} {_state(*self._processes[other])}.\n" for other in silent)
                + f"If this is intended, just wait: the run is not ended {end}.\n"
            )
        is_hung = all(one.is_waiting and not one.is_off for one in reports.values())
        return is_hung and not silent and self._asked == len(ASK_S)

    def _collect(self, store: Store, key: str, reports: dict[int, Report]) -> None:
        """Add the other ranks' reports, as far as they leave them under the key in ANSWER_S."""
        end = time.monotonic() + ANSWER_S
        while len(reports) < self._place.size and time.monotonic() < end:
            reports |= self.read(store, key, range(self._place.size))
            time.sleep(0.05)

    def _listen(self, store: Store) -> None:
        """Wait for a word of another rank's watchdog."""
        rank = self._place.rank
        for number in itertools.count(1):
            try:
                store.wait([f"to {rank} {number}"], FOREVER)
                word = self.read(store, f"to {rank}", [number]).get(number)
                if word is None:
                    continue
                if word.startswith(_ASK):
                    self._was_asked = True
                    self.write(store, f"{word} {rank}", self._report())
                    continue
            except RuntimeError:
                return  # who hosts it has ended, which ends the run in another way
            if word.startswith(_STORE_ENDS):
                self._host_words, self.store_is_gone = word.removeprefix(_STORE_ENDS), True
            elif word != _LEAVE and not self._ending.is_set():
                self._end(float(word))
            return

    def _post(self, word: str, ranks: Collection[int]) -> None:
        """Leave a word for the listeners of these ranks."""

        def post(store: Store) -> None:
            for rank in ranks:
                self.write(store, f"to {rank} {store.add(f'words to {rank}', 1)}", word)

        self._patiently(post)

    def _masked(self, seal: bytes, data: bytes) -> bytes:
        """Hidden, or what was hidden."""
        mask = hashlib.shake_256(self._secret + seal).digest(len(data))
        return bytes(map(operator.xor, data, mask))

    def _report(self) -> Report:
        """Where this rank is."""
        return Report(
            rank=self._place.rank,
            idle=time.monotonic() - self._since,
            is_waiting=self._is_waiting(),
            is_off=self._off > 0,
            place=process.place(self._thread),
            lines=self.collectives(),
        )

    def _end(self, limit: float) -> None:
        """Say what is known, and end the process. Once."""
        if not self._alarm.acquire(blocking=False):
            return
        try:
            own = dataclasses.replace(
                self._report(),
                stacks=process.stacks()[-_MOST_STACKS:],
                extra="" if self._is_cpu else flight_record(),
            )
            if not self._patiently(lambda store: self._tell(store, own, limit), _END_S):
                self._print({own.rank: own}, limit)
        finally:
            if not self._place.is_guest:
                os._exit(Exit.HUNG)

    def _tell(self, store: Store, own: Report, limit: float) -> None:
        """Exchange the reports; the lowest rank that has answered prints them."""
        reports = {own.rank: own}
        try:
            store = store.clone()
            self.write(store, f"part {own.rank}", own)
            self._collect(store, "part", reports)
            end = time.monotonic() + ANSWER_S
            while own.rank != min(reports) and time.monotonic() < end:
                if self.read(store, "told", [0]):
                    return
                time.sleep(0.05)
        except RuntimeError:  # the host has ended
            reports = {own.rank: own}
        self._print(reports, limit)
        self._patiently(lambda store: self.write(store, "told 0", ""))
        if self._place.is_host:
            time.sleep(_HEARD_S)

    def _print(self, reports: Mapping[int, Report], limit: float) -> None:
        outcome = f"It ends with exit code {Exit.HUNG}."
        if self._place.is_guest:
            outcome = (
                "It is not ended, because another program owns the process; a collective times out "
                f"after {self._place.timeout:g} s."
            )
        missing = [rank for rank in range(self._place.size) if rank not in reports]
        silent = {rank: _state(*self._processes[rank]) for rank in missing}
        silent |= self.whereabouts(missing)
        text = "".join(f"rank {rank} {what}.\n" for rank, what in sorted(silent.items()))
        text += _as_text(reports)
        say(
            f"[rank {self._place.rank}] the run hangs: no progress for {limit:.0f} s. "
            f"{outcome}\n{text}"
        )
        if not self._place.is_guest:
            self.say_last(f"has ended the run, which hung: {text.splitlines()[0]}")


@dataclasses.dataclass(frozen=True)
class _Look:
    """What the system shows of a process.

    Attributes:
        state: a letter, as in _STATES.
        ticks: of 10 ms, its time on CPUs.
        all_ticks: with that of the processes that it has started.
    """

    state: str
    ticks: int
    all_ticks: int


def _looks(processes: Sequence[tuple[str, int]]) -> dict[int, _Look]:
    """At the ranks of this host, where the system shows any."""
    found: dict[int, tuple[str, int, int]] = {}  # of a process: state, parent, ticks
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # the name before them may hold blanks and brackets
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            found[int(path.parent.name)] = fields[0], int(fields[1]), ticks
    sums = {number: ticks for number, (_, _, ticks) in found.items()}
    for _, above, ticks in found.values():
        number = above
        while number in found:
            sums[number] += ticks
            number = found[number][1]
    return {
        rank: _Look(found[number][0], found[number][2], sums[number])
        for rank, (host, number) in enumerate(processes)
        if host == socket.gethostname() and number in found
    }


def _is_still(now: _Look | None, before: _Look | None) -> bool:
    """Whether a process is stopped, or has waited between two looks and done nothing else."""
    if now is None or before is None:
        return False
    return now.state in "ST" and now.ticks - before.ticks < _BUSY_TICKS


def _doing(now: _Look | None, before: _Look | None) -> str:
    """Of a rank that answers."""
    if now is None or before is None:
        return "does not wait"
    return _COMPUTES if now.all_ticks - before.all_ticks >= _BUSY_TICKS else "uses no CPU"


def _state(host: str, number: int) -> str:
    """What this process can tell of another; the form continues "rank 1 "."""
    look = _looks([(host, number)]).get(0)
    if look is not None:
        says = _STATES.get(look.state, "runs, but Python does not: a call into C holds the GIL")
    elif host == socket.gethostname() and pathlib.Path("/proc/self/stat").exists():
        says = "has ended"
    else:
        says = "does not answer"
    return f"{says} (process {number} on {host})"


def _as_text(reports: Mapping[int, Report]) -> str:
    """What the ranks that have answered say: first who is behind, then each of them."""
    found = _comparison(reports)
    for rank in sorted(reports):
        own = reports[rank]
        doing = "waits for others or its device" if own.is_waiting else "does not wait for others"
        found.append(
            f"rank {rank} {doing}, {own.idle:.0f} s after its last progress, at {own.place}"
        )
        found += [
            f"  collectives with {named(line.ranks)}: {line.number}, the last "
            + " < ".join(reversed(line.last))
            for line in own.lines
            if line.last
        ]
        found += [f"  {own.extra}"] if own.extra else []
    by_stacks: dict[str, list[int]] = {}
    for rank in sorted(reports):
        by_stacks.setdefault(reports[rank].stacks, []).append(rank)
    for stacks, ranks in by_stacks.items():
        found += [f"-- stacks of {named(ranks)}:", stacks]
    return "\n".join(found) + "\n"


def _comparison(reports: Mapping[int, Report]) -> list[str]:
    """Ranks that have not reached a collective that others have begun; if there are none, ranks
    that wait in different ones.
    """
    behind: dict[int, str] = {}
    differing: list[str] = []
    for axis in dict.fromkeys(line.ranks for own in reports.values() for line in own.lines):
        deeds: dict[tuple[int, int, str], list[int]] = {}
        for rank, own in sorted(reports.items()):
            for line in own.lines:
                if line.ranks == axis:
                    last = "".join(line.last[-1:]) or "the next collective"
                    deeds.setdefault((line.number, line.digest, last), []).append(rank)
        most, _, what = max(deeds)
        ahead = sorted(rank for deed, ranks in deeds.items() if deed[0] == most for rank in ranks)
        for (number, _, last), ranks in deeds.items():
            for rank in ranks if number < most else ():
                if not reports[rank].is_waiting:
                    text = (
                        f"rank {rank} has not reached {what} (number {most}), in which "
                        f"{named(ahead)} {'waits' if len(ahead) == 1 else 'wait'}; it is at "
                        f"{reports[rank].place}"
                    )
                    behind.setdefault(rank, text)
            if len(deeds) > 1:
                differing.append(f"{named(ranks)} did number {number}: {last}")
    return [text for _, text in sorted(behind.items())] or differing
