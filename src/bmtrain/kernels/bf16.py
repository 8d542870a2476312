"""fp32 master weights beside bf16 weights, or instead of them.

A bf16 number is the first half of an fp32 number. A master is therefore the weight and 16 bits
more, its remainder: how far it is from the weight, in units of its last place. So that 16 bits
suffice, weights are rounded to the nearest bf16 number, away from zero where two are as near: of
65536 masters each, none is lost.

Without a master, a weight must be rounded stochastically: rounded to the nearest, it would never
change by an update that is smaller than half of its last place.

Source: Zamirai et al., "Revisiting BFloat16 Training" (2021), for stochastic rounding.
"""

from __future__ import annotations

import torch

_NAN = 0x7FC00000  # bits of a NaN to which 2^15 can be added: others would wrap to a number
_HALF = 1 << 15


def split(masters: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write the bf16 weights and int16 remainders of fp32 masters, all (n,)."""
    bits = _bits(masters)
    first = (bits + _HALF) >> 16
    remainder.copy_(bits - (first << 16))
    weight.view(torch.int16).copy_(first)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 masters (n,) of bf16 weights and int16 remainders, where the remainders are."""
    first = weight.to(remainder.device).view(torch.int16).int()
    # Nothing below zero is rounded to +0: a remainder that belongs to another weight would make it
    # a NaN.
    rest = remainder.int().where((first & 0x7FFF != 0) | (remainder > 0), 0)
    return ((first << 16) + rest).view(torch.float32)


def remainders_of(masters: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The int16 remainders of fp32 masters to bf16 weights, all (n,).

    Zero where a weight is not next to its master: that weight was written by others, and is exact.
    """
    rest, are_near = _distances(masters, weight)
    # Rounded to the nearest even number, a weight may be below a master that is as near to both.
    return rest.where(are_near, 0).clamp_max(_HALF - 1).short()


def are_neighbours(masters: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether bf16 weights are what these fp32 masters are rounded to, all (n,)."""
    _, are_near = _distances(masters, weight)
    both_nan = masters.isnan() & weight.to(masters.device).isnan()
    return bool((are_near | both_nan).all())


def _distances(masters: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From weights to masters, and whether a master is rounded to its weight."""
    rest = _bits(masters) - (weight.to(masters.device).view(torch.int16).int() << 16)
    return rest, (rest >= -_HALF) & (rest <= _HALF)


def round_stochastically(values: torch.Tensor, weight: torch.Tensor, bits: torch.Tensor) -> None:
    """Round fp32 values to bf16 weights: up with the probability of their distance from below.

    Args:
        values: (n,) fp32.
        weight: (n,) bf16, written.
        bits: (n,) from 0 to 65535, random.
    """
    weight.view(torch.int16).copy_((_bits(values) + bits) >> 16)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).where(~values.isnan(), _NAN)
