"""Master weights: fp32 copies that follow weights written by others, say by a checkpoint."""

from __future__ import annotations

import torch


def follow_weights(master: torch.Tensor, values: torch.Tensor) -> None:
    """Update masters (n,) from weights (n,) of fewer bits or on another device.

    Weights equal to the rounded master are the optimizer's own: the master, which has more bits,
    stays.
    """
    values = values.to(master.device)
    master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(master.dtype)))
