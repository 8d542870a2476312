"""What a step calls: the same few methods in one plain process and on ranks.

They note the gradients that a step was taken with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bmtrain.optim.manager import OptimManager


class Trainer:
    """An optimizer and what a training step does with it.

    Args:
        model: what is trained.
        optimizer: of its parameters.
        before_step: called before each step of the optimizer, when gradients are complete.
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
        """Run backward; `reduce_gradients=False` leaves the sum over ranks to a later call."""
        loss.backward()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of the optimizer's parameters down to `max_norm`; the norm that they
        had, 0-dim.
        """
        norm = self._clip(max_norm)
        self._noted(norm)
        return norm

    def step(self) -> None:
        """Update all parameters."""
        self._before_step()
        self._step()

    def state(self) -> dict[int, dict[str, torch.Tensor]]:
        """The optimizer's state by parameter number, whole tensors. Collective."""
        state: dict[int, dict[str, torch.Tensor]] = self.optimizer.state_dict()["state"]
        return state

    def _clip(self, max_norm: float) -> torch.Tensor:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    def _step(self) -> None:
        self.optimizer.step()


class ShardedTrainer(Trainer):
    """The same on ranks, by an OptimManager."""

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
        """Clear all gradients, those too that wait for their sum."""
        self.manager.zero_grad()

    def backward(self, loss: torch.Tensor, *, reduce_gradients: bool = True) -> None:
        """Run backward; gradients become means over ranks."""
        self.manager.backward(loss, reduce_gradients=reduce_gradients)

    def state(self) -> dict[int, dict[str, torch.Tensor]]:
        """Gathered."""
        state: dict[int, dict[str, torch.Tensor]] = self.manager.state_dict(gather_opt=True)[
            "optimizers"
        ][0]["state"]
        return state

    def _clip(self, max_norm: float) -> torch.Tensor:
        return self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm)

    def _step(self) -> None:
        self.manager.step()
