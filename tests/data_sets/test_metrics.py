"""Metrics at one, two and three ranks, against plain Python over all rows."""

from __future__ import annotations

import collections
import pathlib
import random

import pytest
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.dataset import t5dataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import DataError
from model_center.metrics import (
    Accuracy,
    AnswerScore,
    BestOfGroup,
    BinaryF1,
    GroupExactMatch,
    MacroF1,
    exact_match,
    normalized,
    token_f1,
)
from model_center.tokenizer import T5Tokenizer

DATA = pathlib.Path(__file__).parents[1] / "data"
T5 = T5Tokenizer.from_pretrained(DATA / "tokenizers" / "t5")
RNG = random.Random(0)
ROWS = 37
LABELS = [RNG.choice([0, 0, 0, 1, 3]) for _ in range(ROWS)]  # class 2 never occurs
PREDICTIONS = [label if RNG.random() < 0.6 else RNG.choice([0, 1, 3]) for label in LABELS]
GROUPS = [RNG.randrange(12) * 7 for _ in range(ROWS)]
SCORES = [RNG.choice([0.1, 0.2, 0.7, 0.7, -3.0]) for _ in range(ROWS)]
WORDS = ["the old harbour", "Harbour!", "a  market", "river Ald", "", "the"]
TEXTS = [
    (RNG.choice(WORDS), {RNG.choice(WORDS) for _ in range(RNG.randint(1, 3))}) for _ in range(ROWS)
]


def plain_f1(label: int, predictions: list[int], labels: list[int]) -> float:
    """From precision and recall, in words."""
    hits = sum(p == t == label for p, t in zip(predictions, labels, strict=True))
    if not hits:
        return 0.0
    precision, recall = hits / predictions.count(label), hits / labels.count(label)
    return 2 * precision * recall / (precision + recall)


def plain_results() -> dict[str, object]:
    """Every metric over all rows, without any of ours."""
    right_of: dict[int, list[bool]] = collections.defaultdict(list)
    best: dict[int, int] = {}
    for row, group in enumerate(GROUPS):
        right_of[group].append(PREDICTIONS[row] == LABELS[row])
        if group not in best or SCORES[row] > SCORES[best[group]]:
            best[group] = row
    ones = [[int(value == 1) for value in values] for values in (PREDICTIONS, LABELS)]
    return {
        "accuracy": sum(p == t for p, t in zip(PREDICTIONS, LABELS, strict=True)) / ROWS,
        "macro": sum(plain_f1(label, PREDICTIONS, LABELS) for label in (0, 1, 3)) / 3,
        "binary": plain_f1(1, *ones),
        "groups": sum(all(right) for right in right_of.values()) / len(right_of),
        "best": best,
        "exact": sum(
            max(exact_match(text, answer) for answer in answers) for text, answers in TEXTS
        )
        / ROWS,
        "f1": sum(max(token_f1(text, answer) for answer in answers) for text, answers in TEXTS)
        / ROWS,
    }


