"""Stopping a run from outside: after the step at hand, with a checkpoint, on all ranks at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.runtime.world import launcher

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Ctrl-C, SIGTERM and torchrun's end as a wish to stop that all ranks agree on.

    A signal reaches the ranks at different moments of different steps, or only one of them. A
    torchrun that is killed outright tells them nothing; going on without it, they would write where
    the next run does. To be made on the main thread.
    """

    def __init__(self) -> None:
        self.wished = False
        self._launcher = launcher()
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._notice) for number in SIGNALS
        }

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.wished = True

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.wished or (self._launcher is not None and os.getppid() != self._launcher)

    def agreed(self) -> bool:
        """True on every rank when any rank was asked to stop. Collective."""
        wish = torch.tensor([float(self.asked)], device=bmt.device())
        return bool(bmt.distributed.all_reduce(wish, "max").item() > 0)

    def restore(self) -> None:
        """Let signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
