"""The parts of a transformer layer, each with its norm and residual, and the layer that they
make.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from model_center.layer.cache import KeyValues, LayerCache
from model_center.layer.dense_attention import Attention, PositionBias
from model_center.layer.feedforward import FeedForward
from model_center.layer.layernorm import LayerNorm
from model_center.layer.mask import AttentionMask
from model_center.layer.sparse_attention import SparseMask, SparseSelfAttention
from model_center.layer.variant import PLAIN, LayerVariant

Mask = torch.Tensor | AttentionMask | SparseMask | None
Past = LayerCache | KeyValues | None


class SelfAttentionBlock(torch.nn.Module):
    """`h + dropout(attention(norm(h)))`; with `post_layer_norm`, `norm(h) +
    dropout(attention(norm(h)))`.

    A network whose norms follow each part is written with each norm moved to the start of the next
    part, so that its last norm is the `output_layernorm` of the stack.

    Args:
        dim_model, num_heads, dim_head: sizes.
        dtype, int8: as in `Attention`.
        norm_init_var, norm_bias, norm_eps: of the LayerNorm.
        att_init_mean, att_init_std, att_bias, att_mask_value, pos_bias_type, length_scale,
        attn_scale, num_heads_kv: of the
            attention; `dropout_p` is both that of its probabilities and that of its output.
        post_layer_norm: whether the residual is the normalised input.
        sparse_attention, attention_window: Longformer's attention, see `SparseSelfAttention`.
        variant: what no argument of ModelCenter says.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_model: int,
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
        pos_bias_type: str = "none",
        post_layer_norm: bool = False,
        length_scale: bool = False,
        attn_scale: bool = False,
        dropout_p: float = 0,
        sparse_attention: bool = False,
        attention_window: int = 512,
        num_heads_kv: int = -1,
        *,
        variant: LayerVariant = PLAIN,
    ) -> None:
        super().__init__()
        self.layernorm_before_attention: torch.nn.Module = LayerNorm(
            dim_model, dtype, norm_bias, norm_eps, norm_init_var
        )
        if not variant.norms_input:
            self.layernorm_before_attention = torch.nn.Identity()
        options: dict[str, Any] = {
            "dtype": dtype,
            "int8": int8,
            "init_mean": att_init_mean,
            "init_std": att_init_std,
            "bias": att_bias,
            "mask_value": att_mask_value,
            "pos_bias_type": pos_bias_type,
            "length_scale": length_scale,
            "attn_scale": attn_scale,
            "dropout_p": dropout_p,
        }
        self.self_attention: Attention | SparseSelfAttention
        if sparse_attention:
            self.self_attention = SparseSelfAttention(
                attention_window,
                dim_in=dim_model,
                dim_head=dim_head,
                num_heads=num_heads,
                **options,
            )
        else:
            self.self_attention = Attention(
                dim_model,
                dim_head,
                num_heads,
                num_heads_kv=num_heads_kv,
                variant=variant,
                **options,
            )
        self.post_layer_norm = post_layer_norm
        self.dropout = torch.nn.Dropout(dropout_p)

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
        """(batch, seq, dim_model) to the same, followed by the cache, probabilities and normalised
        input where asked for.
        """
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
    """`h + dropout(attention(norm(h), key_value_states))`; arguments as in SelfAttentionBlock."""

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_model: int,
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
        pos_bias_type: str = "none",
        length_scale: bool = False,
        attn_scale: bool = False,
        dropout_p: float = 0,
    ) -> None:
        super().__init__()
        self.layernorm_before_attention = LayerNorm(
            dim_model, dtype, norm_bias, norm_eps, norm_init_var
        )
        self.self_attention = Attention(
            dim_model,
            dim_head,
            num_heads,
            dtype=dtype,
            int8=int8,
            init_mean=att_init_mean,
            init_std=att_init_std,
            bias=att_bias,
            mask_value=att_mask_value,
            pos_bias_type=pos_bias_type,
            length_scale=length_scale,
            attn_scale=attn_scale,
            dropout_p=dropout_p,
        )
        self.dropout = torch.nn.Dropout(dropout_p)

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

    Args:
        dim_model, dim_ff: sizes.
        dtype, int8: as in `FeedForward`.
        norm_init_var, norm_bias, norm_eps: of the LayerNorm.
        ffn_init_mean, ffn_init_std, ffn_bias, ffn_activate_fn, length_scale: of the FeedForward.
        post_layer_norm: whether the residual is the normalised input.
        dropout_p: of the output.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_model: int,
        dim_ff: int,
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        norm_init_var: float = 1.0,
        norm_bias: bool = False,
        norm_eps: float = 1e-5,
        ffn_init_mean: float = 0.0,
        ffn_init_std: float = 0.02,
        ffn_bias: bool = False,
        ffn_activate_fn: str = "gated_gelu",
        post_layer_norm: bool = False,
        length_scale: bool = False,
        dropout_p: float = 0,
    ) -> None:
        super().__init__()
        self.layernorm_before_ffn: torch.nn.Module = LayerNorm(
            dim_model, dtype, norm_bias, norm_eps, norm_init_var
        )
        self.ffn = FeedForward(
            dim_model,
            dim_ff,
            dtype=dtype,
            int8=int8,
            init_mean=ffn_init_mean,
            init_std=ffn_init_std,
            bias=ffn_bias,
            activate_fn=ffn_activate_fn,
            length_scale=length_scale,
        )
        self.post_layer_norm = post_layer_norm
        self.dropout = torch.nn.Dropout(dropout_p)

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
