"""A program of others that wants to hear how a run goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

OnStep: TypeAlias = Callable[[dict[str, Any]], object]


class Listener:
    """Hands figures of a run to a callable, and goes on whatever that raises.

    Args:
        call: gets a dict of names and numbers, "step" among them, on every rank: after each step
            loss, gradient norm, learning rate, tokens a second and memory of this rank, as
            `StepReport` has them; after a measurement what was measured, "validation_loss" for
            example. None for nobody.
    """

    def __init__(self, call: OnStep | None = None) -> None:
        self._call = call
        self._has_warned = False

    def receive(self, values: Mapping[str, Any]) -> None:
        """Hand them on, without those that are None. The first error is told as a warning."""
        if self._call is None:
            return
        try:
            self._call({name: value for name, value in values.items() if value is not None})
        except Exception as error:  # whose program it is, training is not its victim
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._call!r}, which is told of each step, has raised {error!r}. The run "
                    "continues; its later errors are not reported.",
                    UserWarning,
                    stacklevel=2,
                )
