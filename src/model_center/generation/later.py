"""Reading what is on the device without waiting for all that it has to do."""

from __future__ import annotations

from typing import Any

import torch


class Later:
    """What a tensor holds now, for the host to read later.

    Reading waits for the work issued before, and for none issued after.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Any:
        """The values, as `tolist` gives them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
