"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(
    happened: Callable[[], bool], what: str, *, seconds: float = 60, pause: float = 0.05
) -> None:
    """AssertionError when it has not happened after `seconds`; looks every `pause` seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(pause)
