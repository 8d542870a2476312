"""The AdamW update of flat tensors, in fp32 or with a state of fewer bits: see `blockwise`, `bf16`.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.kernels.bf16 import joined, round_stochastically, split
from bmtrain.kernels.blockwise import BLOCK, PART_OF_MEAN, PART_OF_SQUARE, Blocks
from bmtrain.kernels.chunks import table_of, tensor_at
from bmtrain.kernels.launch import Kernel, kernel, tl
from bmtrain.kernels.random_bits import FIRST, key_of, mixed, random_bits, seed_of
from bmtrain.torch_internals import current_stream_number, fused_adamw

# Elements that a program of the kernel updates, and that torch's operators update at a time: few
# enough for the CPU's caches.
CHUNK, CPU_CHUNK, NUM_WARPS = 1024, 1 << 18, 4
Moment = torch.Tensor | Blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Hyperparameters of one update. `scale` divides the gradient; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    scale: float = 1.0
    maximize: bool = False


@dataclasses.dataclass(frozen=True)
class AdamTensors:
    """Tensors of the same elements, contiguous; in a compact form those of one parameter.

    Attributes:
        weight: (n,) of any floating dtype, written from `master`.
        grad: (n,) of any floating dtype, read only.
        master: (n,) fp32, or fp64 for fp64 weights: the master weights; the same tensor as `weight`
            for weights in fp32 or fp64. int16: the remainders of bf16 weights. None for bf16
            weights that are rounded stochastically.
        mean, square: both moments, (n,) fp32, or fp64 for fp64 weights, or blocks.
        number: of the parameter in its optimizer, for a compact form.
        start: of the elements in the parameter, a multiple of 64, for a compact form.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor | None
    mean: Moment
    square: Moment
    number: int = 0
    start: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the weights are their own master."""
        return self.weight is self.master

    @property
    def is_compact(self) -> bool:
        """Whether anything is kept in fewer bits than fp32 has."""
        return (
            self.master is None or self.master.dtype == torch.int16 or isinstance(self.mean, Blocks)
        )

    @property
    def state(self) -> list[torch.Tensor]:
        """Its tensors; weights are none."""
        moments = [
            y for x in (self.mean, self.square) for y in (x if isinstance(x, Blocks) else (x,))
        ]
        return moments if self.master is None or self.is_exact else [self.master, *moments]

    def part(self, begin: int, end: int) -> AdamTensors:
        """Elements [begin, end), as views; in a compact form, `begin` is a multiple of 64."""
        weight, master = self.weight[begin:end], self.master
        if master is not None:
            master = weight if self.is_exact else master[begin:end]
        mean, square = (
            x.part(begin, end) if isinstance(x, Blocks) else x[begin:end]
            for x in (self.mean, self.square)
        )
        start = self.start + begin
        return AdamTensors(weight, self.grad[begin:end], master, mean, square, self.number, start)

    def with_weight(self, weight: torch.Tensor, grad: torch.Tensor) -> AdamTensors:
        """With weights and gradients that lie elsewhere."""
        master = weight if self.is_exact else self.master
        return dataclasses.replace(self, weight=weight, master=master, grad=grad)

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> AdamTensors:
        """With the tensors of the state as `place` gives them."""
        master = self.master
        if master is not None and not self.is_exact:
            master = place(master)
        mean, square = (
            Blocks(*map(place, x)) if isinstance(x, Blocks) else place(x)
            for x in (self.mean, self.square)
        )
        return dataclasses.replace(self, master=master, mean=mean, square=square)


def update_tensors(
    tensors: Sequence[AdamTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """Update tensors of one device in place, element by element.

    Arithmetic is in fp32, or fp64 for fp64 weights. Random bits depend on the parameter's number,
    the step and the element's place in the parameter: the values are the same on any number of
    ranks.

    Args:
        tensors, settings: see there.
        verdict: 0-dim fp64 on that device; if it is NaN or infinite, nothing is updated. The host
            waits for it only if there are fp64 weights.
    """
    by_kernel: list[AdamTensors] = []
    by_torch: list[AdamTensors] = []
    for t in tensors:
        is_slow = t.weight.device.type == "cpu" or t.weight.dtype == torch.float64
        (by_torch if is_slow else by_kernel).append(t)
    adamw_triton(by_kernel, settings, verdict)
    if by_torch:
        adamw_reference(by_torch, settings, verdict)


def adamw_reference(
    tensors: Sequence[AdamTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`update_tensors` by torch's operators."""
    if verdict is not None and not bool(verdict.isfinite()):
        return
    for whole in tensors:
        seed, numel = seed_of(key_of(whole.number), settings.step), whole.weight.numel()
        # torch's own operator goes through all of a tensor, on all threads
        length = CPU_CHUNK if whole.is_compact else max(numel, 1)
        for begin in range(0, numel, length):
            t = whole.part(begin, begin + length)
            mean, square = (x.values() if isinstance(x, Blocks) else x for x in (t.mean, t.square))
            master = t.master
            if master is None:
                master = t.weight.float()
            elif master.dtype == torch.int16:
                master = joined(t.weight, master)
            step_of_masters(master, t.grad, mean, square, settings)
            if isinstance(t.mean, Blocks) and isinstance(t.square, Blocks):
                bits = random_bits(seed, t.start, len(t.grad), t.grad.device)
                t.mean.fill(mean, bits & 0xFFFF)
                t.square.fill(square, (bits >> 16) & 0xFFFF)
            if t.master is None:
                bits = random_bits(seed ^ 1, t.start, len(t.grad), t.grad.device)
                round_stochastically(master, t.weight, bits & 0xFFFF)
            elif t.master.dtype == torch.int16:
                split(master, t.weight, t.master)
            elif not t.is_exact:
                t.weight.copy_(master)


