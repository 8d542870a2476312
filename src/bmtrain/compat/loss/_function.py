"""`bmtrain.loss._function`: `has_inf_nan`. The loss kernels are in kernels/cross_entropy.py."""

from __future__ import annotations

import torch

from bmtrain.compat.removed import removed
from bmtrain.errors import ConfigurationError

_REMEDY = "bmtrain.loss.FusedCrossEntropy computes the loss and its gradient."
cross_entropy_forward = removed("bmtrain.loss._function.cross_entropy_forward", _REMEDY)
cross_entropy_backward_inplace = removed(
    "bmtrain.loss._function.cross_entropy_backward_inplace", _REMEDY
)
fused_sumexp = removed("bmtrain.loss._function.fused_sumexp", _REMEDY)
fused_softmax_inplace = removed("bmtrain.loss._function.fused_softmax_inplace", _REMEDY)


def has_inf_nan(g_half: torch.Tensor, out: torch.Tensor) -> None:
    """Set `out` to 1 if any element of `g_half` is infinite or NaN.

    An `out` that is 1 already stays 1. There is no synchronisation with the device.

    Args:
        g_half: any shape and floating dtype.
        out: uint8, one element.

    Raises:
        ConfigurationError: for an `out` of another dtype or size, or a `g_half` that is not
            floating point.
    """
    if out.dtype != torch.uint8 or out.numel() != 1:
        raise ConfigurationError(
            f"has_inf_nan got out of {out.dtype} with {out.numel()} elements: expected one "
            "of torch.uint8."
        )
    if not g_half.is_floating_point():
        raise ConfigurationError(
            f"has_inf_nan got {g_half.dtype}: expected a floating point tensor."
        )
    bad = ~torch.isfinite(g_half.detach()).all()
    out.bitwise_or_(bad.to(out))


__all__ = [
    "cross_entropy_backward_inplace",
    "cross_entropy_forward",
    "fused_softmax_inplace",
    "fused_sumexp",
    "has_inf_nan",
]
