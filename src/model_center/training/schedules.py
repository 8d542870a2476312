"""Learning-rate schedules of the programs: BMTrain's, and those that end at a rate of their own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

import bmtrain as bmt
from model_center.errors import ConfigError

Shape = Callable[[float], float]


class Falling(bmt.lr_scheduler.WarmupLRScheduler):
    """Warm-up to `start_lr`, which holds until the fall; then down to `least`, which it stays at.

    Args:
        optimizer, start_lr, warmup_iter, end_iter, num_iter: as of every schedule.
        shape: maps how much of the fall is done, 0 to 1, to the share of it that is left, 1 to 0.
        length: iterations of the fall, which ends at `end_iter`; None is all after the warm-up.
        least: the last learning rate.

    Raises:
        ConfigError: for a fall that begins before the warm-up is over, or has no iterations; for a
            last rate above the first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: int,
        end_iter: int,
        num_iter: int = 0,
        *,
        shape: Shape,
        length: int | None = None,
        least: float = 0.0,
    ) -> None:
        self.shape, self.least = shape, least
        self.length = end_iter - warmup_iter if length is None else length
        if not 0 < self.length <= end_iter - warmup_iter:
            raise ConfigError(
                f"the schedule warms up for {warmup_iter} steps and decays for {self.length}, but "
                f"ends at step {end_iter}: expected at least one step of decay, and both to fit."
            )
        if least > start_lr:
            raise ConfigError(
                f"the learning rate falls from {start_lr} to {least}: give --lr-end at most --lr."
            )
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        """`least + (start_lr - least) * shape(done)`."""
        begin = (self.end_iter or 0) - self.length
        done = min(max(num_iter - begin, 0) / self.length, 1.0)
        return self.least + (self.start_lr - self.least) * self.shape(done)


def linear(done: float) -> float:
    """A straight line."""
    return 1 - done


def cosine(done: float) -> float:
    """Half a wave (Loshchilov and Hutter, "SGDR", 2017, eq. 5)."""
    return (1 + math.cos(math.pi * done)) / 2


def schedule(style: str, *, least: float = 0.0, fall: int | None = None) -> Callable[..., Any]:
    """The schedule of a `--lr-decay-style`, called as BMTrain's are.

    "wsd" is warm-up, stable, decay (Hu et al., "MiniCPM", 2024) with a linear decay.

    Args:
        style: its name.
        least: the last learning rate of linear, cosine and wsd.
        fall: iterations of the decay of wsd.
    """
    falling = functools.partial(Falling, least=least)
    styles: dict[str, Callable[..., Any]] = {
        "constant": bmt.lr_scheduler.NoDecay,
        "linear": functools.partial(falling, shape=linear),
        "cosine": functools.partial(falling, shape=cosine),
        "wsd": functools.partial(falling, shape=linear, length=fall),
        "exponential": bmt.lr_scheduler.Exponential,
        "noam": bmt.lr_scheduler.Noam,
    }
    return styles[style]
