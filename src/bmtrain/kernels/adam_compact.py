"""The AdamW update of tensors whose state is kept in fewer bits: see `blockwise` and `bf16`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.kernels.adam import AdamSettings, AdamTensors, adamw, adamw_update
from bmtrain.kernels.bf16 import joined, round_stochastically, split
from bmtrain.kernels.blockwise import BLOCK, PART_OF_MEAN, PART_OF_SQUARE, Blocks
from bmtrain.kernels.chunks import Batch, table_of, tensor_at
from bmtrain.kernels.launch import kernel, kernel_with, tl
from bmtrain.kernels.random_bits import FIRST, bits_of, key_of, mixed, random_bits, seed_of
from bmtrain.torch_internals import current_stream_number

# Elements that a program of the kernel updates, and that torch's operators update at a time: few
# enough for the CPU's caches.
CHUNK, CPU_CHUNK, NUM_WARPS = 1024, 1 << 18, 4


def update_tensors(
    tensors: Sequence[AdamTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """Update tensors of one device in place: `adamw_update`, also of compact forms.

    Arithmetic is in fp32. Random bits depend on the parameter's number, the step and the element's
    place in the parameter: the values are the same on any number of ranks.

    Args:
        tensors, settings: see there.
        verdict: 0-dim fp64 on that device; if it is NaN or infinite, nothing is updated.
    """
    plain = [t for t in tensors if not t.is_compact]
    if plain:
        rows = [(t.weight, t.grad, *[t.weight] * t.is_exact, *t.state) for t in plain]
        adamw_update(Batch(rows), settings, verdict)
    compact = [t for t in tensors if t.is_compact]
    if compact:
        on_cpu = compact[0].weight.device.type == "cpu"
        (compact_reference if on_cpu else compact_triton)(compact, settings, verdict)


def compact_reference(
    tensors: Sequence[AdamTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`update_tensors` by torch's operators: the path of the CPU."""
    if verdict is not None and not bool(verdict.isfinite()):
        return
    for whole in tensors:
        seed = seed_of(key_of(whole.number), settings.step)
        for begin in range(0, whole.weight.numel(), CPU_CHUNK):
            _update(whole.part(begin, begin + CPU_CHUNK), settings, seed)


def _update(t: AdamTensors, settings: AdamSettings, seed: int) -> None:
    mean, square = (x.values() if isinstance(x, Blocks) else x for x in (t.mean, t.square))
    if t.master is None:
        master = t.weight.float()
    elif t.master.dtype == torch.int16:
        master = joined(t.weight, t.master)
    else:
        master = t.master
    adamw_update(Batch([(master, t.grad, master, mean, square)]), settings)
    if isinstance(t.mean, Blocks) and isinstance(t.square, Blocks):
        first, second = _halves(t, seed, 0)
        t.mean.fill(mean, first)
        t.square.fill(square, second)
    if t.master is None:
        round_stochastically(master, t.weight, _halves(t, seed, 1)[0])
    elif t.master.dtype == torch.int16:
        split(master, t.weight, t.master)
    elif not t.is_exact:
        t.weight.copy_(master)


