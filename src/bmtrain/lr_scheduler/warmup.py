"""The base of all schedules: it counts iterations, warms up, and writes the learning rate into an
optimizer.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch

from bmtrain.errors import ConfigurationError


class WarmupLRScheduler(abc.ABC):
    """Learning rate `get_lr_warmup(n)` for the first `warmup_iter` iterations, `get_lr_decay(n)`
    from then on.

    The learning rate is written into every parameter group at construction and at every `step`, so
    the first optimizer step of a new run is taken at iteration `num_iter` = 0.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        start_lr: the highest learning rate, reached at the end of the warm-up; 0 or more.
        warmup_iter: length of the warm-up in iterations; 0 means none.
        end_iter: iteration at which the decay ends; of no effect, whatever it is, where the decay
            has no end.
        num_iter: iteration to start from.

    Raises:
        ConfigurationError: a negative number, or an end that the decay cannot have.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: int,
        end_iter: int | None,
        num_iter: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        self.num_iter = num_iter
        self._check()
        self.step(num_iter)

    def get_lr_warmup(self, num_iter: int) -> float:
        """Learning rate at iteration `num_iter` < `warmup_iter`: linear from 0."""
        return self.start_lr * num_iter / self.warmup_iter

    @abc.abstractmethod
    def get_lr_decay(self, num_iter: int) -> float:
        """Learning rate at iteration `num_iter` >= `warmup_iter`."""

    def get_lr(self) -> float:
        """Learning rate at the present iteration."""
        if self.num_iter < self.warmup_iter:
            return self.get_lr_warmup(self.num_iter)
        return self.get_lr_decay(self.num_iter)

    @property
    def current_lr(self) -> float:
        """The learning rate that the last `step` wrote into the optimizer."""
        return self.get_lr()

    def step(self, num_iter: int | None = None) -> None:
        """Go to iteration `num_iter`, or to the next one, and write its learning rate into every
        parameter group.
        """
        target = self.num_iter + 1 if num_iter is None else num_iter
        _check_at_least("num_iter", target, 0, "iterations are counted from 0")
        self.num_iter = target
        lr = self.get_lr()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # a compiled or captured optimizer reads this very tensor
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """The schedule as plain numbers; with them `load_state_dict` continues it in another
        process.
        """
        return {
            "start_lr": self.start_lr,
            "warmup_iter": self.warmup_iter,
            "end_iter": self.end_iter,
            "num_iter": self.num_iter,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a saved schedule whole, and write its learning rate into the optimizer.

        Raises:
            ConfigurationError: a key is missing, or a value is one that the constructor would
                refuse.
        """
        missing = [
            key
            for key in ("start_lr", "warmup_iter", "end_iter", "num_iter")
            if key not in state_dict
        ]
        if missing:
            raise ConfigurationError(
                f"state_dict of {type(self).__name__}: got the keys "
                f"{sorted(state_dict)}, expected also {missing}; "
                "pass what state_dict() of a learning-rate scheduler returned."
            )
        self.start_lr = state_dict["start_lr"]
        self.warmup_iter = state_dict["warmup_iter"]
        self.end_iter = state_dict["end_iter"]
        self.num_iter = state_dict["num_iter"]
        self._check()
        self.step(self.num_iter)

    def _check(self) -> None:
        """Refuse numbers that make no schedule; decays that need more say so in their own
        `_check`.
        """
        _check_at_least(
            "start_lr",
            self.start_lr,
            0,
            "a learning rate is not negative; maximize=True turns the sign",
        )
        _check_at_least("warmup_iter", self.warmup_iter, 0, "0 means no warm-up")
        _check_at_least("num_iter", self.num_iter, 0, "iterations are counted from 0")


def _check_at_least(name: str, got: float, least: float, remedy: str) -> None:
    if not got >= least:  # written so that NaN is refused too
        raise ConfigurationError(f"{name}: got {got}, expected {least} or more; {remedy}.")
