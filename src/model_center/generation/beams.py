"""Beam search: for each prompt several sequences compete, and the best complete ones are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch

from model_center.generation.search import DecodeTask, GenerationOutput, Search

# the score of what is not there; finite, so that sums and comparisons of it are numbers
LOWEST = -1e9


class Hypotheses(NamedTuple):
    """Some sequences for each prompt.

    Attributes:
        ids: int64 (prompts, number, length), padded.
        scores: fp32 (prompts, number).
        token_scores: fp32 (prompts, number, new tokens).
        states: int64 (prompts, number), of the automaton of stop strings.
        lengths: int64 (prompts, number), of new tokens.
        is_complete: bool (prompts, number).
    """

    ids: torch.Tensor
    scores: torch.Tensor
    token_scores: torch.Tensor
    states: torch.Tensor
    lengths: torch.Tensor
    is_complete: torch.Tensor

    @classmethod
    def of(cls, task: DecodeTask, number: int, scores: torch.Tensor) -> Hypotheses:
        """`number` times each prompt, nothing added yet; `scores` (number,)."""
        ids = task.buffer(number).unflatten(0, (-1, number))
        shape = ids.shape[:2]
        return cls(
            ids,
            scores.expand(shape),
            ids.new_zeros((*shape, task.num_new), dtype=torch.float32),
            task.states(number).view(shape),
            ids.new_zeros(shape),
            ids.new_zeros(shape, dtype=torch.bool),
        )

    def take(self, places: torch.Tensor) -> Hypotheses:
        """Those at `places` (prompts, any number)."""
        prompts = torch.arange(len(places), device=places.device)[:, None]
        return Hypotheses(*(field[prompts, places] for field in self))

    def unless_over(self, before: Hypotheses, continues: torch.Tensor) -> Hypotheses:
        """These where `continues`, bool (), says so, else those of before."""
        return Hypotheses(
            *(torch.where(continues, new, old) for new, old in zip(self, before, strict=True))
        )

    def joined(self, others: Hypotheses) -> Hypotheses:
        """These and those."""
        return Hypotheses(*(torch.cat(fields, 1) for fields in zip(self, others, strict=True)))


class BeamSearch(Search):
    """The `num_beams` best sequences are continued side by side.

    Twice as many candidates are looked at, or more where there are several end tokens, so that as
    many as there are beams are left to continue. A candidate that ends is complete, if it is
    among the best `num_beams`, and competes with the complete ones by its log-probability divided
    by a power of its length.

    Source: Wu et al., "Google's Neural Machine Translation System" (2016), for the length penalty.
    """

    def __init__(self, task: DecodeTask) -> None:
        self._task, self.copies = task, task.config.num_beams
        self._filters = task.filters(self.copies)
        self._prefix, self._num_new = task.prefix.shape[1], 0
        self._num_candidates = max(2, 1 + len(task.config.eos_ids)) * self.copies
        scores = torch.full((self.copies,), LOWEST, device=task.prefix.device)
        self._complete = Hypotheses.of(task, self.copies, scores)
        scores = scores.clone()
        scores[0] = 0  # at first all beams are the same sequence: continue one of them
        self._live = Hypotheses.of(task, self.copies, scores)
        self._improvable = torch.ones(len(task.prefix), 1, dtype=torch.bool, device=scores.device)
        self._continues = self._improvable.any()
        self.tokens = self._live.ids[:, :, self._prefix - 1].flatten()

    def advance(self, logits: torch.Tensor) -> None:
        """As in Search."""
        candidates, parents = self._candidates(logits)
        self._num_new += 1
        ended = candidates.is_complete
        # steps after the end, if there are any, must change nothing
        self._complete = self._with_ended(candidates).unless_over(self._complete, self._continues)
        left = candidates.scores.masked_fill(ended, LOWEST)
        scores, places = left.topk(self.copies)
        self._live = candidates.take(places)._replace(scores=scores)
        first_rows = torch.arange(0, len(logits), self.copies, device=places.device)[:, None]
        self.parents = (first_rows + parents.gather(1, places)).flatten()
        self.tokens = self._live.ids[:, :, self._prefix + self._num_new - 1].flatten()
        self._improvable = self._improvable & self._could_improve()
        continues = self._improvable.any() & ~ended.all() & ~self._is_full().all()
        self._continues = self._continues & continues

    def continues(self) -> torch.Tensor:
        """As in Search."""
        return self._continues

    def output(self) -> GenerationOutput:
        """As in Search: the best complete sequences of each prompt."""
        best = Hypotheses(
            *(
                field[:, : self._task.config.num_return_sequences].flatten(0, 1)
                for field in self._complete
            )
        )
        num_new, is_scored = int(best.lengths.max()), self._task.config.return_scores
        return GenerationOutput(
            sequences=best.ids[:, : self._prefix + num_new],
            prefix_length=self._prefix,
            lengths=best.lengths,
            scores=best.scores if is_scored else None,
            token_scores=best.token_scores[:, :num_new] if is_scored else None,
        )

    def _candidates(self, logits: torch.Tensor) -> tuple[Hypotheses, torch.Tensor]:
        """The best continuations, best first, and the sequence (prompts, number) of each."""
        place = self._prefix + self._num_new
        scores, ids = logits.float(), self._live.ids[:, :, :place].flatten(0, 1)
        if self._task.config.normalize_last:
            log_probs = self._filters(scores, ids).log_softmax(-1)
        else:
            log_probs = self._filters(scores.log_softmax(-1), ids)
        log_probs = log_probs.unflatten(0, (-1, self.copies))
        totals = (self._live.scores[:, :, None] + log_probs).flatten(1)
        scores, flat = totals.topk(min(self._num_candidates, totals.shape[1]))
        parents, tokens = flat // logits.shape[1], flat % logits.shape[1]
        found = self._live.take(parents)
        found.ids[:, :, place] = tokens
        found.token_scores[:, :, self._num_new] = log_probs.flatten(1).gather(1, flat)
        states, ended = self._task.ending.next(found.states, tokens)
        if self._num_new + 1 == self._task.num_new:
            ended = torch.ones_like(ended)
        return found._replace(
            scores=scores, states=states, lengths=found.lengths + 1, is_complete=ended
        ), parents

    def _with_ended(self, candidates: Hypotheses) -> Hypotheses:
        """The best complete sequences: earlier ones, and the best candidates as they end."""
        counts = candidates.is_complete & self._improvable & ~self._is_full()
        counts[:, self.copies :] = False
        scores = candidates.scores / self._num_new**self._task.config.length_penalty
        candidates = candidates._replace(
            scores=scores.masked_fill(~counts, LOWEST), is_complete=counts
        )
        merged = self._complete.joined(candidates)
        return merged.take(merged.scores.topk(self.copies).indices)

    def _is_full(self) -> torch.Tensor:
        """bool (prompts, 1): whether there are enough complete sequences, and no more wanted."""
        is_full = self._complete.is_complete.all(1, keepdim=True)
        return is_full if self._task.config.early_stopping is True else torch.zeros_like(is_full)

    def _could_improve(self) -> torch.Tensor:
        """bool (prompts, 1): whether the best live sequence may still be among the results.

        How good a live one can get is not known, since a longer one may have a better score: it is
        judged by its present length, or ("never") by the length that is best for it.
        """
        config = self._task.config
        grows = config.early_stopping == "never" and config.length_penalty > 0
        length = self._task.num_new if grows else self._num_new
        best = self._live.scores[:, :1] / length**config.length_penalty
        complete = self._complete
        worst = complete.scores.amin(1, keepdim=True).masked_fill(
            ~complete.is_complete.all(1, keepdim=True), LOWEST
        )
        return best > worst