def step_of_masters(
    master: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    s: AdamSettings,
) -> None:
    """The operator of torch's fused AdamW: one pass over tensors of fp32 or fp64."""
    exact = grad.to(master.dtype)
    if s.scale != 1.0:
        exact = exact / s.scale
    fused_adamw(
        [master],
        [exact],
        [mean],
        [square],
        [],
        [torch.full((), s.step, dtype=torch.float32, device=master.device)],
        amsgrad=False,
        maximize=s.maximize,
        lr=s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        weight_decay=s.weight_decay,
        eps=s.eps,
    )


def adamw_triton(
    tensors: Sequence[AdamTensors], s: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`update_tensors` with one kernel for all tensors of equal kinds."""
    # What the kernel reads of each, the same at each step.
    kinds: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for whole in tensors:
        numel = whole.weight.numel()
        # An odd end is apart: it would take the widest loads and stores from the rest.
        body = numel - numel % (BLOCK if isinstance(whole.mean, Blocks) else 16)
        for t in [whole] if body == numel else [whole.part(0, body), whole.part(body, numel)]:
            master = "none" if t.master is None else "fp32"
            if t.master is not None and t.master.dtype == torch.int16:
                master = "remainder"
            (mean, mean_scales), (square, square_scales) = (
                x if isinstance(x, Blocks) else (x, None) for x in (t.mean, t.square)
            )
            columns = (t.weight, t.grad, t.master, mean, square, mean_scales, square_scales)
            addresses = [0 if x is None else x.data_ptr() for x in columns]
            count, dtypes = t.weight.numel(), (t.weight.dtype, t.grad.dtype)
            is_aligned = not any(number % 16 for number in (count, *addresses[:5]))
            kind = *dtypes, master, isinstance(t.mean, Blocks), is_aligned
            if count:
                kinds.setdefault(kind, []).append((*addresses, key_of(t.number), t.start, count))
    for (weight, grad, master, is_quantised, is_aligned), rows in kinds.items():
        device = tensors[0].weight.device
        places, row_of = table_of(tuple(rows), CHUNK, device, current_stream_number(device))
        adamw_kernel(
            (len(row_of),),
            places,
            row_of,
            verdict,
            # Computed here in double: differences such as 1 - beta2 would lose a hundred times
            # their last bit in fp32.
            1 - s.lr * s.weight_decay,
            s.lr / (1 - s.beta1**s.step),
            s.beta1,
            1 - s.beta1,
            s.beta2,
            1 - s.beta2,
            s.eps,
            (-1.0 if s.maximize else 1.0) / s.scale,  # of the gradient
            1 - s.beta2**s.step,
            s.step,
            WEIGHT=weight,
            GRAD=grad,
            MASTER=master,
            IS_QUANTISED=is_quantised,
            IS_ALIGNED=is_aligned,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    torch.autograd.graph.increment_version(x for t in tensors for x in (t.weight, *t.state))


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


# Not for each kind of step a kernel of its own: 1, and multiples of 16, are kinds to Triton.
@functools.partial(Kernel, do_not_specialize=["step"])
def adamw_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
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
    # Masters: see AdamTensors.master.
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
    # Each sum names the product that is not rounded: the compiler would choose one for each form of
    # the state, and they would give other values.
    m = tl.fma(m, beta1, rest1 * g)
    v = tl.fma(v, beta2, rest2 * g * g)
    change = rate * tl.div_rn(m, tl.sqrt_rn(v / correction2) + eps)
    w = tl.fma(w, keep, -change)
    if IS_QUANTISED:
        random = mixed(mixed(place) ^ seed)
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
            random = mixed(mixed(place) ^ (seed ^ 1))
            first = (bits + (random & 0xFFFF).to(tl.int32)) >> 16
        tl.store(tensor_at(row, 0, tl.int16, IS_ALIGNED) + i, first.to(tl.int16), mask=inside)
