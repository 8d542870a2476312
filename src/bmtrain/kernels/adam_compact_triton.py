"""The fused kernel of kernels/adam_compact.py. Imported only where there is a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from bmtrain.kernels.adam_triton import adamw
from bmtrain.kernels.blockwise import PART_OF_MEAN, PART_OF_SQUARE
from bmtrain.kernels.chunks_triton import tensor_at
from bmtrain.kernels.random_bits import FIRST, MULTIPLIER1, MULTIPLIER2

_FIRST = tl.constexpr(FIRST)
_PART_OF_MEAN, _PART_OF_SQUARE = tl.constexpr(PART_OF_MEAN), tl.constexpr(PART_OF_SQUARE)
_MULTIPLIER1, _MULTIPLIER2 = tl.constexpr(MULTIPLIER1), tl.constexpr(MULTIPLIER2)


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(x: tl.tensor) -> tl.tensor:
    """`random_bits._mixed` of uint32."""
    x = (x ^ (x >> 16)) * tl.full((), _MULTIPLIER1, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), _MULTIPLIER2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _random(place: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """`random_bits` of uint32 places."""
    return _mixed(_mixed(place) ^ seed)


@triton.jit  # type: ignore[untyped-decorator]
def _master(
    row: tl.tensor, i: tl.tensor, inside: tl.tensor, MASTER: tl.constexpr, IS_ALIGNED: tl.constexpr
) -> tl.tensor:
    """The fp32 weights: see CompactTensors.master."""
    if MASTER == "fp32":
        w = tl.load(tensor_at(row, 2, tl.float32, IS_ALIGNED) + i, mask=inside, other=0.0)
    else:
        first = tl.load(tensor_at(row, 0, tl.int16, IS_ALIGNED) + i, mask=inside, other=0)
        bits = first.to(tl.int32) << 16
        if MASTER == "remainder":
            rest = tl.load(tensor_at(row, 2, tl.int16, IS_ALIGNED) + i, mask=inside, other=0)
            rest = rest.to(tl.int32)
            bits += tl.where(((bits & 0x7FFFFFFF) != 0) | (rest > 0), rest, 0)
        w = bits.to(tl.float32, bitcast=True)
    return w


@triton.jit  # type: ignore[untyped-decorator]
def _keep_weight(
    w: tl.tensor,
    random: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    WEIGHT: tl.constexpr,
    MASTER: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
) -> None:
    """Write the weights, and what is left of their masters."""
    if MASTER == "fp32":
        tl.store(tensor_at(row, 2, tl.float32, IS_ALIGNED) + i, w, mask=inside)
        if tl.float32 != WEIGHT:  # fp32 weights are the master itself, written above
            tl.store(tensor_at(row, 0, WEIGHT, IS_ALIGNED) + i, w.to(WEIGHT), mask=inside)
    else:
        bits = w.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
        if MASTER == "remainder":
            first = (bits + 0x8000) >> 16
            rest = (bits - (first << 16)).to(tl.int16)
            tl.store(tensor_at(row, 2, tl.int16, IS_ALIGNED) + i, rest, mask=inside)
        else:
            first = (bits + (random & 0xFFFF).to(tl.int32)) >> 16
        tl.store(tensor_at(row, 0, tl.int16, IS_ALIGNED) + i, first.to(tl.int16), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _moments(
    row: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    block: tl.tensor,
    has_block: tl.tensor,
    IS_QUANTISED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Mean and square in fp32."""
    if IS_QUANTISED:
        m = tl.load(tensor_at(row, 3, tl.int8, IS_ALIGNED) + i, mask=inside, other=0)
        scales = tl.load(tensor_at(row, 5, tl.float32, False) + block, mask=has_block, other=0.0)
        m = m.to(tl.float32) * _PART_OF_MEAN
        m = m * tl.abs(m) * scales[:, None]
        v = tl.load(tensor_at(row, 4, tl.uint8, IS_ALIGNED) + i, mask=inside, other=0)
        scales = tl.load(tensor_at(row, 6, tl.float32, False) + block, mask=has_block, other=0.0)
        v = v.to(tl.float32) * _PART_OF_SQUARE
        v = v * v
        v = v * v * scales[:, None]
    else:
        m = tl.load(tensor_at(row, 3, tl.float32, IS_ALIGNED) + i, mask=inside, other=0.0)
        v = tl.load(tensor_at(row, 4, tl.float32, IS_ALIGNED) + i, mask=inside, other=0.0)
    return m, v


