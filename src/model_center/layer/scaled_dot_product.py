"""The arithmetic of attention: fused kernels, or explicit for the probabilities."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.kernels import DTYPES, is_fused
from model_center.kernels.cached_attention import NewToken, cached_attention, extended_attention
from model_center.layer.cache import LayerCache
from model_center.layer.mask import AttentionMask
from model_center.layer.position_embedding.rotary import RotaryTables


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask,
    bias: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """`softmax(scale q k^T + bias) v` over the keys that the mask shows.

    Args:
        query: (batch, heads, queries, dim_head).
        key, value: (batch, key heads, keys, dim_head); each serves heads / key heads queries'
            heads.
        mask: which keys are seen; plain causal attention and none at all cost no tensor.
        bias: added to the scores, broadcastable to (batch, heads, queries, keys).
        scale: 1 / sqrt(dim_head) if None.
        dropout_p: of the probabilities.

    Returns (batch, heads, queries, dim_head).
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_alike = query.dtype == key.dtype and query.dtype in DTYPES
    if mask.reach is not None and mask.window is None and bias is None and is_alike:
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return cached_attention(query[:, :, 0], key, value, mask.reach, factor)[:, :, None]
    if bias is None and mask.is_plain(num_queries, num_keys):
        causal, grouped = mask.hides_later_keys(num_queries), query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout_p,
            is_causal=causal,
            scale=scale,
            enable_gqa=grouped,
        )
    if mask.segments is not None and mask.is_packed(num_queries) and bias is None and not dropout_p:
        return bmt.nn.segment_attention(
            query, key, value, mask.segments, window=mask.window, scale=scale
        )
    mask = mask.materialized(num_queries, num_keys, query.device) if mask.blanks else mask
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    shown = score_mask(mask, bias, query, num_keys)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=shown, dropout_p=dropout_p, scale=scale
    )
    return mixed if mask.blind is None else mixed.masked_fill(mask.blind, 0)


def attend_to_new(
    projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: LayerCache,
    tables: RotaryTables | None,
    mask: AttentionMask,
    *,
    scale: float,
) -> torch.Tensor | None:
    """A token of each row turned, written to a fixed cache and attended from, in one kernel.

    Args:
        projected: queries (batch, heads, 1, dim_head), and keys and values of as many tokens.
        cache: where they go.
        tables: of their positions; None for none.
        mask: with a reach, and materialized.
        scale: of the scores.

    Returns (batch, heads, 1, dim_head); None if that has to be done one after the other.
    """
    query, key, value = projected
    if cache.fixed is None or mask.reach is None or mask.window is not None:
        return None
    keys, values, place = cache.fixed
    is_beside = key.shape[:2] == keys.shape[:2] and query.shape[2] == 1
    if not (is_beside and is_fused(query, key, value, keys, values)):
        return None
    new = NewToken(key=key[:, :, 0], value=value[:, :, 0], place=place)
    if tables is not None:
        cos, sin = (table.flatten(0, -2) for table in (tables.cos, tables.sin))
        new = dataclasses.replace(new, cos=cos, sin=sin, interleaved=tables.interleaved)
    return extended_attention(query[:, :, 0], keys, values, mask.reach, scale, new)[:, :, None]


def attend_visibly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask,
    bias: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, with the probabilities (batch, heads, queries, keys) before dropout as well."""
    mask = mask.materialized(query.shape[2], key.shape[2], query.device) if mask.blanks else mask
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-1, -2)
    shown = score_mask(mask, bias, query, key.shape[2])
    if shown is not None:
        scores = (
            scores.masked_fill(~shown, -math.inf) if shown.dtype == torch.bool else scores + shown
        )
    probabilities = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    if mask.blind is not None:
        probabilities = probabilities.masked_fill(mask.blind, 0)
    return F.dropout(probabilities, dropout_p) @ value, probabilities


def score_mask(
    mask: AttentionMask, bias: torch.Tensor | None, query: torch.Tensor, num_keys: int
) -> torch.Tensor | None:
    """`attn_mask` of torch's attention: bool (True is seen), or summands of scores."""
    if bias is None:
        return mask.visible(query.shape[2], num_keys, query.device)
    return biased(mask, bias, query.dtype, (query.shape[2], num_keys))


def biased(
    mask: AttentionMask, bias: torch.Tensor, dtype: torch.dtype, pairs: tuple[int, int]
) -> torch.Tensor:
    """The bias, -inf where the mask hides one of the (queries, keys) `pairs`."""
    visible = mask.visible(*pairs, bias.device)
    return bias.to(dtype) if visible is None else bias.to(dtype).masked_fill(~visible, -math.inf)


def repeat_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(batch, key heads, keys, dim) to (batch, num_heads, keys, dim), heads repeated."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)
