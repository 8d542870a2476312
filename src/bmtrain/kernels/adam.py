"""The AdamW update of flat tensors: a plain-torch twin, a CPU path and a fused Triton kernel, one rule for every dtype."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch


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
    def gradient_factor(self) -> float:
        """What the gradient is multiplied by."""
        return (-1.0 if self.maximize else 1.0) / self.scale


def adamw_update(
    weight: torch.Tensor, grad: torch.Tensor, master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, settings: AdamSettings
) -> None:
    """Update in place, element by element.

    Args:
        weight: (n,) of any floating dtype, written from `master`; the same tensor as `master` where parameters are fp32.
        grad: (n,) of any floating dtype, read only.
        master, mean, square: (n,) fp32: the exact weights and both moments.
        settings: see AdamSettings.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
    """
    if weight.numel() == 0:
        return
    if weight.device.type == "cpu":
        _update_on_cpu(weight, grad, master, mean, square, settings)
    else:
        _update_by_triton(weight, grad, master, mean, square, settings)


def adamw_reference(
    weight: torch.Tensor, grad: torch.Tensor, master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, settings: AdamSettings
) -> None:
    """The same by the formula, one operation after another: what the fast paths are tested against."""
    s = settings
    g = grad.float() * s.gradient_factor
    mean.mul_(s.beta1).add_(g, alpha=1 - s.beta1)
    square.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
    denominator = (square / (1 - s.beta2**s.step)).sqrt() + s.eps
    master.mul_(1 - s.lr * s.weight_decay)
    master.sub_(mean / (1 - s.beta1**s.step) / denominator * s.lr)
    if weight is not master:
        weight.copy_(master)


def _update_on_cpu(
    weight: torch.Tensor, grad: torch.Tensor, master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, settings: AdamSettings
) -> None:
    """torch's fused CPU AdamW, the operator itself: it reads and writes each tensor once, on all threads."""
    s = settings
    exact = grad.float()
    if s.scale != 1.0:
        exact = exact / s.scale
    torch._fused_adamw_(
        [master], [exact], [mean], [square], [], [torch.tensor(float(s.step), device="cpu")], amsgrad=False, maximize=s.maximize,
        lr=s.lr, beta1=s.beta1, beta2=s.beta2, weight_decay=s.weight_decay, eps=s.eps,
    )  # fmt: skip
    if weight is not master:
        weight.copy_(master)


def _update_by_triton(
    weight: torch.Tensor, grad: torch.Tensor, master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, settings: AdamSettings
) -> None:
    s, block = settings, 2048
    kernel = _triton_kernel()
    grid = (-(-weight.numel() // block),)
    with torch.cuda.device(weight.device):
        # Differences such as 1 - beta2 lose a hundred times their last bit in fp32: they are taken here, in double.
        kernel[grid](
            weight, master, mean, square, grad, weight.numel(),
            1 - s.lr * s.weight_decay, s.lr / (1 - s.beta1**s.step), s.beta1, 1 - s.beta1, s.beta2, 1 - s.beta2,
            s.eps, s.gradient_factor, 1 - s.beta2**s.step, BLOCK=block,
        )  # fmt: skip
    for tensor in (weight, master, mean, square):
        torch.autograd.graph.increment_version(tensor)


@functools.cache
def _triton_kernel() -> Any:
    """Triton exists only where CUDA does and takes long to import: it is loaded by the first update on a GPU."""
    from bmtrain.kernels.adam_triton import adamw_kernel

    return adamw_kernel
