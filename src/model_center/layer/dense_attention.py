"""Multi-head attention with ModelCenter's arguments and parameter names."""

from __future__ import annotations

import math
from typing import Any

import torch

from model_center.errors import ConfigError, InputError
from model_center.layer.cache import KeyValues, LayerCache, layer_of
from model_center.layer.decode_row import fused_row_linear, is_unmodified
from model_center.layer.layernorm import LayerNorm
from model_center.layer.mask import AttentionMask, last_queries, mask_from
from model_center.layer.options import DTYPE, SCALES, AttentionOptions, takes
from model_center.layer.position_embedding.rotary import Rotary, RotaryTables
from model_center.layer.scaled_dot_product import attend, attend_to_new, attend_visibly

PositionBias = torch.Tensor | RotaryTables | Rotary
POSITION_BIASES = ("none", "relative", "rotary")


class Attention(torch.nn.Module):
    """Attention of queries (batch, queries, dim_in) over keys (batch, keys, dim_in).

    The arguments are those of `AttentionOptions`.

    Source: Vaswani et al., "Attention Is All You Need" (2017); Ainslie et al., "GQA" (2023).
    """

    @takes(
        "dim_in dim_head num_heads",
        *("dim_out", DTYPE, "init_mean init_std bias mask_value pos_bias_type", SCALES),
        "num_heads_kv",
        by_name="variant",
        kind=AttentionOptions,
    )
    def __init__(self, options: AttentionOptions) -> None:
        super().__init__()
        dim_in, dim_head, num_heads = options.dim_in, options.dim_head, options.num_heads
        num_heads_kv = num_heads if options.num_heads_kv == -1 else options.num_heads_kv
        check_heads(num_heads, num_heads_kv, options.pos_bias_type)
        self.dim_head, self.num_heads, self.num_heads_kv = dim_head, num_heads, num_heads_kv
        self.pos_bias_type, self.dropout_p = options.pos_bias_type, options.dropout_p
        self.scale = 1 / math.sqrt(dim_head) if options.attn_scale else 1.0
        self.project_q = options.linear(dim_in, num_heads * dim_head)
        self.project_k = options.linear(dim_in, num_heads_kv * dim_head)
        self.project_v = options.linear(dim_in, num_heads_kv * dim_head)
        dim_out = dim_in if options.dim_out is None else options.dim_out
        self.attention_out = options.linear(num_heads * dim_head, dim_out, options.variant.out_bias)
        self.norm_q: LayerNorm | None = None
        self.norm_k: LayerNorm | None = None
        eps = options.variant.head_norm_eps
        if eps is not None:
            self.norm_q = LayerNorm(dim_head, options.dtype, bias=False, eps=eps)
            self.norm_k = LayerNorm(dim_head, options.dtype, bias=False, eps=eps)

    def forward(
        self,
        query: torch.Tensor,
        key_value: torch.Tensor | None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        position_bias: PositionBias | None = None,
        use_cache: bool = False,
        past_key_value: LayerCache | KeyValues | None = None,
        output_attentions: bool = False,
    ) -> Any:
        """Attend.

        Args:
            query: (batch, queries, dim_in).
            key_value: (batch, new keys, dim_in); None for those of `past_key_value` alone.
            attention_mask: bool (batch, queries, keys), (batch, keys), or a mask; keys are past and
                new ones.
            position_bias: with "relative", numbers broadcastable to (batch, heads, queries, keys)
                or (heads, queries, keys); with "rotary", the tables of the new positions, or the
                module, which counts them from the past keys on.
            use_cache: whether to return the keys and values, as a pair.
            past_key_value: those of earlier tokens: a pair, which is not changed, or a LayerCache,
                to which the new ones are added, and which is returned.
            output_attentions: whether to return the probabilities, for which the slower, explicit
                computation is used.

        Returns (batch, queries, dim_out), followed by the cache and the probabilities (batch,
        heads, queries, keys) where asked.
        """
        cache = layer_of(past_key_value) if use_cache or past_key_value is not None else None
        projected = self._project(query, key_value, cache)
        mixed, probabilities = self._mix(
            *projected,
            cache=cache,
            are_new=key_value is not None,
            mask=mask_from(attention_mask),
            position_bias=position_bias,
            output_attentions=output_attentions,
        )
        out = self.attention_out(mixed)
        extras: tuple[Any, ...] = (probabilities,) if output_attentions else ()
        if use_cache and cache is not None:
            extras = (cache if cache is past_key_value else cache.pair, *extras)
        return (out, *extras) if extras else out

    def of_row(
        self,
        x: torch.Tensor,
        norm: torch.nn.Module,
        mask: torch.Tensor | AttentionMask | None,
        position_bias: PositionBias | None,
        cache: LayerCache,
    ) -> torch.Tensor | None:
        """`x + self(norm(x))` of one row (1, 1, dim_in), added to the cache; None if it must be
        called itself. Arguments as of `forward`.
        """
        if not is_unmodified(self, Attention):
            return None
        found = fused_row_linear(x, [self.project_q, self.project_k, self.project_v], norm=norm)
        if found is None:
            return None
        of_keys = self.num_heads_kv * self.dim_head
        mixed, _ = self._mix(
            *self._heads(*found.split([self.num_heads * self.dim_head, of_keys, of_keys], -1)),
            cache=cache,
            are_new=True,
            mask=mask_from(mask),
            position_bias=position_bias,
        )
        out = fused_row_linear(mixed, [self.attention_out], residual=x)
        return x + self.attention_out(mixed) if out is None else out

    def _mix(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cache: LayerCache | None,
        are_new: bool,
        mask: AttentionMask,
        position_bias: PositionBias | None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values (batch, queries, heads * dim_head), mixed by attention, and its probabilities.

        Args:
            q, key, value: as from `_project`.
            cache: where keys and values that `are_new` are added.
            Others: as of `forward`.
        """
        tables = self._tables(position_bias, q, cache)
        mask = last_queries(mask, q.shape[2])
        bias = None
        if self.pos_bias_type == "relative" and isinstance(position_bias, torch.Tensor):
            bias = position_bias
        if cache is not None and are_new and bias is None and not output_attentions:
            at_once = attend_to_new((q, key, value), cache, tables, mask, scale=self.scale)
            if at_once is not None:
                return at_once.transpose(1, 2).flatten(2), None
        if tables is not None and are_new:
            q, key = tables.rotate_both(q, key)
        elif tables is not None:
            q = tables.rotate(q)
        if cache is not None and are_new:
            key, value = cache.append(key, value)
        compute = attend_visibly if output_attentions else attend
        dropout_p = self.dropout_p if self.training else 0.0
        mixed = compute(q, key, value, mask, bias, scale=self.scale, dropout_p=dropout_p)
        mixed, probabilities = mixed if isinstance(mixed, tuple) else (mixed, None)
        return mixed.transpose(1, 2).flatten(2), probabilities

    def _split(self, x: torch.Tensor, num_heads: int) -> torch.Tensor:
        # The function, not the method: the compiler cannot look into that one while the program has
        # a default device.
        return torch.unflatten(x, -1, (num_heads, self.dim_head)).transpose(1, 2)

    def _tables(
        self, position_bias: PositionBias | None, query: torch.Tensor, cache: LayerCache | None
    ) -> RotaryTables | None:
        if self.pos_bias_type != "rotary":
            return None
        if isinstance(position_bias, Rotary):
            start = 0 if cache is None else cache.length
            return position_bias.tables(
                torch.arange(start, start + query.shape[2], device=query.device)
            )
        if isinstance(position_bias, RotaryTables):
            return position_bias
        raise InputError(
            f"position_bias is {type(position_bias).__name__}: rotary attention needs "
            "a RotaryEmbedding or its tables."
        )

    def _project(
        self, query: torch.Tensor, key_value: torch.Tensor | None, cache: LayerCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (batch, heads, tokens, dim_head), unrotated; or cached ones."""
        if key_value is not None:
            return self._heads(
                self.project_q(query), self.project_k(key_value), self.project_v(key_value)
            )
        if cache is not None:
            return self._queries(self.project_q(query)), cache[0], cache[1]
        raise InputError(
            "attention got neither key_value nor past_key_value: there is nothing to attend to."
        )

    def _heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the linear maps made, by heads."""
        key = self._split(key, self.num_heads_kv)
        return (
            self._queries(query),
            key if self.norm_k is None else self.norm_k(key),
            self._split(value, self.num_heads_kv),
        )

    def _queries(self, projected: torch.Tensor) -> torch.Tensor:
        q = self._split(projected, self.num_heads)
        return q if self.norm_q is None else self.norm_q(q)


def check_heads(num_heads: int, num_heads_kv: int, pos_bias_type: str) -> None:
    """Refuse what attention cannot be built of.

    Raises:
        ConfigError: naming the value.
    """
    if num_heads_kv < 1 or num_heads % num_heads_kv:
        raise ConfigError(
            f"num_heads_kv is {num_heads_kv}: expected -1 or a divisor of num_heads={num_heads}."
        )
    if pos_bias_type not in POSITION_BIASES:
        raise ConfigError(
            f"pos_bias_type is {pos_bias_type!r}: expected one of {', '.join(POSITION_BIASES)}."
        )
