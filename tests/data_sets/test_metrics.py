"""Metrics on several ranks, against plain Python over all rows."""

import collections
import random
from typing import Any

import pytest
import torch
from tests.data_sets.common import DATA, refused, tokenizer
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.dataset import t5dataset
from model_center.dataset.loader import DistributedDataLoader
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

RNG = random.Random(0)
ROWS = range(37)
LABELS = [RNG.choice([0, 0, 0, 1, 3]) for _ in ROWS]  # class 2 never occurs
PREDICTIONS = [label if RNG.random() < 0.6 else RNG.choice([0, 1, 3]) for label in LABELS]
GROUPS = [RNG.randrange(12) * 7 for _ in ROWS]
SCORES = [RNG.choice([0.1, 0.2, 0.7, 0.7, -3.0]) for _ in ROWS]
WORDS = ["the old harbour", "Harbour!", "a  market", "river Ald", "", "the"]
TEXTS = [(RNG.choice(WORDS), {*RNG.choices(WORDS, k=RNG.randint(1, 3))}) for _ in ROWS]


def plain_f1(label, predictions, labels):
    """From precision and recall, in words."""
    hits = sum(p == t == label for p, t in zip(predictions, labels, strict=True))
    if not hits:
        return 0.0
    precision, recall = hits / predictions.count(label), hits / labels.count(label)
    return 2 * precision * recall / (precision + recall)


def mean(values):
    return float(sum(values)) / len(values)


def plain_results():
    """Every metric over all rows, without any of ours."""
    right_of = collections.defaultdict(list)
    best = {}
    right = [PREDICTIONS[row] == LABELS[row] for row in ROWS]
    for row, group in enumerate(GROUPS):
        right_of[group].append(right[row])
        if group not in best or SCORES[row] > SCORES[best[group]]:
            best[group] = row
    ones = [[int(value == 1) for value in values] for values in (PREDICTIONS, LABELS)]
    return {
        "accuracy": mean(right),
        "macro": mean([plain_f1(label, PREDICTIONS, LABELS) for label in (0, 1, 3)]),
        "binary": plain_f1(1, *ones),
        "groups": mean([all(each) for each in right_of.values()]),
        "best": best,
        "answers": tuple(
            mean([max(float(score(text, one)) for one in answers) for text, answers in TEXTS])
            for score in (exact_match, token_f1)
        ),
    }


def every_metric():
    return {
        "accuracy": Accuracy(4),
        "macro": MacroF1(4),
        "binary": BinaryF1(),
        "groups": GroupExactMatch(),
        "best": BestOfGroup(),
        "answers": AnswerScore(),
    }


def measured():
    """What metrics say when no rank has a row; the same of our metrics as of the plain ones, each
    rank given its rows in pieces, the last rank none when there are three; asked twice.
    """
    readers, found = min(2, bmt.world_size()), every_metric()
    complaints = []
    for metric in found.values():
        with refused("on any rank") as error:
            metric.compute()
        complaints.append(str(error.value))
    own = list(ROWS[bmt.rank() :: readers]) if bmt.rank() < readers else []
    for rows in (own[:5], own[5:]):
        predicted, labels = (torch.tensor([x[row] for row in rows]) for x in (PREDICTIONS, LABELS))
        groups = [GROUPS[row] for row in rows]
        found["accuracy"].update(predicted, labels)
        found["macro"].update(predicted.tolist(), labels.tolist())
        found["binary"].update((predicted == 1).int(), labels == 1)
        found["groups"].update(groups, predicted, labels)
        scores = torch.tensor([SCORES[row] for row in rows], dtype=torch.float64)
        found["best"].update(groups, rows, scores)
        found["answers"].update([TEXTS[row][0] for row in rows], [TEXTS[row][1] for row in rows])
    each = [{name: metric.compute() for name, metric in found.items()} for _ in range(2)]
    return [*each, complaints]


def test_results_are_those_of_all_rows():
    """On every rank, whatever part of the rows each had, and without a process group."""
    want = plain_results()
    assert not bmt.is_initialized()
    alone = measured()
    for first, again, complaints in (alone, *run_ranks(measured, 3)):
        assert first == again  # asking changes nothing
        assert complaints == alone[2]
        assert first.pop("best") == want["best"]
        assert first.keys() == want.keys() - {"best"}
        for name, value in first.items():
            assert value == pytest.approx(want[name], abs=1e-12), name


def record_scores():
    """Exact match and F1 of ReCoRD's dev split when each rank, of part of the rows, prefers right
    entities, and wrong ones.
    """
    where = DATA / "superglue", "dev", bmt.rank(), bmt.world_size(), tokenizer("t5"), 256, 2
    items, found = t5dataset.DATASET["ReCoRD"](*where), []
    for right in (True, False):
        best, score = BestOfGroup(), AnswerScore()
        for batch in DistributedDataLoader(items, batch_size=3):
            wanted = batch["targets"] if right else 1 - batch["targets"]
            best.update(batch["group"], batch["idx"], wanted.float())
        chosen = [items.examples[row] for row in best.compute().values()]
        names = [example.fields["entity"] for example in chosen]
        score.update(names, [example.answers for example in chosen])
        found.append(score.compute())
    return found


def test_record_is_scored_by_its_best_entities():
    """From rows on different ranks to one score."""
    assert run_ranks(record_scores, 2) == [[(1.0, 1.0), (0.0, 0.0)]] * 2


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
def test_answers_are_compared_as_squad_says(prediction, answer, exact, f1):
    """Without case, punctuation, articles and spare blanks."""
    assert exact_match(prediction, answer) is exact
    assert token_f1(prediction, answer) == pytest.approx(f1)


def test_bad_rows_are_refused():
    """Different numbers, classes that are none, questions without answers; they count for
    nothing.
    """
    assert normalized(" The U.S.\tand a\nBoat! ") == "us and boat"
    accuracy, groups, answers = Accuracy(2), GroupExactMatch(), AnswerScore()
    accuracy.update([], [])
    scores = torch.tensor([0.9, 0.1])
    bad: list[tuple[Any, tuple[Any, ...], str]] = [
        (accuracy, ([0, 1], [0]), "2 predictions and 1 labels"),
        (accuracy, ([0, 1], [0, -100]), "classes from -100 to 1: expected 0 to 1"),
        (accuracy, ([0, 2], [0, 1]), "classes from 0 to 2: expected 0 to 1"),
        (accuracy, (scores, [1, 0]), r"got torch.float32 of shape \(2,\) as classes: expected int"),
        (groups, ([0], [0, 1], [0]), "columns of 1, 2, 1 rows"),
        (answers, (["a"], [["b"], ["c"]]), "1 predictions and answers to 2"),
        (answers, (["a"], [[]]), "no answer to score 'a' by"),
    ]
    for metric, rows, complaint in bad:
        with refused(complaint):
            metric.update(*rows)
    accuracy.update([0, 1], [0, 0])
    assert accuracy.compute() == 0.5
    for metric in (groups, answers):
        with refused("on any rank"):
            metric.compute()
