"""The base of all schedules: counts iterations, warms up, writes the optimizer's learning rate."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.runtime.arguments import AMOUNT, NUMBER, check

_KEYS = ("start_lr", "warmup_iter", "end_iter", "num_iter")


class WarmupLRScheduler(abc.ABC):
    """Schedule of `get_lr_warmup(n)` for `warmup_iter` iterations, then `get_lr_decay(n)`.

    The learning rate is written into every parameter group at construction and at every `step`, so
    the first optimizer step of a new run is taken at iteration `num_iter` = 0.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        start_lr: the highest learning rate, reached at the end of the warm-up (but see `Noam`); 0
            or more.
        warmup_iter: the length of the warm-up in iterations; 0 for none.
        end_iter: the iteration at which the decay ends; ignored by decays without an end.
        num_iter: the iteration to start from.

    Raises:
        ConfigurationError: for a negative number or an end that the decay cannot have.
    """

    #: attributes that a state has beside _KEYS
    _more: tuple[str, ...] = ()

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
        """Learning rate at the current iteration."""
        if self.num_iter < self.warmup_iter:
            return self.get_lr_warmup(self.num_iter)
        return self.get_lr_decay(self.num_iter)

    @property
    def current_lr(self) -> float:
        """Learning rate at the current iteration, which the last `step` wrote to the optimizer."""
        return self.get_lr()

    def step(self, num_iter: int | None = None) -> None:
        """Go to the next iteration, or to `num_iter`, and write its rate to all parameter groups.

        Raises:
            ConfigurationError: for a negative `num_iter`, or a rate that is not finite; nothing is
                changed.
        """
        before, target = self.num_iter, self.num_iter + 1 if num_iter is None else num_iter
        check(type(self).__name__, num_iter=(target, AMOUNT))
        self.num_iter = target
        try:
            lr = self.get_lr()
        except OverflowError:
            lr = math.inf
        if not NUMBER.holds(lr):
            self.num_iter = before
            check(f"{type(self).__name__} at iteration {target}", lr=(lr, NUMBER))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # compiled code and CUDA graphs keep reading this tensor
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """The schedule as plain numbers, from which `load_state_dict` resumes it."""
        return {key: vars(self)[key] for key in (*_KEYS, *self._more)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a complete saved schedule and write its learning rate to the optimizer.

        Args:
            state_dict: what `state_dict` of this class has returned, or BMTrain's.

        Raises:
            ConfigurationError: for a missing key, or a value that the constructor would refuse. The
                schedule is then as it was.
        """
        missing = [key for key in _KEYS if key not in state_dict]
        if missing:
            raise ConfigurationError(
                f"state_dict of {type(self).__name__}: got the keys {sorted(state_dict)}, expected "
                f"also {missing}; pass what state_dict() of a learning-rate scheduler returned."
            )
        before = dict(vars(self))
        known = (*_KEYS, *self._more)
        vars(self).update({key: state_dict[key] for key in known if key in state_dict})
        try:
            self._check()
        except ConfigurationError:
            vars(self).update(before)
            raise
        self.step(self.num_iter)

    def _check(self) -> None:
        """Check the arguments; decays with further conditions override this."""
        check(
            type(self).__name__,
            start_lr=(self.start_lr, AMOUNT),
            warmup_iter=(self.warmup_iter, AMOUNT),
            num_iter=(self.num_iter, AMOUNT),
        )
