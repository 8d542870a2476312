"""Where NaN and infinities come from: a pass over a batch with hooks on all modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.runtime import world
from bmtrain.shard.slices import local_of
from bmtrain.torch_internals import tensors_of


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """What one rank found, each field None where all was finite.

    Attributes:
        rank: the rank.
        weight: the first parameter with a value that is not finite, before the pass.
        output: the first module whose output was not finite, and what it held.
        loss: the first loss that was not finite.
        output_gradient: the first module the gradient of whose output was not finite: what reads
            that output made it so.
        gradient: the first parameter whose gradient, summed over ranks, is not finite.
        micro_batch: in which of the losses, counted from 0, the first of these was found.
    """

    rank: int
    weight: str | None = None
    output: str | None = None
    loss: float | None = None
    output_gradient: str | None = None
    gradient: str | None = None
    micro_batch: int | None = None

    @property
    def is_cause(self) -> bool:
        """Whether it arose here; sums carry gradients that are not finite to other ranks."""
        own = (self.weight, self.output, self.loss, self.output_gradient)
        return any(value is not None for value in own)

    def text(self) -> str:
        """What a user needs to know, in a sentence."""
        if self.weight is not None:
            return f"before the step, parameter {self.weight}"
        if self.output is not None:
            return f"the first module whose output was not finite is {self.output}"
        if self.loss is not None and self.loss - self.loss != 0:
            text = f"the loss is {self.loss}, and all modules' outputs are finite"
        else:
            text = "outputs and loss are finite"
        if self.output_gradient is not None:
            text += (
                "; backward, the first gradient that is not finite is that of the output of "
                f"{self.output_gradient}"
            )
        if self.gradient is not None:
            text += f"; the first parameter whose gradient is not finite is {self.gradient}"
        return text


def find_non_finite(
    model: torch.nn.Module,
    losses: Iterable[torch.Tensor],
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> list[NonFinite]:
    """Name what is not finite first: weights, a module's output, a loss, gradients. Collective.

    Gradients of the model are cleared before and stay after. An output is one that holds NaN or
    inf; -inf alone, which masks hold, counts only where nothing else is found.

    Args:
        model: its modules get hooks for the time of the call.
        losses: scalars, made as they are asked for, best by a generator: the forward passes must
            run inside of this call.
        backward: what runs the backward pass of a loss; `OptimManager.backward` would scale it.

    Returns:
        What each rank found, in rank order, the same list on all ranks.
    """
    axis = world.current("find_non_finite").mesh.world
    # By fields of NonFinite, the first with NaN or inf; and the first that held -inf alone.
    bad: dict[str, Any] = {"weight": _first_parameter(model, lambda param: param)}
    masked: dict[str, str] = {}
    micro_batch = 0

    def look(field: str, label: str, x: torch.Tensor) -> None:
        held = _held(x.detach()) if field not in bad else None
        if held == "-inf":
            masked.setdefault(field, f"{label}: {held}")
        elif held is not None:
            bad[field] = f"{label}: {held}"
            bad.setdefault("micro_batch", micro_batch)

    def hook(name: str, module: torch.nn.Module, args: Any, out: Any) -> None:
        label = f"{name or 'the model'} ({type(module).__name__})"
        for x in tensors_of(out):
            look("output", label, x)
            if x.requires_grad:
                x.register_hook(functools.partial(look, "output_gradient", label))

    model.zero_grad()
    handles = [
        module.register_forward_hook(functools.partial(hook, name))
        for name, module in model.named_modules()
    ]
    try:
        for loss in losses:
            if "loss" not in bad and not bool(loss.detach().isfinite().all()):
                bad["loss"] = float(loss.detach())
                bad.setdefault("micro_batch", micro_batch)
            backward(loss)
            micro_batch += 1
    finally:
        for handle in handles:
            handle.remove()
    gradient = _first_parameter(model, lambda param: param.grad)
    found = NonFinite(rank=world.rank(), gradient=gradient, **{**masked, **bad})
    return collectives.gather_objects(found, axis, "find_non_finite")


def _first_parameter(
    model: torch.nn.Module, part: Callable[[torch.nn.Parameter], torch.Tensor | None]
) -> str | None:
    """The first parameter of which this rank's slice, or that of its gradient, is not finite."""
    for name, param in model.named_parameters():
        x = part(param)
        held = None if x is None else _held(local_of(x).detach())
        if held is not None:
            return f"{name}: {held}"
    return None


def _held(x: torch.Tensor) -> str | None:
    """What of NaN, inf and -inf a tensor holds: the worst of them; None where all is finite."""
    if not (x.is_floating_point() or x.is_complex()):
        return None
    x = x.coalesce().values() if x.layout is torch.sparse_coo else x
    if bool(x.isfinite().all()):
        return None
    if bool(x.isnan().any()):
        return "NaN"
    return "-inf" if not x.is_complex() and not bool(x.isposinf().any()) else "inf"
