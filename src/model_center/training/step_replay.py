"""The batches of the current step, kept so that the program can compute it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.runtime.seeding import random_states, set_random_states
from bmtrain.torch_internals import tree_map
from model_center.dataset.loader import DistributedDataLoader
from model_center.training.batches import grouped

Losses = Iterable[torch.Tensor]
Recomputation = Callable[[Losses], float]


class StepReplayBuffer:
    """Yields the micro-batches of each step, and the same ones again after `recompute`.

    The program's loop then repeats the step with equal batches and random states, so that losses,
    gradients and modules can be inspected.

    Args:
        loader: of the training data.
        size: micro-batches of a step.
    """

    def __init__(self, loader: DistributedDataLoader, size: int) -> None:
        self._loader, self._size = loader, size
        self._batches: list[Any] | None = None
        self._recomputation: Recomputation | None = None
        self._is_moved, self._epoch = False, 0
        self._position: tuple[int, int] | None = None

    @property
    def has_batches(self) -> bool:
        """Whether the program took its batches from here, so that they can be handed out again."""
        return self._batches is not None

    @property
    def is_recomputed(self) -> bool:
        """Whether the step will be handed out again."""
        return self._recomputation is not None

    def steps(self) -> Iterator[list[Any]]:
        """The micro-batches of each step that is left of a pass."""
        self._is_moved = True
        while self._is_moved:
            self._is_moved = False
            yield from self._pass()
        self._batches = None

    def _pass(self) -> Iterator[list[Any]]:
        batches = iter(self._loader)
        self._epoch = self._loader.epoch
        for group in grouped(self._placed(batches), self._size):
            states = random_states(bmt.device())
            self._batches = _copies(group)
            yield group
            while self._recomputation is not None:
                recomputation = self._recomputation
                set_random_states(states, bmt.device())
                yield _copies(self._batches)
                if self._recomputation is recomputation:  # the program did not compute it again
                    self._recomputation = None
            self._position = self._batches = None
            if self._is_moved:
                return

    def _placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; remembers where the loader was before the first of a step."""
        while True:
            self._position = self._position or self._loader.position
            try:
                yield next(batches)
            except StopIteration:
                return

    def recompute(self, recomputation: Recomputation) -> None:
        """Hand out the step once more; its losses go to `recomputation`."""
        self._recomputation = recomputation

    def take_recomputation(self) -> Recomputation | None:
        """What the losses of a step that is handed out again are for; None for a new step."""
        recomputation, self._recomputation = self._recomputation, None
        return recomputation

    def loader_moved(self) -> None:
        """Go on with this pass from where the loader is now, unless it is over."""
        self._is_moved = self._loader.epoch == self._epoch

    def rows(self) -> list[list[int]] | None:
        """The row numbers of this rank's micro-batches in the data set; None if nobody knows."""
        return None if self._position is None else self._loader.rows_since(self._position)


def _copies(batches: list[Any]) -> list[Any]:
    """The same tensors in containers of their own, which a program may change."""
    copies: list[Any] = tree_map(lambda leaf: leaf, batches)
    return copies
