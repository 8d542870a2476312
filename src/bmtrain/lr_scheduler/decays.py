"""The decays, one formula each: s = start_lr, w = warmup_iter, e = end_iter, n = the iteration."""

from __future__ import annotations

import math

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.lr_scheduler.warmup import WarmupLRScheduler
from bmtrain.runtime.arguments import AMOUNT, NUMBER, check


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
