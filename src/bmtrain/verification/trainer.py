"""Trainer: the methods that a training step calls, the same in one plain process and on ranks.

They also record the gradients and gradient norms of the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bmtrain.optim.manager import OptimManager


class Trainer:
    """The operations of a training step on an optimizer.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters.
        before_step: called before each optimizer step, when gradients are complete.
        noted: called with each gradient norm.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        before_step: Callable[[], None],
        noted: Callable[[torch.Tensor], None],
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._before_step, self._noted = before_step, noted

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *, reduce_gradients: bool = True) -> None:
        """Run backward; `reduce_gradients=False` defers the sum over ranks to a later call."""
        loss.backward()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to `max_norm`; returns their norm before clipping, 0-dim."""
        norm = self._clip(max_norm)
        self._noted(norm)
        return norm

    def step(self) -> None:
        """Update all parameters."""
        self._before_step()
        self._step()

    def state(self) -> dict[int, dict[str, torch.Tensor]]:
        """The optimizer's state as full tensors, by parameter index. Collective."""
        state: dict[int, dict[str, torch.Tensor]] = self.optimizer.state_dict()["state"]
        return state

    def _clip(self, max_norm: float) -> torch.Tensor:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    def _step(self) -> None:
        self.optimizer.step()


class ShardedTrainer(Trainer):
    """A Trainer on ranks, through an OptimManager."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        before_step: Callable[[], None],
        noted: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__(model, optimizer, before_step, noted)
        self.manager = OptimManager()
        self.manager.add_optimizer(optimizer)

    def zero_grad(self) -> None:
        """Clear all gradients, those not yet reduced included."""
        self.manager.zero_grad()

    def backward(self, loss: torch.Tensor, *, reduce_gradients: bool = True) -> None:
        """Run backward; the gradients are averaged over ranks."""
        self.manager.backward(loss, reduce_gradients=reduce_gradients)

    def state(self) -> dict[int, dict[str, torch.Tensor]]:
        """The optimizer's state, gathered from all ranks, by parameter index. Collective."""
        state: dict[int, dict[str, torch.Tensor]] = self.manager.state_dict(gather_opt=True)[
            "optimizers"
        ][0]["state"]
        return state

    def _clip(self, max_norm: float) -> torch.Tensor:
        return self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm)

    def _step(self) -> None:
        self.manager.step()
