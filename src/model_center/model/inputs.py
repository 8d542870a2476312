"""What the forward passes of all models do with their arguments first."""

from __future__ import annotations

from typing import Any

import torch

from model_center.errors import InputError
from model_center.layer.cache import KeyValueCache
from model_center.layer.mask import AttentionMask, mask_from, mask_of_lengths
from model_center.layer.transformer import Past

Offset = int | torch.Tensor


def embedded(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    embedding: torch.nn.Module,
    what: str = "input",
) -> torch.Tensor:
    """Hidden states (batch, seq, dim_model) of ids (batch, seq), or those given in their place,
    which count where both are given, as in ModelCenter.

    Raises:
        InputError: for neither, or another number of dims or of tokens.
    """
    if input_ids is None and inputs_embeds is None:
        raise InputError(f"give either {what}_ids or {what}s_embeds: got neither.")
    if input_ids is not None and input_ids.dim() != 2:
        raise InputError(f"{what}_ids has shape {tuple(input_ids.shape)}: expected (batch, seq).")
    if inputs_embeds is None:
        rows: torch.Tensor = embedding(input_ids)
        return rows
    shape = tuple(inputs_embeds.shape)
    if len(shape) != 3 or (input_ids is not None and shape[:2] != tuple(input_ids.shape)):
        tokens = "batch, seq" if input_ids is None else f"{len(input_ids)}, {input_ids.shape[1]}"
        raise InputError(f"{what}s_embeds has shape {shape}: expected ({tokens}, dim_model).")
    return inputs_embeds


def needs_dict(return_dict: bool, asked: object) -> None:
    """Say that a model which returns scores alone was asked for more.

    Raises:
        InputError: naming the remedy.
    """
    if asked and not return_dict:
        raise InputError(
            "this model returns its scores alone, as a tensor: give return_dict=True for a cache, "
            "hidden states or attentions."
        )


def past_length(past_key_values: Past) -> int:
    """Number of tokens that went through the model before."""
    if past_key_values is None or isinstance(past_key_values, KeyValueCache):
        return 0 if past_key_values is None else past_key_values.length
    return KeyValueCache.of(past_key_values, len(past_key_values)).length


def past_position(past_key_values: Past) -> Offset:
    """The same, or of a cache that is fixed the tensor that says it."""
    if isinstance(past_key_values, KeyValueCache):
        return past_key_values.next_position
    return past_length(past_key_values)


def attention_mask_of(
    attention_mask: torch.Tensor | AttentionMask | None,
    length: torch.Tensor | None,
    hidden: torch.Tensor,
    start: Offset = 0,
    *,
    causal: bool = False,
    length_counts: bool = False,
) -> AttentionMask:
    """The mask of a model from its arguments; of both, `attention_mask` counts, as in ModelCenter.

    Args:
        attention_mask: (batch, num_keys), nonzero where a token is valid, or (batch, queries,
            num_keys), used as it is; any dtype.
        length: integers (batch,), the number of valid tokens at the start of each row: an
            alternative to the mask, and where attention is causal one that costs nothing, since no
            valid token sees what is behind it.
        hidden: (batch, seq, dim_model), the new tokens.
        start: the tokens in front of them, of a cache. The keys are those and the new ones.
        causal: whether keys after a query are hidden.
        length_counts: whether of both `length` counts instead, as in ModelCenter's Llama.

    Raises:
        InputError: for a mask of another length, or a `length` that is not of numbers (batch,).
    """
    if isinstance(attention_mask, AttentionMask) and not (length is not None and length_counts):
        return attention_mask
    num_keys = int(start + hidden.shape[1])
    if length is not None and (attention_mask is None or length_counts):
        _check_length(length, hidden.shape[0])
        return AttentionMask(causal, keys=None if causal else mask_of_lengths(length, num_keys))
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape[-1] != num_keys:
        shape = tuple(attention_mask.shape)
        raise InputError(
            f"attention_mask has shape {shape}: expected {num_keys} keys, those of the "
            "cache and the new ones."
        )
    return mask_from(attention_mask, causal=causal)


def _check_length(length: object, num_rows: int) -> None:
    """InputError unless it is a tensor (num_rows,) of real numbers."""
    if not isinstance(length, torch.Tensor):
        raise InputError(f"length is of type {type(length).__name__}: expected a tensor (batch,).")
    if length.shape != (num_rows,) or length.is_complex():
        raise InputError(
            f"length is of shape {tuple(length.shape)}: expected ({num_rows},), a real number for "
            "each row."
        )


def positions_from(
    position_ids: torch.Tensor | None,
    start: Offset,
    hidden: torch.Tensor,
    table_size: int | None = None,
) -> torch.Tensor:
    """Positions of the new tokens, (seq,) or (batch, seq).

    Args:
        position_ids: (batch, seq) or, with a cache, of all tokens so far, which is cut to the new
            ones; None to count from `start` on.
        start: number of earlier tokens; a tensor int64 (1,) where only the device knows it.
        hidden: (batch, seq, dim_model).
        table_size: rows of the table of positions.

    Raises:
        InputError: for a sequence longer than the table.
    """
    if position_ids is not None:
        return position_ids[..., -hidden.shape[1] :]
    if isinstance(start, torch.Tensor):
        return start + torch.arange(hidden.shape[1], device=hidden.device)
    end = start + hidden.shape[1]
    if table_size is not None and end > table_size:
        raise InputError(
            f"the sequence has {end} tokens: the model's table of positions has {table_size}."
        )
    return torch.arange(start, end, device=hidden.device)


def positions_after_padding(
    input_ids: torch.Tensor | None,
    start: int,
    hidden: torch.Tensor,
    valid: torch.Tensor | None,
    config: Any,
) -> torch.Tensor:
    """Positions of new tokens as RoBERTa counts them, without padding, (seq,) or (batch, seq).

    The first token has position `pad_token_id` + 1, padding itself has `pad_token_id`. Without ids
    all tokens count.

    Args:
        input_ids: (batch, seq), integers.
        start: number of earlier tokens.
        hidden: (batch, seq, dim_model).
        valid: bool (batch, start + seq), which tokens are none of the padding: says how many of the
            earlier ones count.
        config: has `pad_token_id` and `position_size`.

    Raises:
        InputError: for a sequence longer than the table of positions, or without `pad_token_id`.
    """
    pad, end = config.pad_token_id, start + hidden.shape[1]
    if pad is None:
        raise InputError(
            "pad_token_id is None: this model counts positions from it on; set it in the "
            "configuration."
        )
    if pad + end >= config.position_size:
        longest = config.position_size - pad - 1
        raise InputError(
            f"the sequence has {end} tokens: the model's table of positions is for "
            f"{longest} at most."
        )
    if input_ids is None:
        return torch.arange(pad + 1 + start, pad + 1 + end, device=hidden.device)
    counts = input_ids != pad
    earlier = start if valid is None else valid[:, :start].sum(1, keepdim=True)
    return (counts.cumsum(1) + earlier) * counts + pad
