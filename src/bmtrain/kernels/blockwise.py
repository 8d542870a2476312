"""Adam's moments in 8 bits: blocks of 64 elements, each with a scale of its own.

A code is a root of the value's share of the largest in its block, so that small values keep a
relative precision: the square root of the mean's, the fourth root of the square's. What Adam
divides, the mean by the root of the square, is then cut off at the same distance from the largest.

Stochastic rounding keeps both averages unbiased. Rounded to the nearest code, a square that falls
by 0.1 % a step would stay at its code for ever.

Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), for blocks and a
nonlinear code; Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States" (2023), for a
second moment that never becomes zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Elements of a block. Slots and shards begin at multiples of it (see shard/layout.py): every block
# lies on one rank, on any number of ranks.
BLOCK = 64
MOST_OF_MEAN, MOST_OF_SQUARE = 127, 255
# Factors, as devices differ in how they divide by a number. Times the largest code they are 1.
PART_OF_MEAN, PART_OF_SQUARE = 1 / MOST_OF_MEAN, 1 / MOST_OF_SQUARE


class Blocks(NamedTuple):
    """Quantised values.

    Attributes:
        codes: (n,), int8 for a mean, uint8 for a square.
        scales: (ceil(n / 64),) fp32, the largest absolute value of each block.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def part(self, begin: int, end: int) -> Blocks:
        """Elements [begin, end), as views; `begin` is a multiple of 64."""
        return Blocks(self.codes[begin:end], self.scales[begin // BLOCK : num_blocks(end)])

    def values(self) -> torch.Tensor:
        """(n,) fp32."""
        if self.codes.dtype == torch.int8:
            share = self.codes.float() * PART_OF_MEAN
            share = share * share.abs()
        else:
            share = (self.codes.float() * PART_OF_SQUARE).square().square()
        return (_in_blocks(share) * self.scales[:, None]).view(-1)[: self.codes.numel()]

    def fill(self, values: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        """Quantise (n,) fp32 values into these blocks.

        Args:
            bits: (n,) from 0 to 65535, the random bits of stochastic rounding; None rounds to the
                nearest code, which leaves values that have one as they are.
        """
        blocks = _in_blocks(values)
        scales = blocks.abs().amax(1)
        # A block of zeros has codes of zero, not NaN.
        share = (blocks.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).sqrt()
        share = share.view(-1)[: values.numel()]
        if self.codes.dtype == torch.int8:
            codes = _rounded(share * MOST_OF_MEAN, bits).copysign(values)
        else:
            codes = _rounded(share.sqrt() * MOST_OF_SQUARE, bits)
            codes = codes.clamp_min(1.0).where(values > 0, 0.0)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


def num_blocks(numel: int) -> int:
    """Of a tensor of so many elements."""
    return -(-numel // BLOCK)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """(blocks, 64), the last one filled up with zeros."""
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK)


def _rounded(codes: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """Whole numbers in fp32. Random bits are added to whole numbers, whose sum no device rounds."""
    if bits is None:
        return codes.round()
    return (((codes * 65536).int() + bits) >> 16).float()
