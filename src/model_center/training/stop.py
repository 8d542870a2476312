"""Stopping a run from outside: after the step at hand, with a checkpoint, on all ranks at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any, Literal

import torch

import bmtrain as bmt
from bmtrain.runtime import world
from bmtrain.runtime.process import Exit, say
from model_center.errors import ConfigError

REQUEUE = signal.SIGUSR1  # schedulers send it before they take the machine away
SIGNALS = (signal.SIGINT, signal.SIGTERM, REQUEUE)
# Seconds: torchrun passes SIGTERM and SIGINT on to the ranks, and kills them 30 s later.
LAUNCHER_PATIENCE = 25.0


class StopRequest:
    """Ctrl-C, SIGTERM, SIGUSR1 and torchrun's end as a wish to stop that all ranks agree on.

    A signal reaches the ranks at different moments of different steps, or only one of them. A
    torchrun that is killed outright tells them nothing; going on without it, they would write where
    the next run does.

    Made on the main thread it takes the signals, until `restore`; a second Ctrl-C ends the process
    at once. Elsewhere Python cannot take signals, and in a process that another framework has
    started, Ray Train for example, they are not taken: they do what they did, and the process is
    not ended. `request_stop` asks for the same from any thread, of any rank.

    Attributes:
        earlier: the handlers of the signals that were taken, by signal; `restore` puts them back.

    Args:
        patience: seconds within which the current step and the checkpoint must end after a signal
            or `request_stop`; then the process says so and ends with exit code 84, and the
            checkpoint before stays. None: as long as it takes. "auto": 25 s for SIGTERM,
            SIGINT and torchrun's end in a process that torchrun has started, or else None.

    Raises:
        ConfigError: for a patience that is no positive number.
    """

    def __init__(self, patience: float | Literal["auto"] | None = "auto") -> None:
        if patience not in ("auto", None) and not (
            type(patience) in (int, float) and 0 < float(patience) < float("inf")
        ):
            raise ConfigError(
                f"patience is {patience!r}: expected a positive number of seconds, None for as "
                'long as it takes, or "auto".'
            )
        self._patience = patience
        self._launcher = world.current().launcher if bmt.is_initialized() else None
        self._is_guest = bmt.is_initialized() and world.current().is_guest
        # 0 go on, 1 stop, 2 stop to be started again
        self._wish = 0
        self._interrupts = 0
        self._over = threading.Event()
        self._deadline = threading.Lock()  # taken by the first wish that has one
        self.earlier: dict[signal.Signals, Any] = {}
        self._earlier_fd = -1
        self._written: socket.socket | None = None
        if self._launcher is not None:
            self._launcher.patience = self._seconds(signal.SIGTERM) or threading.TIMEOUT_MAX
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._is_guest:
            self._take_signals()

    def request_stop(self, *, requeue: bool = False) -> None:
        """Stop all ranks after the step at hand, with a checkpoint. From any thread of any rank.

        Args:
            requeue: whether the run shall be started again, which its exit code says.
        """
        self._wanted(REQUEUE if requeue else None)

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._wish > 0 or (self._launcher is not None and self._launcher.is_lost)

    def agreed(self) -> bool:
        """True on every rank when any rank was asked to stop. Collective."""
        return self._largest(float(self.asked)) > 0

    def is_requeue(self) -> bool:
        """True on every rank when any rank was asked to stop to be started again. Collective."""
        return self._largest(float(self._wish)) > 1

    def restore(self) -> None:
        """The run has stopped: let signals do again what they did before."""
        self._over.set()
        if self._launcher is not None:
            self._launcher.patience = 0.0
        if self.earlier:
            for number, handler in self.earlier.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._earlier_fd)
        self.earlier = {}
        if self._written is not None:
            self._written.close()  # ends the thread

    def _largest(self, wish: float) -> float:
        own = torch.tensor([wish], device=bmt.device())
        return float(bmt.distributed.all_reduce(own, "max").item())

    def _take_signals(self) -> None:
        """Signals set the wish; a thread counts their time.

        Python's handlers wait for the main thread, which may be stuck in C. What Python writes into
        the socket at once does not.
        """
        read, self._written = socket.socketpair()
        self._written.setblocking(False)
        for number in SIGNALS:
            earlier = signal.getsignal(number)
            if (
                earlier is not None
            ):  # not Python's: faulthandler's, say, which could not be restored
                self.earlier[number] = earlier
                signal.signal(number, self._notice)
        self._earlier_fd = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=self._attend, args=(read, self._earlier_fd), name="stop request", daemon=True
        ).start()

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._wish = max(self._wish, 2 if number == REQUEUE else 1)

    def _attend(self, read: socket.socket, earlier_fd: int) -> None:
        """Act on each signal, without the main thread."""
        with read:
            while found := read.recv(1):
                if earlier_fd >= 0:
                    os.write(earlier_fd, found)
                if found[0] in self.earlier:
                    self._on_signal(signal.Signals(found[0]))

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._launcher is not None:
                # torchrun, which gets the second one, ends by it
                self._launcher.patience = 0.0
        if self._interrupts > 1:
            say(f"[rank {bmt.rank()}] interrupted twice: nothing more is saved.\n")
            os._exit(Exit.INTERRUPTED)
        self._wanted(number)

    def _wanted(self, number: signal.Signals | None) -> None:
        self._wish = max(self._wish, 2 if number == REQUEUE else 1)
        seconds = self._seconds(number)
        if seconds is not None and self._deadline.acquire(blocking=False):
            threading.Thread(
                target=self._wait, args=(seconds,), name="stop request patience", daemon=True
            ).start()

    def _seconds(self, number: signal.Signals | None) -> float | None:
        """How long a stop by this signal, or by a call, may take."""
        if self._patience != "auto":
            return self._patience
        is_passed_on = number in (signal.SIGINT, signal.SIGTERM)
        return LAUNCHER_PATIENCE if is_passed_on and self._launcher is not None else None

    def _wait(self, seconds: float) -> None:
        begin = time.monotonic()
        if not self._over.wait(seconds):
            end = "the run goes on" if self._is_guest else "this process ends without it"
            say(
                f"[rank {bmt.rank()}] asked to stop {time.monotonic() - begin:.0f} s ago, and the "
                f"current step or its checkpoint has not finished: {end}. The previous checkpoint "
                "is intact.\n"
            )
            if not self._is_guest:
                os._exit(Exit.OUT_OF_PATIENCE)
