"""Random bits that depend on a place and a seed alone: the same on any number of ranks."""

from __future__ import annotations

import torch

from bmtrain.kernels.launch import kernel, tl

# Odd multipliers: products and shifts in turn flip each bit of the result with a probability near
# 1/2. Source: Wellons, "Prospecting for Hash Functions" (2018), the function "lowbias32".
MULTIPLIER1, MULTIPLIER2 = 0x7FEB352D, 0x846CA68B
FIRST = 0x9E3779B9  # the hash leaves 0 at 0: places begin elsewhere
_ALL = 0xFFFFFFFF


def key_of(number: int) -> int:
    """32 bits for a number, of which every step makes a seed."""
    return _mixed((number + FIRST) & _ALL)


def seed_of(key: int, step: int) -> int:
    """A seed in [0, 2^31) for a step."""
    return _mixed(key ^ step) & 0x7FFFFFFF


def random_bits(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """32 random bits for each of the places [start, start + count).

    Args:
        seed: in [0, 2^31).
        start: the first place. Places that are equal modulo 2^32 have equal bits.

    Returns:
        (count,) int32.
    """
    first = start + FIRST
    places = torch.arange(first, first + count, device=device).to(torch.int32)  # wraps around
    return _mixed_tensor(_mixed_tensor(places) ^ seed)


def _mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * MULTIPLIER1 & _ALL
    x = (x ^ (x >> 15)) * MULTIPLIER2 & _ALL
    return x ^ (x >> 16)


def _mixed_tensor(x: torch.Tensor) -> torch.Tensor:
    """The same of int32, whose products wrap around and whose shifts repeat the sign."""
    x = (x ^ _shifted(x, 16)) * MULTIPLIER1
    x = (x ^ _shifted(x, 15)) * (MULTIPLIER2 - 2**32)
    return x ^ _shifted(x, 16)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & (_ALL >> count)


@kernel
def mixed(x: tl.tensor) -> tl.tensor:
    """`_mixed` of uint32; of places and a seed, `mixed(mixed(places) ^ seed)` are `random_bits`."""
    x = (x ^ (x >> 16)) * tl.full((), MULTIPLIER1, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), MULTIPLIER2, tl.uint32)
    return x ^ (x >> 16)
