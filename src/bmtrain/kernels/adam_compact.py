"""The AdamW update of tensors whose state is kept in fewer bits: see `blockwise` and `bf16`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.kernels.adam import AdamSettings, AdamTensors, adamw_update
from bmtrain.kernels.bf16 import joined, round_stochastically, split
from bmtrain.kernels.blockwise import BLOCK, Blocks
from bmtrain.kernels.chunks import Batch, launching_on, table_of
from bmtrain.kernels.random_bits import key_of, random_bits, seed_of

# Elements that a program of the kernel updates, and that torch's operators update at a time: few
# enough for the CPU's caches.
CHUNK, CPU_CHUNK, NUM_WARPS = 1024, 1 << 18, 4
Moment = torch.Tensor | Blocks


@dataclasses.dataclass(frozen=True)
class CompactTensors:
    """Tensors of the same elements of one parameter.

    Attributes:
        weight: (n,) fp32, fp16 or bf16.
        grad: (n,) of any floating dtype, read only.
        master: (n,) fp32, the same tensor as `weight` for weights in fp32; int16, the remainders of
            bf16 weights; None for bf16 weights that are rounded stochastically.
        mean, square: (n,) fp32, or blocks.
        number: of the parameter in its optimizer.
        start: of the elements in the parameter, a multiple of 64.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor | None
    mean: Moment
    square: Moment
    number: int
    start: int

    @property
    def is_exact(self) -> bool:
        """Whether the weights are their own master."""
        return self.weight is self.master

    @property
    def state(self) -> list[torch.Tensor]:
        """Its tensors; weights are none."""
        moments = [
            y for x in (self.mean, self.square) for y in (x if isinstance(x, Blocks) else (x,))
        ]
        return moments if self.master is None or self.is_exact else [self.master, *moments]

    def part(self, begin: int, end: int) -> CompactTensors:
        """Elements [begin, end); `begin` is a multiple of 64."""
        weight, master = self.weight[begin:end], self.master
        if master is not None:
            master = weight if self.is_exact else master[begin:end]
        mean, square = (
            x.part(begin, end) if isinstance(x, Blocks) else x[begin:end]
            for x in (self.mean, self.square)
        )
        return CompactTensors(
            weight, self.grad[begin:end], master, mean, square, self.number, self.start + begin
        )

    def parts(self, length: int) -> Iterator[CompactTensors]:
        """Parts of at most `length` elements, a multiple of 64, in order, as views."""
        for begin in range(0, self.weight.numel(), length):
            yield self.part(begin, min(begin + length, self.weight.numel()))

    def with_weight(self, weight: torch.Tensor, grad: torch.Tensor) -> CompactTensors:
        """With weights and gradients that lie elsewhere."""
        master = weight if self.is_exact else self.master
        return dataclasses.replace(self, weight=weight, master=master, grad=grad)

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> CompactTensors:
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
    tensors: Sequence[AdamTensors | CompactTensors],
    settings: AdamSettings,
    verdict: torch.Tensor | None = None,
) -> None:
    """`adamw_update` or `compact_update` of tensors of either kind."""
    whole = [t for t in tensors if isinstance(t, AdamTensors)]
    if whole:
        adamw_update(Batch(whole), settings, verdict)
    compact = [t for t in tensors if isinstance(t, CompactTensors)]
    if compact:
        compact_update(compact, settings, verdict)


def compact_update(
    tensors: Sequence[CompactTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """Update tensors of one device in place. Arithmetic is in fp32, as `adamw_update`'s.

    Random bits depend on the parameter's number, the step and the element's place in the parameter:
    the values are the same on any number of ranks.

    Args:
        tensors, settings: see there.
        verdict: 0-dim fp64 on that device; if it is NaN or infinite, nothing is updated.
    """
    if tensors and tensors[0].weight.device.type != "cpu":
        compact_triton(tensors, settings, verdict)
    else:
        compact_reference(tensors, settings, verdict)


def compact_reference(
    tensors: Sequence[CompactTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`compact_update` by torch's operators: the path of the CPU."""
    if verdict is not None and not bool(verdict.isfinite()):
        return
    for whole in tensors:
        seed = seed_of(key_of(whole.number), settings.step)
        for part in whole.parts(CPU_CHUNK):
            _update(part, settings, seed)


def _update(t: CompactTensors, settings: AdamSettings, seed: int) -> None:
    mean, square = (x.values() if isinstance(x, Blocks) else x for x in (t.mean, t.square))
    if t.master is None:
        master = t.weight.float()
    elif t.master.dtype == torch.int16:
        master = joined(t.weight, t.master)
    else:
        master = t.master
    adamw_update(Batch([AdamTensors(master, t.grad, master, mean, square)]), settings)
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


def _halves(t: CompactTensors, seed: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two times 16 random bits for each element."""
    bits = random_bits(seed ^ salt, t.start, t.weight.numel(), t.weight.device)
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF


def compact_triton(
    tensors: Sequence[CompactTensors], settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`compact_update` with one kernel for all tensors of equal kinds."""
    from bmtrain.kernels.chunks_triton import DTYPES

    kinds: dict[tuple[Any, ...], list[CompactTensors]] = {}
    for t in tensors:
        if t.weight.numel():
            kinds.setdefault(_kind(t), []).append(t)
    for (weight, grad, master, is_quantised), members in kinds.items():
        device = members[0].weight.device
        with launching_on(device):
            chunks = table_of(
                map(_row, members), CHUNK, device, is_aligned=all(map(_is_aligned, members))
            )
            _triton_kernel()[(chunks.count,)](
                chunks.rows,
                chunks.row_of,
                verdict,
                *settings.factors,
                settings.step,
                WEIGHT=DTYPES[weight],
                GRAD=DTYPES[grad],
                MASTER=master,
                IS_QUANTISED=is_quantised,
                IS_ALIGNED=chunks.is_aligned,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    torch.autograd.graph.increment_version(x for t in tensors for x in (t.weight, *t.state))


def _kind(t: CompactTensors) -> tuple[torch.dtype, torch.dtype, str, bool]:
    if t.master is None:
        master = "none"
    elif t.master.dtype == torch.int16:
        master = "remainder"
    else:
        master = "fp32"
    return t.weight.dtype, t.grad.dtype, master, isinstance(t.mean, Blocks)


def _addresses(t: CompactTensors) -> list[int]:
    """Of the kernel's columns; 0 for what a kind does not have."""
    mean, square = (x if isinstance(x, Blocks) else (x, None) for x in (t.mean, t.square))
    columns = (t.weight, t.grad, t.master, mean[0], square[0], mean[1], square[1])
    return [0 if x is None else x.data_ptr() for x in columns]


def _is_aligned(t: CompactTensors) -> bool:
    return t.weight.numel() % 16 == 0 and not any(address % 16 for address in _addresses(t)[:5])


def _row(t: CompactTensors) -> tuple[int, ...]:
    """What the kernel reads of one; the same at each step."""
    return (*_addresses(t), key_of(t.number), t.start, t.weight.numel())


@functools.cache
def _triton_kernel() -> Any:
    """Import lazily: Triton is slow to import, and is installed only where CUDA is."""
    from bmtrain.kernels.adam_compact_triton import compact_kernel

    return compact_kernel
