"""Which keys a query may see, as facts; a tensor of all pairs is made only where needed."""

from __future__ import annotations

from typing import NamedTuple

import torch

import bmtrain as bmt
from model_center.errors import InputError


class AttentionMask(NamedTuple):
    """A query sees a key if all that is given here allows it.

    A NamedTuple, since it travels through blocks, compiled ones too, as a container of tensors.

    Attributes:
        causal: keys after the query are hidden. The queries are the last ones of the keys, so that
            a cache of keys works.
        keys: bool (batch, keys), False where a key is padding; None where none is.
        pairs: bool (batch or 1, heads or 1, queries, keys); None where the others say it all.
        window: with `causal`, the number of last keys that a query sees, itself included (sliding
            window); None for all.
        blanks: whether a query that sees no key gets zeros, as in ModelCenter; else it is taken for
            padding, which may get anything.
        blind: with `blanks` and once materialized, the queries that see no key: bool (batch or 1,
            heads or 1, queries, 1).
        is_materialized: whether `pairs` is what `visible` would make of all of it.
        segments: with `causal`, integers (batch, keys): of packed rows. A query sees its own run of
            equal numbers. On a GPU no tensor of pairs is made of them.
        reach: int64 (2, batch): the first key that the one query of each row sees, and the one
            after the last. With it `causal` adds nothing. Numbers in the device's memory can differ
            between steps that are the same work.
    """

    causal: bool = False
    keys: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    window: int | None = None
    blanks: bool = False
    blind: torch.Tensor | None = None
    is_materialized: bool = False
    reach: torch.Tensor | None = None
    segments: torch.Tensor | None = None

    def is_plain(self, num_queries: int, num_keys: int) -> bool:
        """Whether "causal" or "everything" says it all."""
        if (
            self.keys is not None
            or self.pairs is not None
            or self.reach is not None
            or self.segments is not None
            or (self.window is not None and self.window < num_keys)
        ):
            return False
        # A set would ask for hashes, for which the compiler specialises to the lengths at hand.
        return not self.causal or num_queries in (1, num_keys)

    def is_packed(self, num_queries: int) -> bool:
        """Whether "causal within segments, perhaps in a window" says it all, for whole rows."""
        return (
            self.segments is not None
            and self.segments.shape[1] == num_queries
            and self.causal
            and self.keys is None
            and self.pairs is None
        )

    def hides_later_keys(self, num_queries: int) -> bool:
        """Whether causality hides a key from one of the queries: the last sees all.

        A branch, so that it is a bool where the compiler takes lengths for symbols.
        """
        return self.causal if num_queries > 1 else False

    def visible(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """bool, broadcastable to (batch, heads, queries, keys); None for everything.

        Where a query would see nothing it sees everything: a softmax over nothing would be NaN and
        spoil the gradients of all others. With `blanks`, zeros take the place of what comes of it.
        """
        if self.is_materialized:
            return self.pairs
        seen = self._seen(num_queries, num_keys, device)
        if seen is None or (self.keys is None and self.pairs is None):
            return seen
        return seen | ~seen.any(-1, keepdim=True)

    def _seen(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """As `visible`, but a query may see nothing."""
        if self.reach is not None:
            places = torch.arange(num_keys, device=device)
            first, end = self.bounds
            return ((places >= first[:, None]) & (places < end[:, None]))[:, None, None]
        seen = self.pairs
        if self.causal and (num_queries > 1 or self.window is not None):
            seen = _both(seen, causal_pairs(num_queries, num_keys, device, self.window))
        if self.segments is not None:
            first = bmt.nn.first_keys(self.segments)[:, None, -num_queries:, None]
            seen = _both(seen, torch.arange(num_keys, device=device) >= first)
        return seen if self.keys is None else _both(seen, self.keys[:, None, None, :])

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of `reach`, inside of the window.

        Raises:
            InputError: for a mask without `reach`.
        """
        if self.reach is None:
            raise InputError("the mask has no reach: it has no bounds either.")
        first, end = self.reach
        return first if self.window is None else torch.maximum(first, end - self.window), end

    def materialized(self, num_queries: int, num_keys: int, device: torch.device) -> AttentionMask:
        """The same mask with its tensor of pairs, if needed: made once for all layers."""
        if self.reach is not None and self.window is not None:
            return self._replace(reach=torch.stack(self.bounds), window=None)
        if self.reach is not None:
            return self
        if self.is_materialized or self.is_plain(num_queries, num_keys):
            return self
        if self.is_packed(num_queries) and device.type != "cpu":
            return self
        seen = self._seen(num_queries, num_keys, device)
        blind = None
        if seen is not None and (self.keys is not None or self.pairs is not None):
            nothing = ~seen.any(-1, keepdim=True)
            seen, blind = seen | nothing, nothing if self.blanks else None
        return self._replace(pairs=seen, blind=blind, is_materialized=True)


def causal_pairs(
    num_queries: int, num_keys: int, device: torch.device, window: int | None = None
) -> torch.Tensor:
    """bool (queries, keys): the queries are the last keys; each sees `window` keys up to itself."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    seen = ones.tril(num_keys - num_queries)
    return seen if window is None else seen.triu(num_keys - num_queries - window + 1)


def mask_from(
    attention_mask: torch.Tensor | AttentionMask | None, *, causal: bool = False
) -> AttentionMask:
    """The mask that an argument `attention_mask` of a layer or model means.

    Args:
        attention_mask: None for all valid; (batch, keys), nonzero where a key is valid; (batch,
            queries, keys) or (batch, heads, queries, keys), nonzero where a query sees a key, to
            which `causal` adds nothing; or a mask, taken as it is.
        causal: whether keys after a query are hidden.

    Raises:
        InputError: for another number of dims, or 4 dims of floating-point numbers, which elsewhere
            are added to scores.
    """
    if attention_mask is None:
        return AttentionMask(causal)
    if isinstance(attention_mask, AttentionMask):
        return attention_mask
    if attention_mask.dim() == 2:
        return AttentionMask(causal, keys=attention_mask.bool())
    if attention_mask.dim() == 3:
        return AttentionMask(pairs=attention_mask[:, None].bool(), blanks=True)
    if attention_mask.dim() == 4:
        if attention_mask.is_floating_point():
            raise InputError(
                "attention_mask has 4 dims of floating point: expected bool, True where a "
                "query attends to a key, not an additive mask."
            )
        return AttentionMask(pairs=attention_mask.bool(), blanks=True)
    shape = tuple(attention_mask.shape)
    raise InputError(
        f"attention_mask has shape {shape}: expected (batch, keys) or (batch, [heads,] "
        "queries, keys)."
    )


def mask_of_lengths(length: torch.Tensor, num_keys: int) -> torch.Tensor:
    """bool (batch, keys): the first `length` (batch,) keys are valid."""
    # In fp32, also where ModelCenter's programs give `torch.Tensor([n])`: fp16 rounds positions.
    return torch.arange(num_keys, device=length.device) < length[:, None].float()


def last_queries(mask: AttentionMask, num_queries: int) -> AttentionMask:
    """The mask for the last `num_queries` queries of those it was made for.

    Raises:
        InputError: if it was made for fewer.
    """
    # no set, as above
    if mask.pairs is None or mask.pairs.shape[-2] in (1, num_queries):
        return mask
    if mask.pairs.shape[-2] < num_queries:
        raise InputError(
            f"attention_mask is for {mask.pairs.shape[-2]} queries: expected {num_queries} "
            "of them, or all so far."
        )
    return mask._replace(pairs=mask.pairs[..., -num_queries:, :])


def _both(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one & other
