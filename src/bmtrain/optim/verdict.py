"""Numbers on a device that the host reads later, without waiting before it must."""

from __future__ import annotations

import torch

from bmtrain.distributed.agreement import HostCopy


class Verdict(HostCopy):
    """Whether a number on a device is finite; its copy to the host starts at construction."""

    def __init__(self, number: torch.Tensor) -> None:
        """`number` has one element; it may be on the CPU."""
        super().__init__([number])

    def wait(self) -> bool:
        """Wait for the number; True if it is finite."""
        return bool(self.values()[0].isfinite())
