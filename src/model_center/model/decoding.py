"""Decoding: sequences that grow token by token, with a cache of their keys and values.

What generation asks of a model.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from model_center.errors import InputError
from model_center.layer.cache import KeyValueCache

# Work of which each call writes its result over the last one's.
Work = Callable[[], torch.Tensor]


class FixedSteps(abc.ABC):
    """Steps that are all the same work on the same memory, of one generation after the other.

    Attributes:
        num_rows: of the batch.
        capacity: tokens that there is room for in each row.
    """

    num_rows: int
    capacity: int

    @abc.abstractmethod
    def work(self) -> torch.Tensor:
        """Scores (rows, vocab) after the tokens and places that are in the device's memory."""


class FixedPrompts(abc.ABC):
    """The first pass of prompts of one shape, which is the same work for each of them, and leaves
    their keys and values in the memory of fixed steps.
    """

    @abc.abstractmethod
    def work(self) -> torch.Tensor:
        """Scores (rows, vocab) after the prompts that are in the device's memory."""


class Decoding(abc.ABC):
    """A batch of sequences and what a model remembers of them.

    First `start`, then `expand`, then `step` and `idle` as often as there is room, and `end`. The
    passes of `start`, `step` and `idle` are the same as far as gathering parameters goes, so that
    ranks may mix steps and idle passes.

    Where `fix` can, it makes all steps from then on the same work on the same memory.

    Attributes:
        prefix: int64 (rows, length), the tokens that new ones follow.
        mask: bool (rows, length), False where the prefix is padding; None where none is.
        cache: keys and values of all tokens so far; made by `start`.
    """

    def __init__(
        self,
        prefix: torch.Tensor,
        mask: torch.Tensor | None,
        num_layers: int,
        *,
        cross_attention: bool = False,
    ) -> None:
        self.prefix, self.mask = prefix, mask
        self.cache = KeyValueCache(num_layers, cross_attention=cross_attention)
        self._last, self._num_rows = prefix[:, -1], len(prefix)
        self._num_layers, self._cross_attention = num_layers, cross_attention

    def start(self, num_new: int) -> torch.Tensor:
        """Run the prefix, with room for `num_new` more tokens.

        Returns scores (rows, vocab) of what follows.
        """
        capacity = self.prefix.shape[1] + num_new
        self.cache = KeyValueCache(self._num_layers, capacity, self._cross_attention)
        return self._forward(self.prefix)

    def expand(self, copies: int) -> None:
        """Make each row `copies` rows."""
        if copies > 1:
            rows = torch.arange(self._num_rows, device=self.prefix.device)
            self._select(rows.repeat_interleave(copies))

    def step(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> torch.Tensor:
        """Add a token to each row. Returns scores (rows, vocab) of what follows.

        Args:
            tokens: int64 (rows,).
            parents: int64 (rows,): the row of which each is a continuation, one with the same
                prefix; None for itself.
        """
        if parents is not None:
            self.cache.reorder(parents, self.prefix.shape[1])
        self._last = tokens
        return self._forward(tokens[:, None])

    def fix(
        self, do: Callable[[Work], torch.Tensor], steps: FixedSteps | None = None
    ) -> FixedSteps | None:
        """Make steps the same work each: after `expand`, and without `idle` from then on.

        Args:
            do: does the work of a step, by a recording of it for example.
            steps: those of an earlier generation with this model, of as many rows and with room for
                all tokens of this one: their memory is reused. None to allocate it.

        Returns them; None if there can be none, which depends on the model and the prompts: then
        nothing changes.
        """
        return None

    def prompts(self, steps: FixedSteps, known: FixedPrompts | None = None) -> FixedPrompts | None:
        """What does the work of `start` and `fix` for `steps`, before `resume`; with these prompts.

        Args:
            steps: those of an earlier generation, as in `fix`.
            known: of an earlier generation with them; None for none.

        Returns `known` if the prompts are of its shape, else what is made; None if there can be
        none, which depends on the model and the prompts.
        """
        return None

    def resume(self, do: Callable[[Work], torch.Tensor], steps: FixedSteps) -> None:
        """Continue with steps after the work of `prompts`; arguments as in `fix`."""
        raise NotImplementedError

    def end(self) -> None:
        """Give back the memory: there are no further passes."""
        self.cache = KeyValueCache(self._num_layers)

    @abc.abstractmethod
    def num_bytes(self, num_new: int, copies: int) -> int:
        """About what keys and values of `num_new` tokens more and `copies` of each row take."""

    def idle(self) -> None:
        """A forward pass of which nothing comes: the last token again, of one row.

        There is no way back to the others.
        """
        if self._num_rows > 1:
            self._select(torch.zeros(1, dtype=torch.long, device=self.prefix.device))
            self._last = self._last[:1]
        self.cache.truncate(self.cache.length - 1)
        self._forward(self._last[:, None])

    def _select(self, rows: torch.Tensor) -> None:
        self._num_rows = len(rows)
        self.cache.select(rows)
        self._select_inputs(rows)

    @abc.abstractmethod
    def _select_inputs(self, rows: torch.Tensor) -> None:
        """Keep these rows of what the forward pass gets beside tokens and cache."""

    @abc.abstractmethod
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores (rows, vocab) after new tokens (rows, new)."""


def cache_bytes(model: torch.nn.Module, config: Any, num_layers: int, num_tokens: int) -> int:
    """What keys and values of so many tokens take, in all layers."""
    heads = getattr(config, "num_heads_kv", config.num_heads)
    itemsize = next(model.parameters()).dtype.itemsize
    return int(2 * num_layers * num_tokens * heads * config.dim_head * itemsize)


def select_rows(tensor: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """These rows, of a tensor that may not be there."""
    return None if tensor is None else tensor.index_select(0, rows)


def check_inputs(
    inputs: Mapping[str, torch.Tensor], known: Iterable[str], like: torch.Tensor | None, model: str
) -> None:
    """Refuse inputs that a model does not take.

    Args:
        inputs: by name.
        known: the names that it takes.
        like: what they must have the shape of; None for no such demand.
        model: its name, for the message.

    Raises:
        InputError: naming them, and what is expected.
    """
    unknown = sorted(set(inputs) - set(known))
    if unknown:
        expected = ", ".join(sorted(known)) or "none"
        raise InputError(
            f"{model} does not take the inputs {', '.join(unknown)} in generation: "
            f"expected {expected}."
        )
    for name, value in inputs.items():
        if like is not None and value.shape != like.shape:
            raise InputError(
                f"{name} has shape {tuple(value.shape)}: expected that of input_ids, "
                f"{tuple(like.shape)}."
            )
