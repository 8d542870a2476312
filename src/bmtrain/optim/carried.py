"""The loss scale that gradients carry, which a program may keep over a step that changes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmtrain.kernels.scale import scale_
from bmtrain.optim.gradients import Gradients
from bmtrain.optim.runs import contiguous_runs
from bmtrain.shard.engine import Engine


class CarriedScale:
    """The loss scale that the gradients of some parameters carry.

    A step may change the scale, and one of torch's optimizers divides by it first. What is kept
    over a step, because the program does not clear it, would be added to gradients of another
    scale, or clipped and applied by another.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def become(self, value: float, params: Sequence[torch.nn.Parameter], engine: Engine) -> None:
        """Multiply the gradients that are there, so that they carry this scale.

        Exact if the ratio of the scales is a power of two, as it is by default.
        """
        if value == self.value:
            return
        ratio, self.value = value / self.value, value
        if engine.backward.has_deferred:
            engine.backward.flush()
        factor = torch.full((), ratio, dtype=torch.float64, device=engine.device)
        for parts in Gradients(contiguous_runs(params)).look():
            scale_(parts.batch, factor)
