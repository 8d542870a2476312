"""Scores of questions of several rows, on any ranks: MultiRC and ReCoRD."""

from __future__ import annotations

import torch

from model_center.errors import DataError
from model_center.metrics.classification import Classes, as_classes
from model_center.metrics.ranks import gathered


class GroupExactMatch:
    """The fraction of groups all of whose rows were predicted right (MultiRC's exact match)."""

    def __init__(self) -> None:
        """No rows yet."""
        self._rows: list[torch.Tensor] = []

    def update(self, groups: Classes, predictions: Classes, labels: Classes) -> None:
        """Add rows.

        Args:
            groups: (rows,), the number of each row's question.
            predictions: (rows,), the predicted classes, integers.
            labels: (rows,), the true ones.

        Raises:
            DataError: for different numbers of them.
        """
        columns = [as_classes(groups), as_classes(predictions), as_classes(labels)]
        _check_lengths(columns)
        self._rows.append(torch.stack([columns[0], (columns[1] == columns[2]).long()], dim=1))

    def compute(self) -> float:
        """In [0, 1], over the groups of all ranks. Collective.

        Raises:
            DataError: if no rank has any rows.
        """
        groups, right = gathered(
            torch.cat([torch.zeros(0, 2, dtype=torch.int64), *self._rows])
        ).unbind(1)
        _check_any(groups)
        numbers = groups.unique(return_inverse=True)[1]
        wrong = torch.bincount(numbers, weights=(1 - right).double())
        return float((wrong == 0).double().mean())


class BestOfGroup:
    """The row of each group with the highest score; the first one of equals.

    For ReCoRD these are the entities that fit best. `dataset.examples[row]` has the entity's text
    and the right answers, which `AnswerScore` compares: given the same questions on every rank, it
    gives what one rank would.
    """

    def __init__(self) -> None:
        """No rows yet."""
        self._numbers: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def update(self, groups: Classes, rows: Classes, scores: torch.Tensor) -> None:
        """Add rows.

        Args:
            groups: (rows,), the number of each row's question.
            rows: (rows,), the number of each row, an item's `idx`.
            scores: (rows,), of any floating dtype.

        Raises:
            DataError: for different numbers of them.
        """
        columns = [as_classes(groups), as_classes(rows), scores.detach().cpu().double().reshape(-1)]
        _check_lengths(columns)
        self._numbers.append(torch.stack(columns[:2], dim=1))
        self._scores.append(columns[2])

    def compute(self) -> dict[int, int]:
        """Group to number of its best row, the same on every rank. Collective.

        Raises:
            DataError: if no rank has any rows.
        """
        numbers = gathered(torch.cat([torch.zeros(0, 2, dtype=torch.int64), *self._numbers]))
        scores = gathered(torch.cat([torch.zeros(0, dtype=torch.float64), *self._scores]))
        _check_any(numbers)
        best: dict[int, tuple[float, int]] = {}
        for (group, row), score in zip(numbers.tolist(), scores.tolist(), strict=True):
            best[group] = max(best.get(group, (score, -row)), (score, -row))
        return {group: -row for group, (_, row) in sorted(best.items())}


def _check_lengths(columns: list[torch.Tensor]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise DataError(
            f"got columns of {', '.join(str(len(column)) for column in columns)} rows: "
            "expected equally many."
        )


def _check_any(rows: torch.Tensor) -> None:
    if not len(rows):
        raise DataError("no rows were added on any rank: call update() before compute().")
