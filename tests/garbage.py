"""Memory that must be free without Python's collector of reference cycles."""

import contextlib
import gc

import torch


@contextlib.contextmanager
def without_collector():
    """It has run, and does not run inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def given_back():
    """All memory of the GPU that is taken inside is free at the end. Gives the bytes of before."""
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with without_collector():
        yield allocated
    assert torch.cuda.memory_allocated() <= allocated
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
