"""Longformer's attention: a window around every token, and a few tokens that see all.

Source: Beltagy et al., "Longformer: The Long-Document Transformer" (2020).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from model_center.errors import ConfigError, InputError
from model_center.layer.dense_attention import Attention
from model_center.layer.mask import AttentionMask
from model_center.layer.options import DTYPE, SCALES, AttentionOptions, takes
from model_center.layer.scaled_dot_product import attend, attend_visibly


class SparseMask(NamedTuple):
    """Which tokens there are, made once for all layers of a pass.

    Attributes:
        valid: bool (batch, seq), False where a token is padding.
        is_global: bool (batch, seq), the tokens among those that see and are seen by all.
        places: int64 (batch, globals): where the global tokens are. Rows that have fewer are filled
            up with other places.
        is_used: bool (batch, globals), False where a place is such a filling.
    """

    valid: torch.Tensor
    is_global: torch.Tensor
    places: torch.Tensor
    is_used: torch.Tensor


def sparse_mask(valid: torch.Tensor, is_global: torch.Tensor | None = None) -> SparseMask:
    """The mask for bool tensors (batch, seq).

    The number of global tokens is a shape: on a GPU, the program waits for it.
    """
    is_global = torch.zeros_like(valid) if is_global is None else is_global & valid
    count = int(is_global.sum(1).max()) if is_global.numel() else 0
    places = is_global.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return SparseMask(valid, is_global, places, is_global.gather(1, places))


class SparseSelfAttention(Attention):
    """Self-attention of (batch, seq, dim_in) within a window; memory grows linearly with seq.

    A token sees the tokens up to half a window before and after it and all global tokens. A global
    token sees all tokens, by three projections of its own.

    Args: see `AttentionOptions`.

        attention_window: width of the window, half of it on each side; even.
        pos_bias_type: "none".
        attn_scale: accepted; scores are always divided by sqrt(dim_head), as in ModelCenter.
    """

    @takes(
        *("", "attention_window"),
        by_name=f"dim_in dim_head num_heads dim_out {DTYPE} init_mean init_std bias mask_value "
        f"pos_bias_type {SCALES}",
        kind=AttentionOptions,
    )
    def __init__(self, options: AttentionOptions) -> None:
        window, kind = options.attention_window, options.pos_bias_type
        if window < 2 or window % 2:
            raise ConfigError(f"attention_window is {window}: expected a positive even number.")
        if kind != "none":
            raise ConfigError(f"pos_bias_type is {kind!r}: sparse attention takes 'none' only.")
        super().__init__(options)
        self.attention_window, self.scale = window, 1 / math.sqrt(options.dim_head)
        sizes = options.dim_in, options.num_heads * options.dim_head
        self.project_q_global = options.linear(*sizes)
        self.project_k_global = options.linear(*sizes)
        self.project_v_global = options.linear(*sizes)

    def forward(  # type: ignore[override]  # one sequence is queries and keys
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | SparseMask | None = None,
        position_bias: None = None,
        use_cache: bool = False,
        past_key_value: None = None,
        output_attentions: bool = False,
    ) -> Any:
        """Attend.

        Args:
            hidden_states: (batch, seq, dim_in), seq of any length.
            attention_mask: numbers (batch, seq), negative for padding, 0 for a token that sees its
                window, positive for a global one; or the mask of a whole pass; None for windows
                only.
            position_bias: None.
            use_cache, past_key_value: not supported.
            output_attentions: whether to return the probabilities, for which memory grows
                quadratically with seq.

        Returns (batch, seq, dim_out), and the probabilities (batch, heads, seq, seq) where asked.

        Raises:
            InputError: for a cache.
        """
        if use_cache or past_key_value is not None:
            raise InputError(
                "sparse attention has no cache: leave use_cache and past_key_values out."
            )
        mask = mask_of_kinds(attention_mask, hidden_states)
        attend_to = self._attend_visibly if output_attentions else self._attend
        mixed, *probabilities = attend_to(hidden_states, mask)
        # What padding makes of nothing must not depend on how the sequence is cut, or on other
        # rows.
        mixed = mixed.masked_fill(~mask.valid[:, None, :, None], 0.0)
        out = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return (out, *probabilities) if output_attentions else out

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "dropout_p": self.dropout_p if self.training else 0.0}

    def _global_keys(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that global tokens see, each (batch, heads, seq, dim_head)."""
        k, v = self.project_k_global(hidden), self.project_v_global(hidden)
        return self._split(k, self.num_heads), self._split(v, self.num_heads)

    def _attend(self, hidden: torch.Tensor, mask: SparseMask) -> tuple[torch.Tensor]:
        """What all tokens see, (batch, heads, seq, dim_head)."""
        mixed = attend_in_window(
            *self._project(hidden, hidden, None), mask, self.attention_window // 2, **self._options
        )
        return (self._with_global_rows(mixed, hidden, mask) if mask.places.shape[1] else mixed,)

    def _with_global_rows(
        self, mixed: torch.Tensor, hidden: torch.Tensor, mask: SparseMask
    ) -> torch.Tensor:
        """`mixed` with the rows of global tokens replaced by what those see."""
        chosen = hidden.gather(1, mask.places[..., None].expand(-1, -1, hidden.shape[2]))
        query = self._split(self.project_q_global(chosen), self.num_heads)
        seen = attend(
            query, *self._global_keys(hidden), AttentionMask(keys=mask.valid), **self._options
        )
        places = _of_heads(mask.places, mixed)
        # Places are distinct within a row, so that nothing is written twice; fillings keep what
        # they have.
        return mixed.scatter(
            2, places, torch.where(mask.is_used[:, None, :, None], seen, mixed.gather(2, places))
        )

    def _attend_visibly(
        self, hidden: torch.Tensor, mask: SparseMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_attend`, with the probabilities: over all pairs of tokens."""
        place = torch.arange(hidden.shape[1], device=hidden.device)
        near = (place[:, None] - place).abs() <= self.attention_window // 2
        pairs = (near & mask.valid[:, None, :]) | mask.is_global[:, None, :]
        mixed, probabilities = attend_visibly(
            *self._project(hidden, hidden, None),
            AttentionMask(pairs=pairs[:, None]),
            **self._options,
        )
        if not mask.places.shape[1]:
            return mixed, probabilities
        query = self._split(self.project_q_global(hidden), self.num_heads)
        of_global = attend_visibly(
            query, *self._global_keys(hidden), AttentionMask(keys=mask.valid), **self._options
        )
        chosen = mask.is_global[:, None, :, None]
        return torch.where(chosen, of_global[0], mixed), torch.where(
            chosen, of_global[1], probabilities
        )


def mask_of_kinds(
    attention_mask: torch.Tensor | SparseMask | None, hidden: torch.Tensor
) -> SparseMask:
    """The mask that an argument `attention_mask` means for hidden states (batch, seq, dim).

    Raises:
        InputError: for a tensor of another shape.
    """
    if isinstance(attention_mask, SparseMask):
        return attention_mask
    if attention_mask is None:
        return sparse_mask(torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device))
    if attention_mask.shape != hidden.shape[:2]:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected (batch, "
            f"seq) = {tuple(hidden.shape[:2])}."
        )
    return sparse_mask(attention_mask >= 0, attention_mask > 0)


def attend_in_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SparseMask,
    reach: int,
    *,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """Attention to the `reach` tokens before and after each, and to all global ones.

    The sequence is cut into chunks of `reach` queries, each of which needs the keys of its own
    chunk and of the two beside it.

    Args:
        query, key, value: (batch, heads, seq, dim_head).

    Returns (batch, heads, seq, dim_head).
    """
    batch, _, seq, _ = query.shape
    chunks = -(-seq // reach)
    missing = chunks * reach - seq
    padded = F.pad(query, (0, 0, 0, missing))
    queries = torch.unflatten(padded, 2, (chunks, reach)).transpose(1, 2).flatten(0, 1)
    keys, values = (
        torch.cat(
            [
                _neighbourhoods(x, reach, missing),
                _repeated(x.gather(2, _of_heads(mask.places, x)), chunks),
            ],
            2,
        )
        for x in (key, value)
    )
    near = _window_pairs(mask, reach, missing)
    is_used = mask.is_used[:, None, None, None, :].expand(batch, chunks, 1, reach, -1).flatten(0, 1)
    seen = AttentionMask(pairs=torch.cat([near, is_used], -1))
    mixed = attend(queries, keys, values, seen, scale=scale, dropout_p=dropout_p)
    return torch.unflatten(mixed, 0, (batch, chunks)).transpose(1, 2).flatten(2, 3)[:, :, :seq]


def _neighbourhoods(x: torch.Tensor, reach: int, missing: int) -> torch.Tensor:
    """(batch, heads, seq, dim) to (batch * chunks, heads, 3 * reach, dim), with neighbours."""
    padded = F.pad(x, (0, 0, reach, reach + missing))
    return padded.unfold(2, 3 * reach, reach).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _repeated(x: torch.Tensor, chunks: int) -> torch.Tensor:
    """(batch, heads, globals, dim) to (batch * chunks, heads, globals, dim)."""
    return x[:, None].expand(-1, chunks, -1, -1, -1).flatten(0, 1)


def _window_pairs(mask: SparseMask, reach: int, missing: int) -> torch.Tensor:
    """bool (batch * chunks, 1, reach, 3 * reach): the keys each query sees, no global ones."""
    there = F.pad(mask.valid & ~mask.is_global, (reach, reach + missing)).unfold(
        1, 3 * reach, reach
    )
    query, key = (
        torch.arange(reach, device=there.device),
        torch.arange(3 * reach, device=there.device),
    )
    near = (key - reach - query[:, None]).abs() <= reach
    return (near & there[:, :, None, None, :]).flatten(0, 1)


def _of_heads(places: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Places (batch, globals) as an index (batch, heads, globals, dim) into `like`."""
    return places[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])