def measured() -> dict[str, object]:
    """The same of our metrics, each rank given its rows in pieces, the last rank none when there
    are three.
    """
    readers = min(2, bmt.world_size())
    own = list(range(bmt.rank(), ROWS, readers)) if bmt.rank() < readers else []
    accuracy, macro, binary, groups, best, answers = (
        Accuracy(4),
        MacroF1(4),
        BinaryF1(),
        GroupExactMatch(),
        BestOfGroup(),
        AnswerScore(),
    )
    for rows in (own[:5], own[5:]):
        predictions, labels = (
            torch.tensor([PREDICTIONS[row] for row in rows]),
            torch.tensor([LABELS[row] for row in rows]),
        )
        accuracy.update(predictions, labels)
        macro.update(predictions.tolist(), labels.tolist())
        binary.update((predictions == 1).int(), labels == 1)
        groups.update([GROUPS[row] for row in rows], predictions, labels)
        best.update(
            [GROUPS[row] for row in rows],
            rows,
            torch.tensor([SCORES[row] for row in rows], dtype=torch.float64),
        )
        answers.update([TEXTS[row][0] for row in rows], [TEXTS[row][1] for row in rows])
    exact, f1 = answers.compute()
    again = (accuracy.compute(), answers.compute())
    assert again == (accuracy.compute(), (exact, f1))  # asking changes nothing
    return {
        "accuracy": accuracy.compute(),
        "macro": macro.compute(),
        "binary": binary.compute(),
        "groups": groups.compute(),
        "best": best.compute(),
        "exact": exact,
        "f1": f1,
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_are_those_of_all_rows(ranks: int) -> None:
    """On every rank, whatever part of the rows each had."""
    expected = plain_results()
    for result in run_ranks(measured, ranks):
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            assert result[name] == (value if name == "best" else pytest.approx(value, abs=1e-12)), (
                name
            )


def test_results_need_no_process_group() -> None:
    """One process counts for itself."""
    assert not bmt.is_initialized()
    assert measured() == {
        name: value if name == "best" else pytest.approx(value, abs=1e-12)
        for name, value in plain_results().items()
    }


def record_scores(right: bool) -> tuple[float, float]:
    """Exact match and F1 of ReCoRD's dev split when each rank, of half the rows, prefers right
    entities, or wrong ones.
    """
    items = t5dataset.DATASET["ReCoRD"](
        DATA / "superglue", "dev", bmt.rank(), bmt.world_size(), T5, 256, 2
    )
    best, score = BestOfGroup(), AnswerScore()
    for batch in DistributedDataLoader(items, batch_size=3):
        wanted = batch["targets"] if right else 1 - batch["targets"]
        best.update(batch["group"], batch["idx"], wanted.float())
    chosen = [items.examples[row] for row in best.compute().values()]
    score.update(
        [example.fields["entity"] for example in chosen], [example.answers for example in chosen]
    )
    return score.compute()


@pytest.mark.parametrize("ranks", [1, 2])
def test_record_is_scored_by_its_best_entities(ranks: int) -> None:
    """From rows on different ranks to one score."""
    assert run_ranks(record_scores, ranks, True) == [(1.0, 1.0)] * ranks
    assert run_ranks(record_scores, ranks, False) == [(0.0, 0.0)] * ranks


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "f1"),
    [
        ("The  Harbour.", "harbour", True, 1.0),
        ("an old boat", "the boat", False, 2 / 3),
        ("boat boat", "boat", False, 2 / 3),
        ("", "the", True, 1.0),  # nothing is left of either
        ("boat", "a", False, 0.0),
        ("river", "lake", False, 0.0),
        ("state-of-the-art", "stateoftheart", True, 1.0),
        ("theatre", "atre", False, 0.0),  # an article is a word
    ],
)
def test_answers_are_compared_as_squad_says(
    prediction: str, answer: str, exact: bool, f1: float
) -> None:
    """Without case, punctuation, articles and spare blanks."""
    assert exact_match(prediction, answer) is exact
    assert token_f1(prediction, answer) == pytest.approx(f1)


def test_normalized_texts_are_plain_words() -> None:
    """Punctuation goes without leaving a blank, blanks of all kinds become one."""
    assert normalized(" The U.S.\tand a\nBoat! ") == "us and boat"


def nothing() -> list[str]:
    """What every metric says when no rank has a row."""
    complaints = []
    for metric in (
        Accuracy(2),
        MacroF1(2),
        BinaryF1(),
        GroupExactMatch(),
        BestOfGroup(),
        AnswerScore(),
    ):
        with pytest.raises(DataError, match="on any rank") as error:
            metric.compute()
        complaints.append(str(error.value))
    return complaints


def test_results_of_nothing_are_refused_everywhere() -> None:
    """On every rank, and without a process group."""
    first, second = run_ranks(nothing, 2)
    assert first == second == nothing()


def test_bad_rows_are_refused() -> None:
    """Different numbers, classes that are none, questions without answers."""
    with pytest.raises(DataError, match="2 predictions and 1 labels"):
        Accuracy(2).update([0, 1], [0])
    with pytest.raises(DataError, match="classes from -100 to 1: expected 0 to 1"):
        Accuracy(2).update([0, 1], [0, -100])
    with pytest.raises(
        DataError, match=r"got torch.float32 of shape \(2,\) as classes: expected integers"
    ):
        Accuracy(2).update(torch.tensor([0.9, 0.1]), [1, 0])
    Accuracy(2).update([], [])
    with pytest.raises(DataError, match="columns of 1, 2, 1 rows"):
        GroupExactMatch().update([0], [0, 1], [0])
    with pytest.raises(DataError, match="1 predictions and answers to 2"):
        AnswerScore().update(["a"], [["b"], ["c"]])
    with pytest.raises(DataError, match="no answer to score 'a' by"):
        AnswerScore().update(["a"], [[]])