@triton.jit  # type: ignore[untyped-decorator]
def _codes(
    values: tl.tensor, scales: tl.tensor, random: tl.tensor, MOST: tl.constexpr, ROOTS: tl.constexpr
) -> tl.tensor:
    """Roots of the values' shares of their blocks' scales, rounded stochastically to int32."""
    share = tl.div_rn(tl.abs(values), tl.maximum(scales, 1.1754943508222875e-38)[:, None])
    for _ in tl.static_range(ROOTS):
        share = tl.sqrt_rn(share)
    # A sum in fp32 could be one operation with the product, which rounds once: other codes.
    return ((share * MOST * 65536).to(tl.int32) + random.to(tl.int32)) >> 16


@triton.jit  # type: ignore[untyped-decorator]
def _keep_moments(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    m: tl.tensor,
    v: tl.tensor,
    random: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    block: tl.tensor,
    has_block: tl.tensor,
    IS_QUANTISED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
) -> None:
    """Write them."""
    if IS_QUANTISED:
        scales = tl.max(tl.abs(m), 1)
        codes = _codes(m, scales, random & 0xFFFF, 127.0, 1)
        codes = tl.where(m < 0, -codes, codes).to(tl.int8)
        tl.store(tensor_at(row, 3, tl.int8, IS_ALIGNED) + i, codes, mask=inside)
        tl.store(tensor_at(row, 5, tl.float32, False) + block, scales, mask=has_block)
        scales = tl.max(v, 1)
        codes = tl.maximum(_codes(v, scales, random >> 16, 255.0, 2), 1)
        codes = tl.where(v > 0, codes, 0).to(tl.uint8)
        tl.store(tensor_at(row, 4, tl.uint8, IS_ALIGNED) + i, codes, mask=inside)
        tl.store(tensor_at(row, 6, tl.float32, False) + block, scales, mask=has_block)
    else:
        tl.store(tensor_at(row, 3, tl.float32, IS_ALIGNED) + i, m, mask=inside)
        tl.store(tensor_at(row, 4, tl.float32, IS_ALIGNED) + i, v, mask=inside)


# Not for each kind of step a kernel of its own: 1, and multiples of 16, are kinds to Triton.
@triton.jit(do_not_specialize=["step"])  # type: ignore[untyped-decorator]
def compact_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    rows: tl.tensor,
    row_of: tl.tensor,
    verdict: tl.tensor,
    keep: tl.tensor,
    rate: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    correction2: tl.tensor,
    step: tl.tensor,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One pass over rows of (weight, gradient, master, mean, square, the scales of both), with fp32
    arithmetic.

    Reads the gradient and updates the others; leaves them unchanged if `verdict` is NaN or
    infinite.
    """
    chunk = tl.program_id(0)
    row = rows + tl.load(row_of + chunk).to(tl.int64) * 11
    n = tl.load(row + 9)
    if verdict is not None:
        n = tl.where(tl.abs(tl.load(verdict)) < float("inf"), n, 0)
    n = tl.multiple_of(n, 16) if IS_ALIGNED else n
    begin = (chunk - tl.load(row + 10)) * CHUNK
    i = begin + (tl.arange(0, CHUNK // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    inside = i < n
    block = begin // BLOCK + tl.arange(0, CHUNK // BLOCK)
    has_block = block * BLOCK < n
    place = (tl.load(row + 8) + i + _FIRST).to(tl.uint32)
    seed = _mixed(tl.load(row + 7).to(tl.uint32) ^ step.to(tl.uint32)) & 0x7FFFFFFF
    g = tl.load(tensor_at(row, 1, GRAD, IS_ALIGNED) + i, mask=inside, other=0.0)
    g = g.to(tl.float32) * factor
    w = _master(row, i, inside, MASTER, IS_ALIGNED)
    m, v = _moments(row, i, inside, block, has_block, IS_QUANTISED, IS_ALIGNED)
    w, m, v = adamw(w, m, v, g, keep, rate, beta1, rest1, beta2, rest2, eps, correction2)
    random = _random(place, seed)
    _keep_moments(m, v, random, row, i, inside, block, has_block, IS_QUANTISED, IS_ALIGNED)
    random = _random(place, seed ^ 1)
    _keep_weight(w, random, row, i, inside, WEIGHT, MASTER, IS_ALIGNED)
