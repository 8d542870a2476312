"""Numbers on a device that the host reads later, without waiting before it must."""

from __future__ import annotations

import torch


class Verdict:
    """Whether a number on a device is finite; its copy to the host starts at construction."""

    def __init__(self, number: torch.Tensor) -> None:
        """`number` has one element; it may be on the CPU."""
        self._number, self._arrived = number, None
        if number.device.type != "cpu":
            # into page-locked memory: a pageable copy would block the host
            self._number = number.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.current_stream(number.device).record_event()

    @property
    def needs_waiting(self) -> bool:
        """Whether the number comes from a device at all."""
        return self._arrived is not None

    @property
    def is_here(self) -> bool:
        """Whether `wait` would return at once.

        May differ between ranks: a decision that the ranks must share cannot depend on it.
        """
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> bool:
        """Wait for the number; True if it is finite."""
        if self._arrived is not None:
            # Without it, the host would read memory that the copy has not written yet.
            self._arrived.synchronize()
        return bool(self._number.isfinite())
