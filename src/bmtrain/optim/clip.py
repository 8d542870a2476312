"""Global gradient norms and clipping over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.distributed.ledger import Ledger
from bmtrain.kernels.scale import scale_
from bmtrain.kernels.squares import sum_of_squares
from bmtrain.optim.flat import FlatSpan, GradientPart, gradients_of, parameters_of, spans_of
from bmtrain.runtime import world
from bmtrain.runtime.arguments import AMOUNT, BOUND, POSITIVE, check


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
    spans = spans_of(parameters_of(param_groups))
    return clip_gradients(spans, max_norm, scale, norm_type, eps)


def clip_gradients(
    spans: Sequence[FlatSpan], max_norm: float, scale: float, norm_type: float, eps: float
) -> torch.Tensor:
    """`clip_grad_norm` for the gradients of these spans."""
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
    found = gradients_of(spans)
    dtype = torch.float32
    for part in (*found[0], *found[1]):
        dtype = torch.promote_types(dtype, part.grad.dtype)
    # Rounded where it is divided, and divided by a number of the host: a launch less, each.
    norm = torch.empty((), dtype=dtype, device=current.device)
    torch.div(_global_norm(*found, float(order)), scale, out=norm)
    if not math.isinf(max_norm):
        bound = torch.tensor(max_norm, dtype=norm.dtype, device="cpu")
        factor = torch.div(bound, norm + eps).clamp(max=1.0)
        for parts in found:
            scale_((part.grad for part in parts), factor)
        # A norm that is not finite reaches the padding too, which no clearing in place reaches.
        for part in found[0]:
            for begin, end in part.piece.gaps:
                part.grad[begin:end].zero_()
    return norm


def global_sum_of_squares(
    sharded: Sequence[GradientPart],
    replicated: Sequence[GradientPart],
    mark: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """`factor` times the sum of squares of all gradients on all ranks: 0-dim fp64 on the device.
    Collective.

    Finite if and only if every gradient on every rank is, and every rank's `mark` (0-dim: 0 or
    NaN). Sharded gradients are summed over ranks; those of ordinary parameters are the same on all
    ranks and count once.
    """
    current = world.current("clip_grad_norm")
    total = sum_of_squares((part.grad for part in sharded), current.device)
    if mark is not None:
        total = torch.add(mark, total, alpha=factor)
    elif factor != 1:
        total *= factor
    if not replicated:
        collectives.all_reduce_(total, "sum", current.mesh.world)
        return total
    own = sum_of_squares((part.grad for part in replicated), current.device)
    # Without it, ranks whose copy is finite would take a step that the others skip.
    total += torch.where(own.isfinite(), 0.0, own)
    collectives.all_reduce_(total, "sum", current.mesh.world)
    return torch.add(total, own, alpha=factor)


def _global_norm(
    sharded: Sequence[GradientPart], replicated: Sequence[GradientPart], order: float
) -> torch.Tensor:
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


def _local_norm(parts: Sequence[GradientPart], order: float) -> torch.Tensor:
    # one of nothing: torch takes no maximum of no elements
    norms = [torch.zeros((), dtype=torch.float64, device=world.current("clip_grad_norm").device)]
    for part in parts:
        if part.grad.numel():
            dtype = torch.promote_types(part.grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(part.grad, order, dtype=dtype)
            norms.append(norm.to(norms[0]))
    return torch.linalg.vector_norm(torch.stack(norms), order)
