"""Exact match and F1 of answers that are texts, as SQuAD (Rajpurkar et al. 2016) defines them."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Iterable, Sequence

import torch

from model_center.errors import DataError
from model_center.metrics.ranks import summed

ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerScore:
    """Exact match and F1, the best over a question's answers, averaged over all ranks."""

    def __init__(self) -> None:
        """No questions yet."""
        # sum of exact matches, sum of F1, questions
        self._own = torch.zeros(3, dtype=torch.float64)

    def update(self, predictions: Sequence[str], answers: Sequence[Iterable[str]]) -> None:
        """Add questions: `predictions`, a text for each, and `answers`, the right ones of each.

        Raises:
            DataError: for different numbers of them, and for a question without an answer.
        """
        if len(predictions) != len(answers):
            raise DataError(
                f"got {len(predictions)} predictions and answers to {len(answers)} "
                "questions: expected equally many."
            )
        for prediction, right in zip(predictions, map(list, answers), strict=True):
            if not right:
                raise DataError(
                    f"there is no answer to score {prediction!r} by: expected at least one."
                )
            exact = max(float(exact_match(prediction, answer)) for answer in right)
            self._own += torch.tensor(
                [exact, max(token_f1(prediction, answer) for answer in right), 1.0],
                dtype=torch.float64,
            )

    def compute(self) -> tuple[float, float]:
        """(exact match, F1), each in [0, 1], over all ranks. Collective.

        Raises:
            DataError: if no rank has any questions.
        """
        exact, f1, questions = summed(self._own).tolist()
        if not questions:
            raise DataError("no questions were added on any rank: call update() before compute().")
        return exact / questions, f1 / questions


def normalized(text: str) -> str:
    """`text` in lower case, without punctuation and articles, single blanks between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> bool:
    """Whether `prediction` and `answer` are the same when normalised."""
    return normalized(prediction) == normalized(answer)


def token_f1(prediction: str, answer: str) -> float:
    """F1 of the normalised words of `prediction` and `answer`, with repetitions, in [0, 1]."""
    predicted, right = normalized(prediction).split(), normalized(answer).split()
    if not predicted or not right:
        return float(predicted == right)
    common = sum((collections.Counter(predicted) & collections.Counter(right)).values())
    return 2 * common / (len(predicted) + len(right))
