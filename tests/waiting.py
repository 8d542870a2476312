"""Waiting for what other processes do."""

import time


def wait_for(happened, what, *, seconds=60, pause=0.05):
    """AssertionError when it has not happened after `seconds`; looks every `pause` seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(pause)
