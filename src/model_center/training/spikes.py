"""Losses far above those of the steps before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 128  # losses that are remembered
LEAST = 16  # losses that must be known before one is judged
TO_DEVIATION = (
    1.4826  # times the median deviation gives the standard one, for a normal distribution
)
SHARE = 0.01  # of the median: what deviates less is no noise to measure by


class Spikes:
    """Finds losses above `median + factor * max(1.4826 * MAD, 0.01 * |median|)`.

    The median, and MAD, the median of the absolute deviations from it, are those of the last 128
    losses that were kept; the first 16 are never spikes. Medians hardly move by spikes.

    Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), the modified z-score.

    Args:
        factor: how many deviations are too many.

    Attributes:
        in_a_row: spikes that were found since the last loss that was kept.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.in_a_row = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def limit(self) -> float:
        """The highest loss that is no spike."""
        if len(self._losses) < LEAST:
            return math.inf
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.factor * max(TO_DEVIATION * deviation, SHARE * abs(median))

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is one, counted in `in_a_row`. NaN and infinities are not: see `keep`."""
        found = math.isfinite(loss) and loss > self.limit()
        self.in_a_row += found
        return found

    def keep(self, loss: float) -> None:
        """Remember the loss of a step that was taken."""
        if math.isfinite(loss):
            self._losses.append(loss)
            self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from, as in JSON."""
        return {"losses": list(self._losses), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; from nothing if `state` is empty."""
        self._losses = deque(state.get("losses", ()), maxlen=WINDOW)
        self.in_a_row = int(state.get("in_a_row", 0))
