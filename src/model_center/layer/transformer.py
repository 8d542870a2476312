"""Encoder and Decoder: stacks of transformer layers with a last norm.

Decoder-only models are Encoders with a causal mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from model_center.layer.blocks import Mask, TransformerBlock
from model_center.layer.cache import KeyValueCache, KeyValues, LayerCache
from model_center.layer.dense_attention import PositionBias
from model_center.layer.mask import AttentionMask, last_queries
from model_center.layer.options import (
    ATTENTION,
    DTYPE,
    FFN,
    NORM,
    SCALES,
    SPARSE,
    StackOptions,
    takes,
)
from model_center.layer.scaled_dot_product import biased
from model_center.layer.stack import LayerOutputs, StackOutput, layer_list, run_layers

Past = KeyValueCache | Sequence[LayerCache | KeyValues | None] | None


class Encoder(torch.nn.Module):
    """`num_layers` layers without cross-attention, and `output_layernorm`.

    The arguments are those of `StackOptions` and `LayerOptions`.
    """

    @takes(
        "num_layers dim_model dim_ff num_heads dim_head",
        *(DTYPE, NORM, ATTENTION, FFN, "pos_bias_type post_layer_norm", SCALES),
        *("parallel_ffn", SPARSE, "mask_modules num_heads_kv"),
        by_name="variant sharding",
        kind=StackOptions,
    )
    def __init__(self, options: StackOptions) -> None:
        super().__init__()
        self.post_layer_norm = options.post_layer_norm
        self.layers = layer_list(
            (
                TransformerBlock(options.layer(place, "mask_att", "mask_ffn"))
                for place in range(options.num_layers)
            ),
            options.sharding,
        )
        self.output_layernorm = options.norm()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        position_bias: PositionBias | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
    ) -> Any:
        """(batch, seq, dim_model) to the same.

        Args:
            hidden_states: (batch, seq, dim_model).
            attention_mask, position_bias: as in `Attention`.
            use_cache: whether to return the keys and values of all layers.
            past_key_values: as they were returned.
            output_attentions: whether a StackOutput has the probabilities.
            output_hidden_states: whether it has the inputs of all layers.
            return_dict: return a StackOutput; else the hidden states, with the cache as a pair if
                `use_cache`.
        """
        wanted = requested_outputs(
            len(self.layers), use_cache, past_key_values, output_attentions, output_hidden_states
        )
        wanted = dataclasses.replace(wanted, normed=self.post_layer_norm)
        end = wanted.past_length + hidden_states.shape[1]
        args = shared_mask(attention_mask, position_bias, hidden_states, end)
        out = run_layers(self.layers, self.output_layernorm, hidden_states, args, wanted)
        return in_requested_form(out, use_cache, return_dict)


class Decoder(torch.nn.Module):
    """`num_layers` layers with cross-attention, and `output_layernorm`.

    The arguments are those of `StackOptions` and `LayerOptions`.
    """

    @takes(
        "num_layers dim_model dim_ff num_heads dim_head",
        *(DTYPE, NORM, ATTENTION, FFN, "pos_bias_type", SCALES, "parallel_ffn mask_modules"),
        by_name="sharding",
        kind=StackOptions,
    )
    def __init__(self, options: StackOptions) -> None:
        super().__init__()
        options = dataclasses.replace(options, is_decoder=True)
        self.layers = layer_list(
            (
                TransformerBlock(options.layer(place, "mask_att", "mask_cross", "mask_ffn"))
                for place in range(options.num_layers)
            ),
            options.sharding,
        )
        self.output_layernorm = options.norm()

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        position_bias: PositionBias | None = None,
        cross_hidden_states: torch.Tensor | None = None,
        cross_attention_mask: Mask = None,
        cross_position_bias: PositionBias | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
    ) -> Any:
        """`hidden_states` (batch, seq, dim_model) to the same.

        Args:
            hidden_states: (batch, seq, dim_model).
            attention_mask, position_bias: as in `Attention`.
            cross_hidden_states: of the encoder, (batch, keys, dim_model).
            cross_attention_mask, cross_position_bias: as in `Attention`, for those.
            use_cache, past_key_values: as in `Encoder`.
            output_attentions, output_hidden_states, return_dict: as in `Encoder`.
        """
        wanted = requested_outputs(
            len(self.layers), use_cache, past_key_values, output_attentions, output_hidden_states
        )
        end = wanted.past_length + hidden_states.shape[1]
        own = shared_mask(attention_mask, position_bias, hidden_states, end)
        of_cross = cross_attention_mask, cross_position_bias
        if cross_hidden_states is not None:
            of_cross = shared_mask(*of_cross, hidden_states, cross_hidden_states.shape[1])
        args = (*own, cross_hidden_states, *of_cross)
        out = run_layers(self.layers, self.output_layernorm, hidden_states, args, wanted)
        return in_requested_form(out, use_cache, return_dict)


def shared_mask(
    mask: Mask, bias: PositionBias | None, hidden: torch.Tensor, num_keys: int
) -> tuple[Mask, PositionBias | None]:
    """Mask and bias, materialized once for all layers of a forward pass."""
    if not isinstance(mask, AttentionMask):
        return mask, bias
    mask = last_queries(mask, hidden.shape[1]).materialized(
        hidden.shape[1], num_keys, hidden.device
    )
    if not isinstance(bias, torch.Tensor):
        return mask, bias
    rest = AttentionMask(blind=mask.blind)
    return rest, biased(mask, bias, hidden.dtype, (hidden.shape[1], num_keys))


def requested_outputs(
    num_layers: int,
    use_cache: bool,
    past: Past,
    output_attentions: bool,
    output_hidden_states: bool,
) -> LayerOutputs:
    """What a forward pass returns, with the cache that it extends."""
    cache = None
    if past is not None or use_cache:
        cache = KeyValueCache.of([None] * num_layers if past is None else past, num_layers)
    return LayerOutputs(
        cache=cache,
        pairs=not isinstance(past, KeyValueCache),
        hidden_states=output_hidden_states,
        attentions=output_attentions,
    )


def in_requested_form(out: StackOutput, use_cache: bool, return_dict: bool) -> Any:
    """The output in the form that the arguments ask for."""
    if return_dict:
        return out
    return (out.last_hidden_state, out.past_key_values) if use_cache else out.last_hidden_state
