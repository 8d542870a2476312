"""Multi-head attention with ModelCenter's arguments and parameter names."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from model_center.errors import ConfigError, InputError
from model_center.layer.cache import KeyValues, LayerCache
from model_center.layer.layernorm import LayerNorm
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask, last_queries, mask_from
from model_center.layer.position_embedding.rotary import Rotary, RotaryTables
from model_center.layer.scaled_dot_product import attend, attend_visibly
from model_center.layer.variant import PLAIN, LayerVariant

PositionBias = torch.Tensor | RotaryTables | Rotary
POSITION_BIASES = ("none", "relative", "rotary")


class Attention(torch.nn.Module):
    """Attention of queries (batch, queries, dim_in) over keys (batch, keys, dim_in).

    Args:
        dim_in, dim_out: widths in and out; `dim_out` is `dim_in` if None.
        dim_head, num_heads: of queries.
        dtype: of parameters and computation.
        int8: an error if true.
        init_mean, init_std: of the first weights.
        bias: whether the linear maps have one.
        mask_value: accepted; hidden keys always have the weight 0.
        pos_bias_type: "none", "relative" (a bias added to scores) or "rotary".
        length_scale: divide products by the square root of their length, as in `Linear`.
        attn_scale: divide scores by sqrt(dim_head).
        dropout_p: of the attention probabilities.
        num_heads_kv: heads of keys and values, each shared by num_heads / num_heads_kv query heads;
            -1 for num_heads.
        variant: what no argument of ModelCenter says.

    Source: Vaswani et al., "Attention Is All You Need" (2017); Ainslie et al., "GQA" (2023).
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_in: int,
        dim_head: int,
        num_heads: int,
        dim_out: int | None = None,
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 0.02,
        bias: bool = False,
        mask_value: float = -math.inf,
        pos_bias_type: str = "none",
        length_scale: bool = False,
        attn_scale: bool = False,
        dropout_p: float = 0,
        num_heads_kv: int = -1,
        *,
        variant: LayerVariant = PLAIN,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv == -1 else num_heads_kv
        check_heads(num_heads, num_heads_kv, pos_bias_type)
        self.dim_head, self.num_heads, self.num_heads_kv = dim_head, num_heads, num_heads_kv
        self.pos_bias_type, self.dropout_p = pos_bias_type, dropout_p
        self.scale = 1 / math.sqrt(dim_head) if attn_scale else 1.0
        linear = functools.partial(
            Linear,
            length_scale=length_scale,
            dtype=dtype,
            int8=int8,
            init_mean=init_mean,
            init_std=init_std,
            bias=bias,
        )
        self.project_q = linear(dim_in, num_heads * dim_head)
        self.project_k = linear(dim_in, num_heads_kv * dim_head)
        self.project_v = linear(dim_in, num_heads_kv * dim_head)
        out_bias = bias if variant.out_bias is None else variant.out_bias
        self.attention_out = linear(
            num_heads * dim_head, dim_in if dim_out is None else dim_out, bias=out_bias
        )
        self.norm_q: LayerNorm | None = None
        self.norm_k: LayerNorm | None = None
        if variant.head_norm_eps is not None:
            self.norm_q = LayerNorm(dim_head, dtype, bias=False, eps=variant.head_norm_eps)
            self.norm_k = LayerNorm(dim_head, dtype, bias=False, eps=variant.head_norm_eps)

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
            use_cache: whether to return the keys and values.
            past_key_value: those of earlier tokens.
            output_attentions: whether to return the probabilities, for which the slower, explicit
                computation is used.

        Returns (batch, queries, dim_out), followed by the cache and the probabilities (batch,
        heads, queries, keys) where asked.
        """
        cache = _cache_from(past_key_value) if use_cache or past_key_value is not None else None
        q, key, value = self._project(query, key_value, cache)
        tables = self._tables(position_bias, q, cache)
        if tables is not None:
            q, key = tables.rotate(q), key if key_value is None else tables.rotate(key)
        if cache is not None and key_value is not None:
            key, value = cache.append(key, value)
        bias = (
            position_bias
            if self.pos_bias_type == "relative" and isinstance(position_bias, torch.Tensor)
            else None
        )
        compute = attend_visibly if output_attentions else attend
        dropout_p = self.dropout_p if self.training else 0.0
        mask = last_queries(mask_from(attention_mask), q.shape[2])
        mixed = compute(q, key, value, mask, bias, scale=self.scale, dropout_p=dropout_p)
        mixed, probabilities = mixed if isinstance(mixed, tuple) else (mixed, None)
        out = self.attention_out(mixed.transpose(1, 2).flatten(2))
        extras = ((cache,) if use_cache else ()) + ((probabilities,) if output_attentions else ())
        return (out, *extras) if extras else out

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
        """Queries, keys and values, each (batch, heads, tokens, dim_head), without positions;
        without new keys, those cached.
        """
        if key_value is not None:
            q, key, value = (
                self.project_q(query),
                self.project_k(key_value),
                self.project_v(key_value),
            )
        elif cache is not None:
            return self._queries(self.project_q(query)), cache[0], cache[1]
        else:
            raise InputError(
                "attention got neither key_value nor past_key_value: there is nothing to attend to."
            )
        key = self._split(key, self.num_heads_kv)
        return (
            self._queries(q),
            key if self.norm_k is None else self.norm_k(key),
            self._split(value, self.num_heads_kv),
        )

    def _queries(self, projected: torch.Tensor) -> torch.Tensor:
        q = self._split(projected, self.num_heads)
        return q if self.norm_q is None else self.norm_q(q)


def _cache_from(past: LayerCache | KeyValues | None) -> LayerCache:
    if past is None:
        return LayerCache()
    return past if isinstance(past, LayerCache) else LayerCache.of(past[0], past[1])


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
