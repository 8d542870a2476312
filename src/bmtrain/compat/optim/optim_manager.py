"""`bmtrain.optim.optim_manager`: `OptimManager` of optim/manager.py, and two functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.optim.manager import OptimManager
from bmtrain.runtime import world


def check_overflow(param_groups: Iterable[dict[str, Any]]) -> None:
    """Raise on all ranks if any rank has an infinite or NaN gradient. Collective.

    Unlike BMTrain's, it checks fp32 gradients, too: they overflow as well if activations are in
    half precision.

    Raises:
        OverflowError: on all ranks.
    """
    current = world.current("check_overflow")
    bad = torch.zeros((), dtype=torch.int32, device=current.device)
    for grad in _gradients(param_groups):
        bad += ~torch.isfinite(grad).all()
    collectives.all_reduce_(bad, "max", current.mesh.world)
    if bad.item():
        raise OverflowError("Gradient overflow")


@torch.no_grad()
def grad_rescale(param_groups: Iterable[dict[str, Any]], scale: float) -> None:
    """Divide all gradients by `scale`, in place.

    Raises:
        ConfigurationError: for a scale of 0.
    """
    if scale == 0:
        raise ConfigurationError(
            "grad_rescale got scale=0: expected the loss scale, which is above 0."
        )
    for grad in _gradients(param_groups):
        grad.div_(scale)


def _gradients(param_groups: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    return [
        param.grad for group in param_groups for param in group["params"] if param.grad is not None
    ]


__all__ = ["OptimManager", "check_overflow", "grad_rescale"]
