"""Global gradient norms and clipping over all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.kernels.scale import scale_
from bmtrain.kernels.squares import sum_of_squares
from bmtrain.optim.gradients import Gradients, Parts
from bmtrain.optim.runs import contiguous_runs
from bmtrain.runtime import world


def clip_grad_norm(
    param_groups: Iterable[dict[str, Any]] | Iterable[torch.nn.Parameter] | torch.nn.Parameter,
    max_norm: float,
    scale: float = 1.0,
    norm_type: float = 2,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Scale gradients down so that their global norm is at most `max_norm`, and return the norm
    they had.

    Args:
        param_groups: an optimizer's `param_groups`, or parameters.
        max_norm: the bound, in units of the unscaled gradient; inf only measures.
        scale: the loss scale that the gradients carry; the returned norm is divided by it.
        norm_type: 2, another positive number, or inf.
        eps: keeps the quotient finite.

    Returns:
        The norm over all ranks, tied weights counted once: 0-dim on the device, fp32, of fp64
            gradients fp64. No
        host synchronisation. Collective.
    """
    return clip_gradients(
        Gradients(contiguous_runs(parameters_of(param_groups))), max_norm, scale, norm_type, eps
    )


def clip_gradients(
    gradients: Gradients, max_norm: float, scale: float, norm_type: float, eps: float
) -> torch.Tensor:
    """`clip_grad_norm` of parameters whose gradients have been looked for before."""
    if not float(norm_type) > 0:  # programs of BMTrain write "inf"
        raise ConfigurationError(f"norm_type is {norm_type}: expected a positive number or inf.")
    found = gradients.look()
    norm = (_global_norm(*found, float(norm_type)) / scale).to(_dtype_of(found))
    if not math.isinf(max_norm):
        factor = (max_norm / (norm + eps)).clamp(max=1.0)
        for parts in found:
            scale_(parts.batch, factor)
    return norm


def parameters_of(groups: Any) -> list[torch.nn.Parameter]:
    """All parameters of param groups, of an iterable of parameters, or one parameter."""
    if isinstance(groups, torch.nn.Parameter):
        return [groups]
    found: list[torch.nn.Parameter] = []
    for member in groups:
        found.extend(member["params"] if isinstance(member, dict) else [member])
    return found


def global_sum_of_squares(sharded: Parts, replicated: Parts) -> torch.Tensor:
    """Of all gradients on all ranks: 0-dim fp64 on the device, finite exactly if every gradient on
    every rank is. Collective.

    Sharded gradients add up over ranks; those of ordinary parameters are the same everywhere and
    count once.
    """
    current = world.current("clip_grad_norm")
    total = sum_of_squares(sharded.batch, current.device)
    if not replicated.parts:
        collectives.all_reduce_(total, "sum", current.mesh.world)
        return total
    own = sum_of_squares(replicated.batch, current.device)
    total += torch.where(own.isfinite(), 0.0, own)  # all ranks hear of what is not finite on one
    collectives.all_reduce_(total, "sum", current.mesh.world)
    return total + own


def _global_norm(sharded: Parts, replicated: Parts, order: float) -> torch.Tensor:
    if order == 2:
        return global_sum_of_squares(sharded, replicated).sqrt()
    axis = world.current("clip_grad_norm").mesh.world
    own, same = _local_norm(sharded, order), _local_norm(replicated, order)
    if math.isinf(order):
        collectives.all_reduce_(own, "max", axis)
        return torch.maximum(own, same)
    power = own**order
    collectives.all_reduce_(power, "sum", axis)
    return torch.pow(power + same**order, 1.0 / order)


def _local_norm(parts: Parts, order: float) -> torch.Tensor:
    device = world.current("clip_grad_norm").device
    norms = [_norm(part.grad, order).to(device, torch.float64) for part in parts.parts]
    return (
        torch.linalg.vector_norm(torch.stack(norms), order)
        if norms
        else torch.zeros((), dtype=torch.float64, device=device)
    )


def _norm(grad: torch.Tensor, order: float) -> torch.Tensor:
    if grad.numel() == 0:  # the maximum of nothing is an error in torch
        return torch.zeros((), device=grad.device)
    return torch.linalg.vector_norm(
        grad, order, dtype=torch.promote_types(grad.dtype, torch.float32)
    )


def _dtype_of(found: Iterable[Parts]) -> torch.dtype:
    return functools.reduce(
        torch.promote_types,
        (part.grad.dtype for parts in found for part in parts.parts),
        torch.float32,
    )
