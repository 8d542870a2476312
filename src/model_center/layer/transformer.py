"""Encoder and Decoder: stacks of transformer layers with a last norm.

Decoder-only models are Encoders with a causal mask.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from model_center.layer.blocks import Mask
from model_center.layer.cache import KeyValueCache, KeyValues, LayerCache
from model_center.layer.dense_attention import PositionBias
from model_center.layer.layernorm import LayerNorm
from model_center.layer.mask import AttentionMask, last_queries
from model_center.layer.scaled_dot_product import biased
from model_center.layer.stack import ShardingPolicy, StackOutput, Wanted, layer_list, run_layers
from model_center.layer.transformer_block import TransformerBlock
from model_center.layer.variant import PLAIN, LayerVariant

Past = KeyValueCache | Sequence[LayerCache | KeyValues | None] | None


class Encoder(torch.nn.Module):
    """`num_layers` layers without cross-attention, and `output_layernorm`.

    Args:
        num_layers, dim_model, dim_ff, num_heads, dim_head: sizes.
        mask_modules: for each layer (leave attention out, leave the feed-forward network out).
        variant: what no argument of ModelCenter says.
        sharding: how the layers are sharded in a process group.
        Others: as in `TransformerBlock`.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        num_layers: int,
        dim_model: int,
        dim_ff: int,
        num_heads: int,
        dim_head: int,
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        norm_init_var: float = 1.0,
        norm_bias: bool = False,
        norm_eps: float = 1e-5,
        att_init_mean: float = 0.0,
        att_init_std: float = 0.02,
        att_bias: bool = False,
        att_mask_value: float = -math.inf,
        ffn_init_mean: float = 0.0,
        ffn_init_std: float = 0.02,
        ffn_bias: bool = False,
        ffn_activate_fn: str = "gated_gelu",
        pos_bias_type: str = "none",
        post_layer_norm: bool = False,
        length_scale: bool = False,
        attn_scale: bool = False,
        dropout_p: float = 0,
        parallel_ffn: bool = False,
        sparse_attention: bool = False,
        attention_window: int = 512,
        mask_modules: Sequence[tuple[bool, bool]] | None = None,
        num_heads_kv: int = -1,
        *,
        variant: LayerVariant = PLAIN,
        sharding: ShardingPolicy = ShardingPolicy(),  # noqa: B008 (it is frozen)
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "dtype": dtype,
            "int8": int8,
            "norm_init_var": norm_init_var,
            "norm_bias": norm_bias,
            "norm_eps": norm_eps,
            "att_init_mean": att_init_mean,
            "att_init_std": att_init_std,
            "att_bias": att_bias,
            "att_mask_value": att_mask_value,
            "ffn_init_mean": ffn_init_mean,
            "ffn_init_std": ffn_init_std,
            "ffn_bias": ffn_bias,
            "ffn_activate_fn": ffn_activate_fn,
            "pos_bias_type": pos_bias_type,
            "post_layer_norm": post_layer_norm,
            "length_scale": length_scale,
            "attn_scale": attn_scale,
            "dropout_p": dropout_p,
            "parallel_ffn": parallel_ffn,
            "sparse_attention": sparse_attention,
            "attention_window": attention_window,
            "num_heads_kv": num_heads_kv,
        }
        self.post_layer_norm = post_layer_norm
        left_out = [(False, False)] * num_layers if mask_modules is None else mask_modules
        self.layers = layer_list(
            (
                TransformerBlock(
                    dim_model,
                    dim_ff,
                    num_heads,
                    dim_head,
                    mask_att=bool(att),
                    mask_ffn=bool(ffn),
                    variant=variant.of_layer(place),
                    **options,
                )
                for place, (att, ffn) in enumerate(left_out)
            ),
            sharding,
        )
        self.output_layernorm = LayerNorm(dim_model, dtype, norm_bias, norm_eps, norm_init_var)

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
            use_cache, past_key_values: the cache to return, and of earlier tokens.
            output_attentions, output_hidden_states: what a StackOutput holds beside.
            return_dict: return a StackOutput; else the hidden states, with the cache as a pair if
                `use_cache`.
        """
        wanted = wanted_from(
            len(self.layers), use_cache, past_key_values, output_attentions, output_hidden_states
        )
        wanted = dataclasses.replace(wanted, normed=self.post_layer_norm)
        args = once_for_all(
            attention_mask,
            position_bias,
            hidden_states,
            wanted.past_length + hidden_states.shape[1],
        )
        out = run_layers(self.layers, self.output_layernorm, hidden_states, args, wanted)
        return as_asked(out, use_cache, return_dict)


class Decoder(torch.nn.Module):
    """`num_layers` layers with cross-attention, and `output_layernorm`.

    Args: as in `Encoder`; `mask_modules` has for each layer (attention, cross-attention,
    feed-forward network) to leave out.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        num_layers: int,
        dim_model: int,
        dim_ff: int,
        num_heads: int,
        dim_head: int,
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        norm_init_var: float = 1.0,
        norm_bias: bool = False,
        norm_eps: float = 1e-5,
        att_init_mean: float = 0.0,
        att_init_std: float = 0.02,
        att_bias: bool = False,
        att_mask_value: float = -math.inf,
        ffn_init_mean: float = 0.0,
        ffn_init_std: float = 0.02,
        ffn_bias: bool = False,
        ffn_activate_fn: str = "gated_gelu",
        pos_bias_type: str = "none",
        length_scale: bool = False,
        attn_scale: bool = False,
        dropout_p: float = 0,
        parallel_ffn: bool = False,
        mask_modules: Sequence[tuple[bool, bool, bool]] | None = None,
        *,
        sharding: ShardingPolicy = ShardingPolicy(),  # noqa: B008 (it is frozen)
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "is_decoder": True,
            "dtype": dtype,
            "int8": int8,
            "norm_init_var": norm_init_var,
            "norm_bias": norm_bias,
            "norm_eps": norm_eps,
            "att_init_mean": att_init_mean,
            "att_init_std": att_init_std,
            "att_bias": att_bias,
            "att_mask_value": att_mask_value,
            "ffn_init_mean": ffn_init_mean,
            "ffn_init_std": ffn_init_std,
            "ffn_bias": ffn_bias,
            "ffn_activate_fn": ffn_activate_fn,
            "pos_bias_type": pos_bias_type,
            "length_scale": length_scale,
            "attn_scale": attn_scale,
            "dropout_p": dropout_p,
            "parallel_ffn": parallel_ffn,
        }
        left_out = [(False, False, False)] * num_layers if mask_modules is None else mask_modules
        self.layers = layer_list(
            (
                TransformerBlock(
                    dim_model,
                    dim_ff,
                    num_heads,
                    dim_head,
                    mask_att=bool(att),
                    mask_cross=bool(cross),
                    mask_ffn=bool(ffn),
                    **options,
                )
                for att, cross, ffn in left_out
            ),
            sharding,
        )
        self.output_layernorm = LayerNorm(dim_model, dtype, norm_bias, norm_eps, norm_init_var)

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
        """(batch, seq, dim_model) to the same, over encoder states (batch, keys, dim_model);
        otherwise as in `Encoder`.
        """
        wanted = wanted_from(
            len(self.layers),
            use_cache,
            past_key_values,
            output_attentions,
            output_hidden_states,
            cross=True,
        )
        args: tuple[Any, ...] = once_for_all(
            attention_mask,
            position_bias,
            hidden_states,
            wanted.past_length + hidden_states.shape[1],
        )
        if cross_hidden_states is not None:
            of_cross = once_for_all(
                cross_attention_mask,
                cross_position_bias,
                hidden_states,
                cross_hidden_states.shape[1],
            )
            args = (*args, cross_hidden_states, *of_cross)
        else:
            args = (*args, None, cross_attention_mask, cross_position_bias)
        return as_asked(
            run_layers(self.layers, self.output_layernorm, hidden_states, args, wanted),
            use_cache,
            return_dict,
        )


