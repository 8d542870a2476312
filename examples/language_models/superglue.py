"""The data and the metrics of SuperGLUE's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from classification import Batch, Scorer
from folders import data_folder
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.prompts import WORDS
from model_center.metrics import AnswerScore, BestOfGroup, BinaryF1, GroupExactMatch, MacroF1
from model_center.training import make_loader


def load(
    table: Mapping[str, Any], args: Any, tokenizer: Any, *lengths: int
) -> tuple[DistributedDataLoader, DistributedDataLoader]:
    """Loaders of the task's train and dev splits; `lengths` are the last arguments of its class."""
    path = data_folder(args.base_path, "superglue")
    train, dev = (
        table[args.dataset_name](path, split, 0, 1, tokenizer, *lengths)
        for split in ("train", "dev")
    )
    return make_loader(train, args, shuffle=True), make_loader(dev, args, shuffle=False)


def scorer(task: str, dataset: Any) -> Scorer:
    """The metrics of a task; `dataset` is what the scored rows come from."""
    if task == "ReCoRD":
        return ReCoRDScorer(dataset)
    kinds: dict[str, type[Scorer]] = {"CB": CBScorer, "MultiRC": MultiRCScorer}
    return kinds.get(task, Scorer)(len(WORDS[task]))


class CBScorer(Scorer):
    """CB: accuracy, and F1 averaged over classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.f1 = MacroF1(num_classes)

    def update(self, scores: torch.Tensor, labels: torch.Tensor, batch: Batch) -> None:
        """As in Scorer."""
        super().update(scores, labels, batch)
        self.f1.update(scores.argmax(-1), labels)

    def compute(self) -> dict[str, float]:
        """As in Scorer."""
        return {**super().compute(), "macro_f1": self.f1.compute()}


class MultiRCScorer(Scorer):
    """MultiRC: F1 over all answers, and the share of questions all of whose answers are judged
    right.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.f1, self.exact = BinaryF1(), GroupExactMatch()

    def update(self, scores: torch.Tensor, labels: torch.Tensor, batch: Batch) -> None:
        """As in Scorer."""
        super().update(scores, labels, batch)
        self.f1.update(scores.argmax(-1), labels)
        self.exact.update(batch["group"], scores.argmax(-1), labels)

    def compute(self) -> dict[str, float]:
        """As in Scorer."""
        return {**super().compute(), "f1": self.f1.compute(), "exact_match": self.exact.compute()}


class ReCoRDScorer(Scorer):
    """ReCoRD: the entity that scores highest is the answer; exact match and F1 of its text."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(2)
        self.dataset, self.best = dataset, BestOfGroup()

    def update(self, scores: torch.Tensor, labels: torch.Tensor, batch: Batch) -> None:
        """As in Scorer."""
        self.best.update(batch["group"], batch["idx"], torch.log_softmax(scores.float(), -1)[:, 1])

    def compute(self) -> dict[str, float]:
        """As in Scorer."""
        # those of all ranks, on every rank
        best = [self.dataset.examples[row] for row in self.best.compute().values()]
        score = AnswerScore()
        score.update(
            [example.fields["entity"] for example in best], [example.answers for example in best]
        )
        exact, f1 = score.compute()
        return {"exact_match": exact, "f1": f1}
