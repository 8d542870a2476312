"""What is done to scores before a token is chosen: pure functions, and their order."""

from __future__ import annotations

import math

import torch

from model_center.generation.config import GenerationConfig


def repetition_penalty(
    scores: torch.Tensor, occurred: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Scores (rows, vocab), lower for the tokens `occurred` (rows, any number), once each.

    Source: Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
    Generation" (2019).
    """
    found = scores.gather(1, occurred)
    return scores.scatter(1, occurred, torch.where(found < 0, found * penalty, found / penalty))


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Scores (rows, vocab), -inf below the k-th best of their row; ties with it stay."""
    least = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < least, -math.inf)


def top_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    """Scores (rows, vocab), -inf outside of the fewest tokens of a probability of p in all.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    """
    ascending, order = scores.sort(-1)
    # From the unlikely end: what adds up to no more than 1 - p there is not needed. The likeliest
    # token always is.
    is_out = ascending.softmax(-1).cumsum(-1) <= 1 - p
    is_out[:, -1] = False
    return scores.masked_fill(is_out.scatter(1, order, is_out), -math.inf)


class Filters:
    """The filters that a configuration asks for.

    Args:
        config: what to do.
        prefix: number of tokens in the prompt.
        mask: bool (rows, prefix), False where the prompt is padding; None where none is.
        device: of the scores.
    """

    def __init__(
        self, config: GenerationConfig, prefix: int, mask: torch.Tensor | None, device: torch.device
    ) -> None:
        self._config, self._prefix, self._mask = config, prefix, mask
        self._eos = torch.tensor(config.eos_ids, dtype=torch.long, device=device)
        self._forbidden = torch.tensor(config.forbidden_tokens, dtype=torch.long, device=device)

    @property
    def are_none(self) -> bool:
        """Whether scores stay as they are."""
        config = self._config
        return not (
            config.do_sample
            or config.repetition_penalty != 1
            or config.min_new_tokens
            or len(self._forbidden)
        )

    def __call__(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Filtered scores (rows, vocab) fp32 for what follows the tokens `ids` (rows, so far)."""
        config = self._config
        if config.repetition_penalty != 1:
            scores = self._penalized(scores, ids)
        if ids.shape[1] - self._prefix < config.min_new_tokens:
            scores = scores.index_fill(1, self._eos, -math.inf)
        if len(self._forbidden):
            scores = scores.index_fill(1, self._forbidden, -math.inf)
        if config.do_sample:
            scores = self._of_sampling(scores)
        return scores

    def _penalized(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        config, last = self._config, ids[:, -1:]
        # any token that did occur serves in place of padding: each is penalised once
        if self._mask is not None:
            ids = torch.cat(
                [torch.where(self._mask, ids[:, : self._prefix], last), ids[:, self._prefix :]], 1
            )
        start = 0 if config.penalize_prompt else self._prefix
        if config.repetition_window is not None:
            start = max(start, ids.shape[1] - config.repetition_window)
        return repetition_penalty(scores, ids[:, start:], config.repetition_penalty)

    def _of_sampling(self, scores: torch.Tensor) -> torch.Tensor:
        config = self._config
        scores = scores / config.temperature
        if config.top_k:
            scores = top_k(scores, config.top_k)
        return top_p(scores, config.top_p) if config.top_p < 1 else scores
