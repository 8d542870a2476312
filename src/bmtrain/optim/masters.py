"""Master weights: fp32 copies that follow weights written by others, say by a checkpoint."""

from __future__ import annotations

import torch

from bmtrain.optim.host_memory import zeros


def masters_of(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Copies (n,) of weights on a device, or in host memory."""
    return zeros(values.numel(), dtype, device, values.device).copy_(values)


def follow_weights(master: torch.Tensor, values: torch.Tensor) -> None:
    """Update masters (n,) from weights (n,) of fewer bits or on another device.

    Weights equal to the rounded master are the optimizer's own: the master, which has more bits,
    stays.
    """
    values = values.to(master.device)
    master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(master.dtype)))
