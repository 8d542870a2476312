"""Accuracy and F1 of class predictions, counted over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model_center.errors import DataError
from model_center.metrics.ranks import summed

Classes = torch.Tensor | Sequence[int]


class Confusion:
    """How often each class was predicted for each class.

    `update` counts this rank's rows, `counts` is collective and may be called any number of times.
    """

    def __init__(self, num_classes: int) -> None:
        """Nothing counted yet, of classes 0 to `num_classes` - 1."""
        self.num_classes = num_classes
        self._own = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    def update(self, predictions: Classes, labels: Classes) -> None:
        """Count rows.

        Args:
            predictions: (rows,), the predicted classes, integers.
            labels: (rows,), the true ones.

        Raises:
            DataError: for different numbers of them, and for classes that there are not.
        """
        predicted, true = as_classes(predictions), as_classes(labels)
        if len(predicted) != len(true):
            raise DataError(
                f"got {len(predicted)} predictions and {len(true)} labels: expected equally many."
            )
        both = torch.cat([predicted, true])
        if len(both) and not 0 <= int(both.min()) <= int(both.max()) < self.num_classes:
            raise DataError(
                f"got classes from {both.min()} to {both.max()}: expected 0 to "
                f"{self.num_classes - 1}."
            )
        cells = torch.bincount(true * self.num_classes + predicted, minlength=self.num_classes**2)
        self._own += cells.view(self.num_classes, self.num_classes)

    def counts(self) -> torch.Tensor:
        """int64 (true classes, predicted classes), over all ranks. Collective.

        Raises:
            DataError: if no rank has counted a row.
        """
        counts = summed(self._own)
        if not counts.any():
            raise DataError("no rows were counted on any rank: call update() before compute().")
        return counts


class Accuracy(Confusion):
    """The fraction of rows whose class was predicted, of classes 0 to `num_classes` - 1."""

    def compute(self) -> float:
        """In [0, 1], over the rows of all ranks. Collective."""
        counts = self.counts()
        return int(counts.trace()) / int(counts.sum())


class MacroF1(Confusion):
    """The mean over classes of F1, the harmonic mean of precision and recall.

    Of classes 0 to `num_classes` - 1, those that never occur do not count.
    """

    def compute(self) -> float:
        """In [0, 1], over the rows of all ranks. Collective."""
        counts = self.counts()
        occur = (counts.sum(0) + counts.sum(1)) > 0
        return float(f1_of_classes(counts)[occur].mean())


class BinaryF1(Confusion):
    """F1 of class 1 of two: 0 where it was neither predicted nor true."""

    def __init__(self) -> None:
        """Nothing counted yet."""
        super().__init__(2)

    def compute(self) -> float:
        """In [0, 1], over the rows of all ranks. Collective."""
        return float(f1_of_classes(self.counts())[1])


def f1_of_classes(counts: torch.Tensor) -> torch.Tensor:
    """float64 (classes,): F1, from counts (true, predicted classes); 0 for absent classes."""
    occurrences = counts.sum(0) + counts.sum(1)
    return 2 * counts.diagonal().double() / occurrences.clamp(min=1)


def as_classes(values: Classes) -> torch.Tensor:
    """int64 (rows,) on the CPU.

    Raises:
        DataError: for scores in place of classes.
    """
    given = torch.as_tensor(values)
    if given.is_floating_point() and given.numel():  # an empty list is a tensor of floats
        raise DataError(
            f"got {given.dtype} of shape {tuple(given.shape)} as classes: expected "
            "integers; of scores, take argmax(-1)."
        )
    return given.detach().cpu().to(torch.int64).reshape(-1)
