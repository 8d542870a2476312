"""The AdamW update of flat tensors: plain torch, a CPU path and a fused Triton kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from bmtrain.kernels.blockwise import Blocks
from bmtrain.kernels.chunks import Batch, tensor_at
from bmtrain.kernels.launch import kernel, tl
from bmtrain.torch_internals import fused_adamw

BLOCK, NUM_WARPS = 1024, 4
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

    @property
    def factors(self) -> tuple[float, ...]:
        """What the kernels take.

        Computed here in double: differences such as 1 - beta2 would lose a hundred times their last
        bit in fp32.
        """
        return (
            1 - self.lr * self.weight_decay,
            self.lr / (1 - self.beta1**self.step),
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.eps,
            (-1.0 if self.maximize else 1.0) / self.scale,  # of the gradient
            1 - self.beta2**self.step,
        )


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


def adamw_update(
    tensors: Batch, settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """Update tensors of one device in place, element by element.

    Args:
        tensors: rows of weight, gradient, master, mean and square of AdamTensors, none of them
            in a compact form.
        settings: see AdamSettings.
        verdict: 0-dim fp64 on that device; if it is NaN or infinite, nothing is updated. The host
            waits for it only if there are fp64 weights.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
    """
    on_gpu = bool(tensors.rows) and tensors.rows[0][0].device.type != "cpu"
    if on_gpu and any(row[2].dtype == torch.float64 for row in tensors.rows):
        adamw_reference(tensors, settings, verdict)
    elif on_gpu:
        adamw_triton(tensors, settings, verdict)
    elif verdict is None or bool(verdict.isfinite()):
        for row in tensors.rows:
            _update_on_cpu(row, settings)


def adamw_reference(
    tensors: Batch, settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`adamw_update` by the formula, one operation at a time: the reference for tests."""
    if verdict is not None and not bool(verdict.isfinite()):
        return
    s = settings
    for weight, grad, master, mean, square in tensors.rows:
        g = grad.to(master.dtype) * ((-1.0 if s.maximize else 1.0) / s.scale)
        mean.mul_(s.beta1).add_(g, alpha=1 - s.beta1)
        square.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
        denominator = (square / (1 - s.beta2**s.step)).sqrt() + s.eps
        master.mul_(1 - s.lr * s.weight_decay)
        master.sub_(mean / (1 - s.beta1**s.step) / denominator * s.lr)
        if weight is not master:
            weight.copy_(master)


def _update_on_cpu(row: Sequence[torch.Tensor], s: AdamSettings) -> None:
    """The operator of torch's fused CPU AdamW: one pass over each tensor, on all threads."""
    weight, grad, master, mean, square = row
    if weight.numel() == 0:
        return
    exact = grad.to(master.dtype)
    if s.scale != 1.0:
        exact = exact / s.scale
    fused_adamw(
        [master],
        [exact],
        [mean],
        [square],
        [],
        [torch.tensor(float(s.step), device="cpu")],
        amsgrad=False,
        maximize=s.maximize,
        lr=s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        weight_decay=s.weight_decay,
        eps=s.eps,
    )
    if weight is not master:
        weight.copy_(master)


def adamw_triton(
    tensors: Batch, settings: AdamSettings, verdict: torch.Tensor | None = None
) -> None:
    """`adamw_update` with one kernel for all tensors of equal dtypes."""
    for dtypes, chunks in tensors.tables(BLOCK):
        adamw_kernel(
            (chunks.count,),
            chunks.rows,
            chunks.row_of,
            verdict,
            *settings.factors,
            WEIGHT=dtypes[0],
            GRAD=dtypes[1],
            IS_ALIGNED=chunks.is_aligned,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    torch.autograd.graph.increment_version(
        x for weight, _, *state in tensors.rows for x in (weight, *state)
    )


@kernel
def adamw(  # noqa: PLR0913 (as below)
    w: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    keep: tl.tensor,
    rate: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    correction2: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The next master weight, mean and square, all fp32."""
    # Each sum names the product that is not rounded: the compiler would choose one in each kernel,
    # and kernels of other forms of the state would give other values.
    m = tl.fma(m, beta1, rest1 * g)
    v = tl.fma(v, beta2, rest2 * g * g)
    change = rate * tl.div_rn(m, tl.sqrt_rn(v / correction2) + eps)
    return tl.fma(w, keep, -change), m, v


@kernel
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
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One pass over rows of (weight, gradient, master, mean, square), with fp32 arithmetic.

    Reads the gradient and updates the others; leaves them unchanged if `verdict` is NaN or
    infinite.
    """
    chunk = tl.program_id(0)
    row = rows + tl.load(row_of + chunk).to(tl.int64) * 7
    n = tl.load(row + 5)
    if verdict is not None:
        number = tl.load(verdict)
        n = tl.where(tl.abs(number) < float("inf"), n, 0)
    n = tl.multiple_of(n, 16) if IS_ALIGNED else n
    i = (chunk - tl.load(row + 6)) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    master = tensor_at(row, 2, tl.float32, IS_ALIGNED)
    mean = tensor_at(row, 3, tl.float32, IS_ALIGNED)
    square = tensor_at(row, 4, tl.float32, IS_ALIGNED)
    g = tl.load(tensor_at(row, 1, GRAD, IS_ALIGNED) + i, mask=inside).to(tl.float32) * factor
    w = tl.load(master + i, mask=inside)
    m = tl.load(mean + i, mask=inside)
    v = tl.load(square + i, mask=inside)
    w, m, v = adamw(w, m, v, g, keep, rate, beta1, rest1, beta2, rest2, eps, correction2)
    tl.store(mean + i, m, mask=inside)
    tl.store(square + i, v, mask=inside)
    tl.store(master + i, w, mask=inside)
    if tl.float32 != WEIGHT:  # fp32 weights are the master itself, written above
        tl.store(tensor_at(row, 0, WEIGHT, IS_ALIGNED) + i, w.to(WEIGHT), mask=inside)
