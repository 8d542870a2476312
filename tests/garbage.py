"""Memory that must be free without Python's collector of reference cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """It has run, and does not run inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def given_back() -> Iterator[int]:
    """All memory of the GPU that is taken inside is free at the end. Gives the bytes of before."""
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with without_collector():
        yield allocated
    assert torch.cuda.memory_allocated() <= allocated
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
