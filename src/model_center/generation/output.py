"""What a generation returns."""

from __future__ import annotations

import dataclasses

import torch


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
