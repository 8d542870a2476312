"""How next tokens are chosen: what all ways share, choice sequence by sequence, and what comes
of it.
"""

from __future__ import annotations

import abc
import dataclasses

import torch

from model_center.generation.config import GenerationConfig
from model_center.generation.filters import Filters
from model_center.generation.stopping import StopCriteria
from model_center.kernels import is_fused
from model_center.kernels.largest import largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """The sequences of all prompts; those of one prompt are neighbours, the best first.

    Attributes:
        sequences: int64 (rows, prefix + new), prompts (of the decoder) and what follows them;
            padded after their ends.
        prefix_length: number of tokens of the prompt.
        lengths: int64 (rows,), numbers of new tokens, with the one that ends the sequence.
        scores: fp32 (rows,): of beams the score that they compete by, else the sum of
            `token_scores`; with `return_scores`.
        token_scores: fp32 (rows, new), the log-probability of each new token among those that could
            be chosen there (of beams: before they are limited), 0 after the end; with
            `return_scores`.
    """

    sequences: torch.Tensor
    prefix_length: int
    lengths: torch.Tensor
    scores: torch.Tensor | None = None
    token_scores: torch.Tensor | None = None

    @property
    def new_tokens(self) -> torch.Tensor:
        """int64 (rows, new), without the prompts."""
        return self.sequences[:, self.prefix_length :]

    def rows(self) -> list[list[int]]:
        """The new tokens of each row up to its end, that one included."""
        lengths = self.lengths.tolist()
        return [row[:length] for row, length in zip(self.new_tokens.tolist(), lengths, strict=True)]

    def first(self, num_rows: int) -> GenerationOutput:
        """The output for the first rows only."""
        return dataclasses.replace(
            self,
            sequences=self.sequences[:num_rows],
            lengths=self.lengths[:num_rows],
            scores=None if self.scores is None else self.scores[:num_rows],
            token_scores=None if self.token_scores is None else self.token_scores[:num_rows],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTask:
    """A batch of prefixes to continue, and how.

    Attributes:
        prefix: int64 (prompts, length), the decoder's tokens so far.
        mask: bool of the same shape, False where they are padding; None where none is.
        num_new: most tokens to add.
        config: how.
        ending: what ends a sequence.
        generator: of random numbers; None for torch's own.
    """

    prefix: torch.Tensor
    mask: torch.Tensor | None
    num_new: int
    config: GenerationConfig
    ending: StopCriteria
    generator: torch.Generator | None = None

    def buffer(self, copies: int) -> torch.Tensor:
        """int64 (prompts * copies, length + num_new): prompts `copies` times, then padding."""
        rows = self.prefix.repeat_interleave(copies, 0)
        return torch.cat([rows, rows.new_full((len(rows), self.num_new), self.config.pad)], 1)

    def states(self, copies: int) -> torch.Tensor:
        """int64 (prompts * copies,), those of `ending` at the start of these rows."""
        return self.ending.first(self.prefix, self.mask).repeat_interleave(copies, 0)

    def filters(self, copies: int) -> Filters:
        """The filters for these rows."""
        mask = None if self.mask is None else self.mask.repeat_interleave(copies, 0)
        return Filters(self.config, self.prefix.shape[1], mask, self.prefix.device)


class Search(abc.ABC):
    """Sequences that grow, `copies` for each prompt.

    Attributes:
        copies: rows of the model's batch for each prompt.
        tokens: int64 (rows,), the last token of each row.
        parents: int64 (rows,), the row that each continues; None where each continues itself.
    """

    copies: int
    tokens: torch.Tensor
    parents: torch.Tensor | None = None

    @abc.abstractmethod
    def advance(self, logits: torch.Tensor) -> None:
        """Choose the tokens that follow, by scores (rows, vocab)."""

    @abc.abstractmethod
    def continues(self) -> torch.Tensor:
        """bool (), on the device: whether a next token is needed."""

    @abc.abstractmethod
    def output(self) -> GenerationOutput:
        """The sequences so far."""


class SingleSearch(Search):
    """Each sequence by itself: the likeliest token, or one that is drawn.

    Attributes:
        is_new: bool (rows,), whether the last token belongs to the sequence, or is padding after
            its end.
    """

    def __init__(self, task: DecodeTask) -> None:
        config = task.config
        self.copies = config.num_return_sequences
        self._task, self._filters = task, task.filters(self.copies)
        self._ids = task.buffer(self.copies)
        num_rows, self._length = len(self._ids), task.prefix.shape[1]
        self._running = torch.ones(num_rows, dtype=torch.bool, device=self._ids.device)
        self._states = task.states(self.copies)
        self._lengths = self._ids.new_zeros(num_rows)
        self._token_scores = self._ids.new_zeros((num_rows, task.num_new), dtype=torch.float32)
        self.tokens, self.is_new = self._ids[:, self._length - 1], self._running

    def advance(self, logits: torch.Tensor) -> None:
        """As in Search."""
        task, place = self._task, self._length - self._task.prefix.shape[1]
        scores = logits  # of which the largest is the largest in fp32 too
        if task.config.return_scores or not self._filters.are_none:
            scores = self._filters(logits.float(), self._ids[:, : self._length])
        chosen = self._choose(scores)
        if task.config.return_scores:
            found = scores.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            self._token_scores[:, place] = torch.where(self._running, found, 0)
        self.tokens, self.is_new = (
            torch.where(self._running, chosen, task.config.pad),
            self._running,
        )
        self._ids[:, self._length] = self.tokens
        self._length += 1
        self._lengths += self._running
        self._states, ended = task.ending.next(self._states, self.tokens)
        self._running = self._running & ~ended

    def continues(self) -> torch.Tensor:
        """As in Search."""
        return self._running.any() & (self._length < self._ids.shape[1])

    def output(self) -> GenerationOutput:
        """As in Search."""
        prefix, is_scored = self._task.prefix.shape[1], self._task.config.return_scores
        num_new = int(self._lengths.max())  # there may have been steps after the last end
        scores = self._token_scores[:, :num_new]
        return GenerationOutput(
            sequences=self._ids[:, : prefix + num_new],
            prefix_length=prefix,
            lengths=self._lengths,
            scores=scores.sum(1) if is_scored else None,
            token_scores=scores if is_scored else None,
        )

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if not self._task.config.do_sample:
            return largest(scores) if is_fused(scores) else scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=self._task.generator)[:, 0]


class StreamedSearch(SingleSearch):
    """A search whose tokens are read step by step."""

    def new_tokens(self) -> list[int | None]:
        """The last token of each row, None after its end."""
        tokens = torch.where(self.is_new, self.tokens, -1).tolist()
        return [None if token < 0 else token for token in tokens]
