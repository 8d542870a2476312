"""The parts of a transformer layer, each with its norm and residual."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from model_center.layer.cache import KeyValues, LayerCache
from model_center.layer.dense_attention import Attention, PositionBias
from model_center.layer.feedforward import FeedForward
from model_center.layer.mask import AttentionMask
from model_center.layer.options import (
    ATTENTION,
    DTYPE,
    FFN,
    NORM,
    SCALES,
    SPARSE,
    LayerOptions,
    takes,
)
from model_center.layer.sparse_attention import SparseMask, SparseSelfAttention

Mask = torch.Tensor | AttentionMask | SparseMask | None
Past = LayerCache | KeyValues | None


class SelfAttentionBlock(torch.nn.Module):
    """`h + dropout(attention(norm(h)))`; with `post_layer_norm`, `norm(h) +
    dropout(attention(norm(h)))`.

    A network whose norms follow each part is written with each norm moved to the start of the next
    part, so that its last norm is the `output_layernorm` of the stack.

    Args: see `LayerOptions`.
    """

    @takes(
        "dim_model num_heads dim_head",
        *(DTYPE, NORM, ATTENTION, "pos_bias_type post_layer_norm", SCALES, SPARSE, "num_heads_kv"),
        by_name="variant",
    )
    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.layernorm_before_attention: torch.nn.Module = (
            options.norm() if options.variant.norms_input else torch.nn.Identity()
        )
        attention = options.attention()
        self.self_attention: Attention | SparseSelfAttention
        if options.sparse_attention:
            self.self_attention = SparseSelfAttention(
                dataclasses.replace(attention, attention_window=options.attention_window)
            )
        else:
            self.self_attention = Attention(
                dataclasses.replace(
                    attention, num_heads_kv=options.num_heads_kv, variant=options.variant
                )
            )
        self.post_layer_norm = options.post_layer_norm
        self.dropout = torch.nn.Dropout(options.dropout_p)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        position_bias: PositionBias | None = None,
        use_cache: bool = False,
        past_key_value: Past = None,
        output_attentions: bool = False,
        output_normed: bool = False,
    ) -> Any:
        """(batch, seq, dim_model) to the same, then cache, probabilities, normed input if asked."""
        normed = self.layernorm_before_attention(hidden_states)
        states = (
            (normed,) if isinstance(self.self_attention, SparseSelfAttention) else (normed, normed)
        )
        out = self.self_attention(
            *states, attention_mask, position_bias, use_cache, past_key_value, output_attentions
        )
        out, extras = split_extras(out)
        out = (normed if self.post_layer_norm else hidden_states) + self.dropout(out)
        extras = (*extras, normed) if output_normed else extras
        return (out, *extras) if extras else out


class CrossAttentionBlock(torch.nn.Module):
    """`h + dropout(attention(norm(h), key_value_states))`.

    Args: see `LayerOptions`.
    """

    @takes("dim_model num_heads dim_head", DTYPE, NORM, ATTENTION, "pos_bias_type", SCALES)
    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.layernorm_before_attention = options.norm()
        self.self_attention = Attention(options.attention())
        self.dropout = torch.nn.Dropout(options.dropout_p)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None,
        attention_mask: Mask = None,
        position_bias: PositionBias | None = None,
        use_cache: bool = False,
        past_key_value: Past = None,
        output_attentions: bool = False,
    ) -> Any:
        """(batch, seq, dim_model) to the same, over states (batch, keys, dim_model) of an encoder,
        which are not normalised.

        A `past_key_value` with content holds the keys of all of them, and `key_value_states` is not
        looked at.
        """
        is_known = past_key_value is not None and not (
            isinstance(past_key_value, LayerCache) and past_key_value.length == 0
        )
        out = self.self_attention(
            self.layernorm_before_attention(hidden_states),
            None if is_known else key_value_states,
            attention_mask,
            position_bias,
            use_cache,
            past_key_value,
            output_attentions=output_attentions,
        )
        out, extras = split_extras(out)
        out = hidden_states + self.dropout(out)
        return (out, *extras) if extras else out


class FFNBlock(torch.nn.Module):
    """`h + dropout(ffn(norm(h)))`; with `post_layer_norm`, `norm(h) + dropout(ffn(norm(h)))`.

    Args: see `LayerOptions`.
    """

    @takes("dim_model dim_ff", DTYPE, NORM, FFN, "post_layer_norm length_scale dropout_p")
    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.layernorm_before_ffn: torch.nn.Module = options.norm()
        self.ffn = FeedForward(
            options.dim_model,
            options.dim_ff,
            dtype=options.dtype,
            int8=options.int8,
            init_mean=options.ffn_init_mean,
            init_std=options.ffn_init_std,
            bias=options.ffn_bias,
            activate_fn=options.ffn_activate_fn,
            length_scale=options.length_scale,
        )
        self.post_layer_norm = options.post_layer_norm
        self.dropout = torch.nn.Dropout(options.dropout_p)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to the same."""
        normed = self.layernorm_before_ffn(hidden_states)
        return (normed if self.post_layer_norm else hidden_states) + self.added(normed)

    def added(self, normed: torch.Tensor) -> torch.Tensor:
        """What is added to the residual, of the normalised input."""
        return self.dropout(self.ffn(normed))


def split_extras(out: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Hidden states, and what came with them."""
    return (out[0], tuple(out[1:])) if isinstance(out, tuple) else (out, ())
