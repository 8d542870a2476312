"""ModelCenter's helpers for programs that have a generation loop of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from model_center.errors import InputError
from model_center.generation.filters import repetition_penalty as penalized
from model_center.generation.filters import top_k as best_k
from model_center.generation.filters import top_p as nucleus


def pad(
    orig_items: Sequence[Mapping[str, torch.Tensor]],
    key: str,
    padding_value: int = 0,
    padding_side: str = "left",
) -> torch.Tensor:
    """The tensors (1, length) that `orig_items` have under `key`, as a batch (items, longest).

    Raises:
        InputError: for a tensor of another number of dims or rows, or another side.
    """
    if padding_side not in {"left", "right"}:
        raise InputError(f"padding_side is {padding_side!r}: expected 'left' or 'right'.")
    rows = [item[key] for item in orig_items]
    for place, row in enumerate(rows):
        if row.dim() != 2 or len(row) != 1:
            raise InputError(
                f"item {place} has {key} of shape {tuple(row.shape)}: expected (1, length)."
            )
    longest = max(row.shape[1] for row in rows)
    missing = [longest - row.shape[1] for row in rows]
    sides = [(count, 0) if padding_side == "left" else (0, count) for count in missing]
    return torch.cat(
        [
            torch.nn.functional.pad(row, side, value=padding_value)
            for row, side in zip(rows, sides, strict=True)
        ]
    )


def top_k_top_p_filtering(
    logits: torch.Tensor, top_k: int = 0, top_p: float = 0.0, filter_value: float = -math.inf
) -> torch.Tensor:
    """Scores (rows, vocab), `filter_value` outside of the top k and the nucleus; 0 for no limit."""
    kept = best_k(logits, top_k) if top_k else logits
    kept = nucleus(kept, top_p) if 0 < top_p < 1 else kept
    return logits.masked_fill(kept == -math.inf, filter_value)


def apply_repetition_penalty(
    logits: torch.Tensor,
    batch_size: int,
    num_beams: int,
    prev_output_tokens: torch.Tensor,
    repetition_penalty: float,
    start_idx: int | None = None,
    end_idx: int | None = None,
    window_size: int | None = None,
) -> None:
    """Make the scores (batch_size * num_beams, vocab) of tokens that occurred lower, in place.

    Args:
        prev_output_tokens: (batch_size * num_beams, length).
        repetition_penalty: see GenerationConfig; at least 1.
        start_idx, end_idx: only the tokens from the one to the other, both included, count; all if
            None.
        window_size: only the last so many of them count.

    Raises:
        InputError: for a penalty below 1, or another number of rows.
    """
    if repetition_penalty < 1:
        raise InputError(f"repetition_penalty is {repetition_penalty}: expected at least 1.")
    if len(logits) != batch_size * num_beams or len(prev_output_tokens) != len(logits):
        found = f"{len(logits)} rows of logits and {len(prev_output_tokens)} of tokens"
        raise InputError(
            f"there are {found}: expected batch_size * num_beams = "
            f"{batch_size * num_beams} of both."
        )
    start = start_idx or 0
    end = prev_output_tokens.shape[1] if end_idx is None else end_idx + 1
    if window_size is not None:
        start = max(start, end - window_size)
    logits.copy_(penalized(logits, prev_output_tokens[:, start:end].long(), repetition_penalty))


class BeamHypotheses:
    """The best complete sequences of one prompt.

    Args:
        n_hyp: how many are kept.
        max_len: the longest sequence.
        length_penalty: scores are log-probabilities divided by length ** length_penalty.
        early_stopping: whether `n_hyp` sequences are enough, however good.
    """

    def __init__(
        self, n_hyp: int, max_len: int, length_penalty: float, early_stopping: bool
    ) -> None:
        self.n_hyp, self.max_len = n_hyp, max_len
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.hyp: list[tuple[float, torch.Tensor]] = []

    @property
    def worst_score(self) -> float:
        """The score of the worst sequence kept, 1e9 if there is none."""
        return min((score for score, _ in self.hyp), default=1e9)

    def __len__(self) -> int:
        return len(self.hyp)

    def add(self, hyp: torch.Tensor, sum_logprobs: float) -> None:
        """Add a sequence (length,), if it is one of the `n_hyp` best."""
        self.hyp.append((sum_logprobs / len(hyp) ** self.length_penalty, hyp))
        self.hyp = sorted(self.hyp, key=lambda pair: -pair[0])[: self.n_hyp]

    def is_done(self, best_sum_logprobs: float, cur_len: int) -> bool:
        """Whether no `cur_len` tokens of this log-probability can be among the best."""
        if len(self) < self.n_hyp:
            return False
        return (
            self.early_stopping
            or self.worst_score >= best_sum_logprobs / cur_len**self.length_penalty
        )
