"""Steps of optimizers, torch's too: all ranks take the same, and none with gradients that nobody has summed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.replicated import Replicated
from bmtrain.shard.slices import Slices


class Steps:
    """Watches the steps of all optimizers of this process, for as long as it is alive.

    Args:
        ledger: gets a note of each step: ranks that do not all take one have different parameters from then on.
        axis: of all ranks.
        replicated: the ordinary parameters whose gradients are summed over ranks.
    """

    def __init__(self, ledger: Ledger, axis: Axis, replicated: Replicated) -> None:
        self._ledger, self._axis, self._replicated = ledger, axis, replicated
        own = weakref.ref(self)  # torch keeps the hook for ever: it must not keep the run

        def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            steps = own()
            if steps is not None and axis.size > 1 and world.is_initialized() and world.current().mesh.world is axis:
                steps.begin(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(begin).remove)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is about to be taken.

        Raises:
            ParameterError: if beside sharded parameters the optimizer has ordinary ones that every rank would train by itself.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(isinstance(param, Slices) for param in params):
            return
        self._ledger.note(self._axis, f"a step of {type(optimizer).__name__}")
        known = {id(param) for param in self._replicated}
        for param in params:
            if not isinstance(param, Slices) and param.requires_grad and id(param) not in known:
                raise ParameterError(
                    f"{type(optimizer).__name__} has an ordinary parameter of shape {tuple(param.shape)} beside sharded ones; its "
                    "gradient is that of this rank's rows alone. Give the optimizer to an OptimManager (add_optimizer) before the "
                    "first backward pass: it sums such gradients over ranks. Or wrap the whole model (bmtrain.BMTrainModelWrapper)."
                )
