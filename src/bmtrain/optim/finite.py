"""Detects a NaN or infinite loss without making the host wait for the device."""

from __future__ import annotations

import torch

from bmtrain.optim.verdict import Verdict
from bmtrain.runtime.log import warn


class FiniteWatch:
    """Checks each loss once it has reached the host; warns once per streak of bad steps.

    The warning names the first step of the streak.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Verdict]] = []
        self._was_bad = False

    def record(self, loss: torch.Tensor, step: int) -> None:
        """Start checking the loss of `step`; earlier results that have arrived are judged now."""
        self._waiting.append((step, Verdict(loss)))
        while self._waiting and self._waiting[0][1].is_here:
            self._judge(*self._waiting.pop(0))

    def _judge(self, step: int, verdict: Verdict) -> None:
        good = verdict.wait()
        if not good and not self._was_bad:
            warn(
                f"the loss of step {step} is NaN or infinite, and without loss scaling "
                "the step is applied all the same: see the "
                "data and the learning rate of that step, or resume from an earlier checkpoint."
            )
        self._was_bad = not good
