"""Remembers, on the device, whether a loss of the step at hand was NaN or infinite."""

from __future__ import annotations

import torch


class LossMark:
    """A number that is 0, or NaN once a loss was not finite; the host does not wait for it."""

    def __init__(self) -> None:
        self._mark: torch.Tensor | None = None

    def add(self, loss: torch.Tensor) -> None:
        """Look at a loss of one element."""
        term = loss.reshape(()) * 0
        self._mark = term if self._mark is None else self._mark + term

    def clear(self) -> None:
        """Forget the losses: their gradients are not used."""
        self._mark = None

    def take(self) -> torch.Tensor | None:
        """The mark of the losses since the last call: 0-dim; None without any."""
        mark, self._mark = self._mark, None
        return mark