def once_for_all(
    mask: Mask, bias: PositionBias | None, hidden: torch.Tensor, num_keys: int
) -> tuple[Mask, PositionBias | None]:
    """Mask and bias for all layers of a pass, with what each of them would else make of them again
    (and keep for backward).
    """
    if not isinstance(mask, AttentionMask):
        return mask, bias
    mask = last_queries(mask, hidden.shape[1]).settled(hidden.shape[1], num_keys, hidden.device)
    if not isinstance(bias, torch.Tensor):
        return mask, bias
    return AttentionMask(), biased(mask, bias, hidden.dtype, (hidden.shape[1], num_keys))


def wanted_from(
    num_layers: int,
    use_cache: bool,
    past: Past,
    output_attentions: bool,
    output_hidden_states: bool,
    *,
    cross: bool = False,
) -> Wanted:
    """What to return of a pass, with the cache that it goes on with."""
    cache = None
    if past is not None:
        cache = KeyValueCache.of(past, num_layers)
    elif use_cache:
        cache = KeyValueCache(num_layers, cross_attention=cross)
    return Wanted(cache=cache, hidden_states=output_hidden_states, attentions=output_attentions)


def as_asked(out: StackOutput, use_cache: bool, return_dict: bool) -> Any:
    """The output in the form that the arguments ask for."""
    if return_dict:
        return out
    return (out.last_hidden_state, out.past_key_values) if use_cache else out.last_hidden_state
