"""The watchdog: a run that stands still is told, rank by rank, and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist

from bmtrain.runtime import exits, stacks
from bmtrain.runtime.launcher import say
from bmtrain.runtime.meeting import FOREVER, Store, own_connection
from bmtrain.runtime.report import Line, Part, Process, report
from bmtrain.torch_internals import flight_record

FLOOR_S = 600.0  # least limit that is guessed
FACTOR = 20  # limit that is guessed, in times of the longest pause so far
SHARE = 0.9  # of the time limit of NCCL's collectives, which end the run with less to say
AFTER_S = 10.0  # time to raise RanksPartedError, where collectives that time out can
ANSWER_S = 5.0  # how long ranks may take to say where they are
_END_S = 12.0  # after which a process ends whatever the store does
_WORDS_S = 2.0  # how long the last words of a rank may take
_PARTING_S = 60.0  # how long threads may stay in the store when the run is over
_HEARD_S = 1.0  # how long the store stays for those who have not heard
_LOOKS = 20  # per limit
_STORE_ENDS = "the store ends: "


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


class Watchdog:
    """Notices that a run stands still. One per rank, from `init_distributed` to `shutdown`.

    What goes on is progress: collectives that are entered in the ledger, and optimizer steps.
    A rank without progress for the limit raises the alarm: all ranks say what they wait in, where
    they are in the program and the stacks of their threads; the lowest that answers prints it all
    in one report, which names who has not come and who does not answer, and all processes end with
    exits.HUNG. In a process that is somebody else's they report, once, and go on: ranks that wait
    get an error when their collective's time is up.

    The limit is `seconds` if given. Otherwise it is guessed: FACTOR times the longest pause since
    the first optimizer step, but at least FLOOR_S. That holds for ranks that wait for others or for
    their device. One that does not wait computes something of its own, a long evaluation perhaps,
    and may take as long as the others can wait for it, which is also the most for those that wait:
    SHARE of `timeout` on GPUs; on a CPU `timeout` and AFTER_S, because there a collective that has
    timed out raises RanksPartedError first. Before the first optimizer step, while a program
    loads, prepares data or compiles, and inside of `off`, only ranks that wait are watched, with
    that longest limit.

    Without other ranks nothing is guessed, since nobody waits: a notebook may stand still.

    The thread runs while the main thread waits in C without Python's lock, as it does in
    collectives and for its device. If the lock is held, the other ranks say so.

    Attributes:
        progress: collectives and optimizer steps so far; whoever makes progress adds to it.
        num_steps: optimizer steps so far.
        collectives: the ledger, as lines for the report; set by it.
    """

    def __init__(self, place: Place, seconds: float | None, store: Store | None) -> None:
        self.progress = self.num_steps = 0
        self.collectives: Callable[[], list[Line]] = list
        self._place, self._seconds = place, seconds
        self._off = 0
        self._store: Store | None = None
        self._ear: Store | None = None  # the listener's connection
        if store is not None:
            self._store = dist.PrefixStore("watch", own_connection(store))  # type: ignore[attr-defined]
            self._ear = own_connection(self._store)
        self._processes: dict[int, Process] = {}
        self._ending = threading.Event()
        self._last = place.timeout + AFTER_S
        if place.device.type != "cpu":
            self._last = place.timeout * SHARE
        self._longest, self._seen, self._since = 0.0, 0, time.monotonic()
        self._alarm = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0.0
        self._host_words: str | None = None
        # the one that trains, which is not the main one in a worker of others
        self._thread = threading.current_thread()

    def start(self, processes: dict[int, Process], *, is_on: bool) -> None:
        """Begin to watch and, with other ranks, to listen to them.

        Args:
            processes: of all ranks.
            is_on: whether this rank watches itself. It answers the others in any case.
        """
        self._processes = processes
        if is_on:
            self._start(self._watch, "watch")
        if self._ear is not None:
            self._start(self._listen, "listen")

    def _start(self, job: Callable[[], object], name: str) -> threading.Thread:
        thread = threading.Thread(target=job, name=f"watchdog {name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def stop(self) -> None:
        """The run is over on this rank; the others can read so.

        A thread that came back from the store while the interpreter ends would abort the process:
        Python unwinds it through torch's C++. So all of them are waited for. They are quick, unless
        the store's host stands still, or waits for a name server: it looks up whoever connects.
        """
        self._ending.set()
        self.say_last("has left the run: its program has come to its end")
        self._patiently(lambda: self._post(self._place.rank, "leave"))
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
        store = self._store
        if store is not None:
            self._patiently(lambda: store.set(f"end {self._place.rank}", words))

    def take_store_down(self, words: str) -> None:
        """`say_last`, when this process is about to end and the others are not.

        Where it hosts the store, the others are told that they have none from now on. Asking one
        that is gone, they would print pages of C++.
        """
        self.say_last(words)
        if self._place.is_host:
            self._patiently(lambda: self._post_all(_STORE_ENDS + words))
            time.sleep(_HEARD_S)

    @property
    def store_is_gone(self) -> bool:
        """Whether rank 0 has failed and taken the store with it."""
        return self._host_words is not None

    def whereabouts(self, ranks: Collection[int]) -> dict[int, str]:
        """Why ranks do not come, as far as is known; without those that may still come."""
        found: dict[int, str] = {}
        store = self._store
        if self._host_words is not None:
            found, store = {0: self._host_words} if 0 in ranks else {}, None

        def read() -> None:
            for rank in ranks:
                key = f"end {rank}"
                if store is not None and store.check([key]):
                    found[rank] = store.get(key).decode(errors="replace")

        self._patiently(read)
        states = {rank: self._processes[rank].state() for rank in {*ranks} - found.keys()}
        return dict(found) | {
            rank: state
            for rank, state in states.items()
            if state.startswith(("has ended", "is stopped"))
        }

    def _patiently(self, deed: Callable[[], object]) -> None:
        """Do what needs the store, unless that takes long or fails: its host may be gone."""

        def attempt() -> None:
            with contextlib.suppress(RuntimeError):
                deed()

        self._start(attempt, "store").join(_WORDS_S)

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
        if self._place.size == 1:
            return float("inf")
        guess = max(FLOOR_S, FACTOR * self._longest) if is_settled else self._last
        guess = min(guess, self._last)
        # what needs the stacks is asked when it matters only
        if self._idle < guess or self._is_waiting():
            return guess
        return self._last if is_settled else float("inf")

    def _is_waiting(self) -> bool:
        if stacks.is_communicating():
            return True
        if self._place.device.type == "cpu":
            return False
        try:
            return not torch.cuda.default_stream(self._place.device).query()
        except RuntimeError:  # a capture is under way: not waiting
            return False

    def _watch(self) -> None:
        shortest = min(self._place.timeout, self._seconds or FLOOR_S)
        pause = min(5.0, shortest / _LOOKS)
        while not self._ending.wait(pause):
            now = time.monotonic()
            if self.progress != self._seen:
                if self.num_steps > 1 and not self._off:
                    self._longest = max(self._longest, now - self._since)
                self._seen, self._since = self.progress, now
            self._idle = now - self._since
            if self._idle > (limit := self._limit()) and self._seen == self.progress:
                self._raise(limit)
                return

    def _listen(self) -> None:
        """Wait for a word of another rank's watchdog."""
        store, key = self._ear, f"to {self._place.rank}"
        if store is None:
            return
        try:
            store.wait([key], FOREVER)
            word = store.get(key).decode()
        except RuntimeError:
            return  # who hosts it has ended, which ends the run in another way
        if word.startswith(_STORE_ENDS):
            self._host_words = word.removeprefix(_STORE_ENDS)
        elif word != "leave" and not self._ending.is_set():
            self._end(float(word))

    def _post(self, rank: int, word: str) -> None:
        if self._store is not None:
            self._store.set(f"to {rank}", word)

    def _post_all(self, word: str) -> None:
        for rank in range(self._place.size):
            self._post(rank, word)

    def _raise(self, limit: float) -> None:
        if self._store is not None:
            self._patiently(lambda: self._post_all(str(limit)))
        self._end(limit)

    def _end(self, limit: float) -> None:
        """Say what is known, and end the process. Once."""
        if not self._alarm.acquire(blocking=False):
            return
        try:
            own = self._own_part()
            thread = self._start(lambda: self._tell(own, limit), "tell")
            thread.join(_END_S)
            if thread.is_alive():
                self._print({own.rank: own}, limit)
        finally:
            if not self._place.is_guest:
                os._exit(exits.HUNG)

    def _own_part(self) -> Part:
        return Part(
            rank=self._place.rank,
            idle=time.monotonic() - self._since,
            is_waiting=self._is_waiting(),
            place=stacks.place(self._thread),
            lines=tuple(self.collectives()),
            stacks=stacks.text(),
            extra=flight_record() if self._place.device.type != "cpu" else "",
        )

    def _tell(self, own: Part, limit: float) -> None:
        """Exchange the parts; the lowest rank that has answered prints them."""
        parts = {own.rank: own}
        store = self._store
        try:
            if store is not None:
                store = own_connection(store)
                store.set(f"part {own.rank}", own.dumped())
                end = time.monotonic() + ANSWER_S
                while len(parts) < self._place.size and time.monotonic() < end:
                    for rank in set(range(self._place.size)) - parts.keys():
                        if store.check([f"part {rank}"]):
                            parts[rank] = Part.loaded(store.get(f"part {rank}"))
                    time.sleep(0.05)
                if own.rank != min(parts):
                    while not store.check(["told"]) and time.monotonic() < end + ANSWER_S:
                        time.sleep(0.05)
                    if store.check(["told"]):
                        return
        except (
            RuntimeError,
            ValueError,
            KeyError,
        ):  # the host has ended, or another version's part
            parts = {own.rank: own}
        self._print(parts, limit)
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set("told", "")
            if self._place.is_host:
                time.sleep(_HEARD_S)

    def _outcome(self) -> str:
        """What becomes of the run, for the report."""
        if self._place.is_guest:
            return (
                "Nothing is ended, because the process is not this program's own; a collective "
                f"gives up after {self._place.timeout:g} s."
            )
        return f"It ends with exit code {exits.HUNG}."

    def _print(self, parts: dict[int, Part], limit: float) -> None:
        missing = [rank for rank in range(self._place.size) if rank not in parts]
        silent = {rank: self._processes[rank].state() for rank in missing}
        silent.update(self.whereabouts(missing) if missing else {})
        say(f"[rank {self._place.rank}] " + report(parts, silent, limit, self._outcome()))


def own_process() -> str:
    """This process, for `processes_of`."""
    return json.dumps([socket.gethostname(), os.getpid()])


def processes_of(texts: list[str]) -> dict[int, Process]:
    """What the ranks have said by `own_process`, by rank."""
    return {rank: Process(*json.loads(text)) for rank, text in enumerate(texts)}
