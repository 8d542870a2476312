"""Numbers that the host wants to know without waiting for the device before it must."""

from __future__ import annotations

import torch


class Verdict:
    """Whether a number on a device is finite: under way to the host from the moment this object is
    made.
    """

    def __init__(self, number: torch.Tensor) -> None:
        """`number` has one element, and may be on the CPU."""
        self._number, self._arrived = number, None
        if number.device.type != "cpu":
            self._number = number.to("cpu", non_blocking=True)  # into page-locked memory
            self._arrived = torch.cuda.current_stream(number.device).record_event()

    @property
    def needs_waiting(self) -> bool:
        """Whether it has to come from a device at all."""
        return self._arrived is not None

    @property
    def is_here(self) -> bool:
        """Whether the host would not wait for it.

        May differ from rank to rank: decide nothing by it that others must know.
        """
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> bool:
        """Wait until the device has come to it; True if the number is finite."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._number.isfinite())