def _halves(t: AdamTensors, seed: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two times 16 random bits for each element."""
    bits = random_bits(seed ^ salt, t.start, t.weight.numel(), t.weight.device)
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF


def compact_triton(
    tensors: Sequence[AdamTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`update_tensors` with one kernel for all tensors of equal kinds."""
    # What the kernel reads of each, the same at each step; whether the widest loads are allowed.
    kinds: dict[tuple[Any, ...], list[tuple[tuple[int, ...], bool]]] = {}
    for t in tensors:
        master = "none" if t.master is None else "fp32"
        if t.master is not None and t.master.dtype == torch.int16:
            master = "remainder"
        (mean, mean_scales), (square, square_scales) = (
            x if isinstance(x, Blocks) else (x, None) for x in (t.mean, t.square)
        )
        columns = (t.weight, t.grad, t.master, mean, square, mean_scales, square_scales)
        addresses = [0 if x is None else x.data_ptr() for x in columns]
        count = t.weight.numel()
        is_aligned = not any(number % 16 for number in (count, *addresses[:5]))
        kind = t.weight.dtype, t.grad.dtype, master, isinstance(t.mean, Blocks)
        if count:
            row = (*addresses, key_of(t.number), t.start, count)
            kinds.setdefault(kind, []).append((row, is_aligned))
    for (weight, grad, master, is_quantised), members in kinds.items():
        rows, are_aligned = zip(*members, strict=True)
        device = tensors[0].weight.device
        chunks = table_of(rows, CHUNK, device, current_stream_number(device), all(are_aligned))
        compact_kernel(
            (chunks.count,),
            chunks.rows,
            chunks.row_of,
            verdict,
            *settings.factors,
            settings.step,
            WEIGHT=weight,
            GRAD=grad,
            MASTER=master,
            IS_QUANTISED=is_quantised,
            IS_ALIGNED=chunks.is_aligned,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    torch.autograd.graph.increment_version(x for t in tensors for x in (t.weight, *t.state))


@kernel
def _master(
    row: tl.tensor, i: tl.tensor, inside: tl.tensor, MASTER: tl.constexpr, IS_ALIGNED: tl.constexpr
) -> tl.tensor:
    """The fp32 weights: see AdamTensors.master."""
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


@kernel
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


@kernel
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
        m = m.to(tl.float32) * PART_OF_MEAN
        m = m * tl.abs(m) * scales[:, None]
        v = tl.load(tensor_at(row, 4, tl.uint8, IS_ALIGNED) + i, mask=inside, other=0)
        scales = tl.load(tensor_at(row, 6, tl.float32, False) + block, mask=has_block, other=0.0)
        v = v.to(tl.float32) * PART_OF_SQUARE
        v = v * v
        v = v * v * scales[:, None]
    else:
        m = tl.load(tensor_at(row, 3, tl.float32, IS_ALIGNED) + i, mask=inside, other=0.0)
        v = tl.load(tensor_at(row, 4, tl.float32, IS_ALIGNED) + i, mask=inside, other=0.0)
    return m, v


@kernel
def _codes(
    values: tl.tensor, scales: tl.tensor, random: tl.tensor, MOST: tl.constexpr, ROOTS: tl.constexpr
) -> tl.tensor:
    """Roots of the values' shares of their blocks' scales, rounded stochastically to int32."""
    share = tl.div_rn(tl.abs(values), tl.maximum(scales, 1.1754943508222875e-38)[:, None])
    for _ in tl.static_range(ROOTS):
        share = tl.sqrt_rn(share)
    # A sum in fp32 could be one operation with the product, which rounds once: other codes.
    return ((share * MOST * 65536).to(tl.int32) + random.to(tl.int32)) >> 16


@kernel
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
@kernel_with(do_not_specialize=["step"])
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
    place = (tl.load(row + 8) + i + FIRST).to(tl.uint32)
    seed = mixed(tl.load(row + 7).to(tl.uint32) ^ step.to(tl.uint32)) & 0x7FFFFFFF
    g = tl.load(tensor_at(row, 1, GRAD, IS_ALIGNED) + i, mask=inside, other=0.0)
    g = g.to(tl.float32) * factor
    w = _master(row, i, inside, MASTER, IS_ALIGNED)
    m, v = _moments(row, i, inside, block, has_block, IS_QUANTISED, IS_ALIGNED)
    w, m, v = adamw(w, m, v, g, keep, rate, beta1, rest1, beta2, rest2, eps, correction2)
    random = bits_of(place, seed)
    _keep_moments(m, v, random, row, i, inside, block, has_block, IS_QUANTISED, IS_ALIGNED)
    random = bits_of(place, seed ^ 1)
    _keep_weight(w, random, row, i, inside, WEIGHT, MASTER, IS_ALIGNED)
