"""Global gradient norms and clipping over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.optim.runs import Run, contiguous_runs
from bmtrain.runtime import world


def clip_grad_norm(
    param_groups: Iterable[dict[str, Any]] | Iterable[torch.nn.Parameter] | torch.nn.Parameter,
    max_norm: float,
    scale: float = 1.0,
    norm_type: float = 2,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Scale gradients down so that their global norm is at most `max_norm`, and return the norm they had.

    Args:
        param_groups: an optimizer's `param_groups`, or parameters.
        max_norm: the bound, in units of the unscaled gradient.
        scale: the loss scale that the gradients carry; the returned norm is divided by it.
        norm_type: 2, another positive number, or inf.
        eps: keeps the quotient finite.

    Returns:
        The norm over all ranks, tied weights counted once: 0-dim fp32 on the device. No host synchronisation. Collective.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type is {norm_type}: expected a positive number or inf.")
    parts = [part for run in contiguous_runs(parameters_of(param_groups)) for part in run.gradients()]
    norm = _global_norm(parts, float(norm_type)) / scale
    factor = (max_norm / (norm + eps)).clamp(max=1.0)
    # One kernel for all gradients of a dtype: a product with a 0-dim tensor by itself runs four times slower than memory allows.
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, grad in parts:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


def parameters_of(groups: Any) -> list[torch.nn.Parameter]:
    """All parameters of param groups, of an iterable of parameters, or one parameter."""
    if isinstance(groups, torch.nn.Parameter):
        return [groups]
    found: list[torch.nn.Parameter] = []
    for member in groups:
        found.extend(member["params"] if isinstance(member, dict) else [member])
    return found


def all_finite(runs: Iterable[Run]) -> torch.Tensor:
    """Whether every gradient on every rank is finite: a 0-dim bool tensor on the device. Collective."""
    current = world.current("the overflow check")
    # The largest magnitude is NaN or infinite exactly if some element is.
    peaks = [_norm(grad, math.inf) for run in runs for _, grad in run.gradients()]
    bad = torch.zeros((), device=current.device)
    if peaks:
        bad = (~torch.isfinite(torch.stack(peaks))).any().float()
    collectives.all_reduce_(bad, "max", current.mesh.world)
    return bad == 0


def _global_norm(parts: list[tuple[Run, torch.Tensor]], order: float) -> torch.Tensor:
    """Sharded gradients add up over ranks; those of ordinary parameters are the same everywhere and count once."""
    current = world.current("clip_grad_norm")
    sharded = _combine([_norm(grad, order) for run, grad in parts if run.storage is not None], order, current.device)
    replicated = _combine([_norm(grad, order) for run, grad in parts if run.storage is None], order, current.device)
    if math.isinf(order):
        collectives.all_reduce_(sharded, "max", current.mesh.world)
        return torch.maximum(sharded, replicated)
    power = sharded**order
    collectives.all_reduce_(power, "sum", current.mesh.world)
    return torch.pow(power + replicated**order, 1.0 / order)


def _norm(grad: torch.Tensor, order: float) -> torch.Tensor:
    if grad.numel() == 0:  # the maximum of nothing is an error in torch
        return torch.zeros((), device=grad.device)
    return torch.linalg.vector_norm(grad, order, dtype=torch.float32)


def _combine(norms: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), order)
