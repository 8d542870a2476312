"""Random orders and draws, functions of numbers alone: alike on all ranks and machines.

They rest on the raw streams of numpy's bit generators, which numpy promises to keep, and not on its
shuffles, which it may change: a run that goes on after an update reads on in the order in which it
began.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bits(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """`count` random 64-bit numbers, a function of the integers `key` alone."""
    return np.random.Philox(np.random.SeedSequence([number % 2**64 for number in key])).random_raw(
        count
    )


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """The numbers below `count`, in an order that is a function of `key`; takes 16 bytes each."""
    return np.argsort(bits(count, *key), kind="stable")


def draw(low: int, high: int, *key: int) -> int:
    """A number in [low, high], a function of `key`; the bias is below (high - low) / 2**64."""
    return low + int(bits(1, *key)[0]) % (high - low + 1)
