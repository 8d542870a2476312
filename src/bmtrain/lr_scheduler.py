"""Learning rate schedules by iteration: a linear warm-up, then the decay of the class.

A decay is one formula: s = start_lr, w = warmup_iter, e = end_iter, n = the iteration.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.runtime.arguments import AMOUNT, NUMBER, check

__all__ = ["WarmupLRScheduler", "Noam", "NoDecay", "Linear", "Cosine", "Exponential"]

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


class Noam(WarmupLRScheduler):
    """Warm-up `s n / w**1.5`, then `s / sqrt(n)`.

    The highest learning rate is `s / sqrt(w)`. `end_iter` has no effect and may be None.

    Source: Vaswani et al., "Attention is all you need" (2017), section 5.3.
    """

    def get_lr_warmup(self, num_iter: int) -> float:
        """`s n / w**1.5` at the iteration n = `num_iter`."""
        return self.start_lr * num_iter / self.warmup_iter**1.5

    def get_lr_decay(self, num_iter: int) -> float:
        """`s / sqrt(n)` at n = `num_iter`; `s` at 0, which occurs only without a warm-up."""
        return self.start_lr / math.sqrt(max(num_iter, 1))


class NoDecay(WarmupLRScheduler):
    """Warm-up `s n / w`, then `s`. `end_iter` has no effect and may be None."""

    def get_lr_decay(self, num_iter: int) -> float:
        """`s` at every `num_iter`."""
        return self.start_lr


class _EndingScheduler(WarmupLRScheduler):
    """A decay from iteration w to e; requires e > w."""

    def _progress(self, num_iter: int) -> float:
        """`(n - w) / (e - w)`: 0 at the end of the warm-up, 1 at `end_iter`."""
        end = self.end_iter or 0  # `_check` has refused None
        return (num_iter - self.warmup_iter) / (end - self.warmup_iter)

    def _check(self) -> None:
        super()._check()
        end = self.end_iter
        if end is None or not NUMBER.holds(end) or end <= self.warmup_iter:
            raise ConfigurationError(
                f"end_iter of {type(self).__name__}: got {self.end_iter!r}, expected more than "
                f"warmup_iter={self.warmup_iter}; give the iteration at which the decay ends, or "
                "take NoDecay or Noam, which have no end."
            )


class Linear(_EndingScheduler):
    """Warm-up `s n / w`, then `s (e - n) / (e - w)`, then 0 from `end_iter` on."""

    def get_lr_decay(self, num_iter: int) -> float:
        """`max(0, s (e - n) / (e - w))` at n = `num_iter`."""
        return max(0.0, self.start_lr * (1 - self._progress(num_iter)))


class Cosine(_EndingScheduler):
    """Warm-up `s n / w`, then `s (1 + cos(pi (n - w) / (e - w))) / 2`.

    After `end_iter` the cosine rises again, as in BMTrain and in torch's `CosineAnnealingLR`.

    Source: Loshchilov and Hutter, "SGDR" (2017), eq. 5.
    """

    def get_lr_decay(self, num_iter: int) -> float:
        """`s (1 + cos(pi (n - w) / (e - w))) / 2` at n = `num_iter`."""
        return self.start_lr * (1 + math.cos(math.pi * self._progress(num_iter))) / 2


class Exponential(WarmupLRScheduler):
    """Warm-up `s n / w`, then `s gamma**(n - w)`. `end_iter` has no effect and may be None.

    Args:
        optimizer, start_lr, warmup_iter, num_iter: as for `WarmupLRScheduler`.
        end_iter: not used.
        gamma: the factor per iteration; 0 or more. States of BMTrain lack it: it is then kept.
    """

    _more = ("gamma",)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: int,
        end_iter: int | None,
        num_iter: int = 0,
        gamma: float = 0.95,
    ) -> None:
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        """`s gamma**(n - w)` at n = `num_iter`."""
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)

    def _check(self) -> None:
        super()._check()
        check(type(self).__name__, gamma=(self.gamma, AMOUNT))
