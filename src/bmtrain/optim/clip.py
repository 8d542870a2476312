"""Global gradient norms and clipping over all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.ledger import Ledger
from bmtrain.kernels.scale import scale_
from bmtrain.kernels.squares import sum_of_squares
from bmtrain.optim.gradients import Gradients, Parts
from bmtrain.optim.runs import contiguous_runs
from bmtrain.runtime import world
from bmtrain.runtime.arguments import AMOUNT, BOUND, POSITIVE, check
from bmtrain.shard.engine import Engine


def clip_grad_norm(
    param_groups: Iterable[dict[str, Any]] | Iterable[torch.nn.Parameter] | torch.nn.Parameter,
    max_norm: float,
    scale: float = 1.0,
    norm_type: float = 2,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; returns the original norm.

    Collective; does not synchronise with the device.

    Args:
        param_groups: an optimizer's `param_groups`, or parameters.
        max_norm: the bound on the unscaled gradient; inf only measures.
        scale: the loss scale of the gradients; the returned norm is divided by it.
        norm_type: 2, another positive number, or inf.
        eps: avoids division by zero.

    Returns:
        The norm over all ranks, with tied weights counted once: 0-dim on the device, fp32, or fp64
        for fp64 gradients.

    Raises:
        ConfigurationError: for a `norm_type`, `max_norm` or `scale` that is not positive.
    """
    return clip_gradients(
        Gradients(contiguous_runs(parameters_of(param_groups))), max_norm, scale, norm_type, eps
    )


def clip_gradients(
    gradients: Gradients, max_norm: float, scale: float, norm_type: float, eps: float
) -> torch.Tensor:
    """`clip_grad_norm` for gradients that have been collected before."""
    order: Any = math.inf if str(norm_type) == "inf" else norm_type  # BMTrain's programs write so
    check(
        "clip_grad_norm",
        norm_type=(order, BOUND),
        max_norm=(max_norm, BOUND),
        scale=(scale, POSITIVE),
        eps=(eps, AMOUNT),
    )
    # Each rank scales its own slices: with other bounds they would part.
    current = world.current("clip_grad_norm")
    current.service(Ledger).note(
        current.mesh.world,
        f"clip_grad_norm (max_norm {float(max_norm):.17g}, norm of order {float(order):g}, loss "
        f"scale {float(scale):.17g}, eps {float(eps):g})",
    )
    current.service(Engine).host.refuse("gradients are clipped inside: clip after the function")
    found = gradients.look()
    # Rounded where it is divided, and divided by a number of the host: a launch less, each.
    norm = torch.empty((), dtype=_dtype_of(found), device=current.device)
    torch.div(_global_norm(*found, float(order)), scale, out=norm)
    if not math.isinf(max_norm):
        bound = torch.tensor(max_norm, dtype=norm.dtype, device="cpu")
        factor = torch.div(bound, norm + eps).clamp(max=1.0)
        for parts in found:
            scale_(parts.batch, factor)
        # A norm that is not finite reaches the padding too, which no clearing in place reaches.
        for part in found[0].parts:
            for begin, end in part.piece.gaps:
                part.grad[begin:end].zero_()
    return norm


def parameters_of(groups: Any) -> list[torch.nn.Parameter]:
    """The parameters of parameter groups, of an iterable of parameters, or a single one."""
    if isinstance(groups, torch.nn.Parameter):
        return [groups]
    found: list[torch.nn.Parameter] = []
    for member in groups:
        found.extend(member["params"] if isinstance(member, dict) else [member])
    return found


def global_sum_of_squares(
    sharded: Parts, replicated: Parts, mark: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of squares of all gradients on all ranks: 0-dim fp64 on the device. Collective.

    Finite if and only if every gradient on every rank is, and every rank's `mark` (0-dim: 0 or
    NaN). Sharded gradients are summed over ranks; those of ordinary parameters are the same on all
    ranks and count once.
    """
    current = world.current("clip_grad_norm")
    total = sum_of_squares(sharded.batch, current.device)
    if mark is not None:
        total += mark
    if not replicated.parts:
        collectives.all_reduce_(total, "sum", current.mesh.world)
        return total
    own = sum_of_squares(replicated.batch, current.device)
    # Without it, ranks whose copy is finite would take a step that the others skip.
    total += torch.where(own.isfinite(), 0.0, own)
    collectives.all_reduce_(total, "sum", current.mesh.world)
    return total + own


def _global_norm(sharded: Parts, replicated: Parts, order: float) -> torch.Tensor:
    if order == 2:
        return global_sum_of_squares(sharded, replicated).sqrt()
    axis = world.current("clip_grad_norm").mesh.world
    own, same = _local_norm(sharded, order), _local_norm(replicated, order)
    if math.isinf(order):
        largest = torch.maximum(own, same)
        # A maximum over ranks drops NaN: whether there is one travels beside it.
        both = torch.stack([largest.nan_to_num(0.0, math.inf), largest.isnan().to(largest)])
        collectives.all_reduce_(both, "max", axis)
        return torch.where(both[1] > 0, math.nan, both[0])
    power, again = own**order, same**order
    # Without it, ranks would scale by different factors if only some copies are finite.
    power += torch.where(again.isfinite(), 0.0, again)
    collectives.all_reduce_(power, "sum", axis)
    return torch.pow(power + again, 1.0 / order)


def _local_norm(parts: Parts, order: float) -> torch.Tensor:
    device = world.current("clip_grad_norm").device
    norms = [_norm(part.grad, order).to(device, torch.float64) for part in parts.parts]
    return (
        torch.linalg.vector_norm(torch.stack(norms), order)
        if norms
        else torch.zeros((), dtype=torch.float64, device=device)
    )


def _norm(grad: torch.Tensor, order: float) -> torch.Tensor:
    if grad.numel() == 0:  # torch cannot take the maximum of no elements
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
