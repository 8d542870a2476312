"""Classification by language models: the scores of the classes' words where the answer stands, and
how good they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import bmtrain as bmt
from model_center.dataset.loader import DistributedDataLoader
from model_center.metrics import Accuracy
from model_center.model.causal import CausalModel
from model_center.model.seq2seq import Seq2SeqModel

Batch = Mapping[str, torch.Tensor]


class Scorer:
    """Accuracy, over the rows of all ranks."""

    def __init__(self, num_classes: int) -> None:
        self.accuracy = Accuracy(num_classes)

    def update(self, scores: torch.Tensor, labels: torch.Tensor, batch: Batch) -> None:
        """Count a batch: scores (batch, classes) and labels (batch,)."""
        self.accuracy.update(scores.argmax(-1), labels)

    def compute(self) -> dict[str, float]:
        """Values by name. Collective."""
        return {"accuracy": self.accuracy.compute()}


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    loader: DistributedDataLoader,
    scorer: Scorer,
    scores_of: Callable[[Batch], torch.Tensor],
    labels: str,
) -> dict[str, float]:
    """What `scorer` says of all rows of `loader`; `scores_of` gives (batch, classes), `labels`
    names the right ones.
    """
    model.eval()
    for batch in loader:
        scorer.update(scores_of(batch), batch[labels], batch)
    model.train()
    return scorer.compute()


def words_of(task: Any, tokenizer: Any) -> torch.Tensor:
    """Ids of the words that stand for the classes of a task, a class of datasets."""
    return torch.tensor(task.get_verbalizer(tokenizer), device=bmt.device())


def causal_scores(model: CausalModel, batch: Batch, words: torch.Tensor) -> torch.Tensor:
    """(batch, words): of the words as what follows each prompt."""
    hidden = model(
        batch["input_ids"], length=batch["input_length"], output_logits=False
    ).last_hidden_state
    return word_scores(model, hidden, batch["index"], words)


def seq2seq_scores(model: Seq2SeqModel, batch: Batch, words: torch.Tensor) -> torch.Tensor:
    """(batch, words): of the words as what the decoder writes for each input."""
    inputs = [batch[name] for name in ("enc_input", "enc_length", "dec_input", "dec_length")]
    hidden = model(*inputs, output_logits=False).last_hidden_state
    return word_scores(model, hidden, batch["index"], words)


def word_scores(
    model: CausalModel | Seq2SeqModel,
    hidden: torch.Tensor,
    index: torch.Tensor,
    words: torch.Tensor,
) -> torch.Tensor:
    """(batch, words): scores of the words at one position of each row; the vocabulary is scored
    there and nowhere else.

    Args:
        model: whose head it is.
        hidden: (batch, seq, dim_model).
        index: (batch, seq), 1 at that position and 0 elsewhere.
        words: ids.
    """
    at_answer = hidden[torch.arange(len(hidden), device=hidden.device), index.argmax(1)]
    return model.logits(at_answer)[:, words]
