"""TransformerBlock: one layer of an encoder or a decoder."""

from __future__ import annotations

import math
from typing import Any

import torch

from model_center.layer.blocks import (
    CrossAttentionBlock,
    FFNBlock,
    Mask,
    Past,
    SelfAttentionBlock,
    split_extras,
)
from model_center.layer.cache import LayerCache
from model_center.layer.dense_attention import PositionBias
from model_center.layer.variant import PLAIN, LayerVariant


class TransformerBlock(torch.nn.Module):
    """Self-attention, in decoders cross-attention, and a feed-forward network, each with its norm
    and residual.

    Args:
        dim_model, dim_ff, num_heads, dim_head: sizes.
        is_decoder: whether there is a cross-attention.
        parallel_ffn: whether the feed-forward network reads the input of the layer, not what
            attention made of it (GPT-J).
        mask_att, mask_cross, mask_ffn: leave this part out.
        Others: of SelfAttentionBlock, CrossAttentionBlock and FFNBlock. `post_layer_norm` is not
            for the cross-attention.
        variant: what no argument of ModelCenter says.
    """

    self_att: SelfAttentionBlock | None
    cross_att: CrossAttentionBlock | None
    ffn: FFNBlock | None

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_model: int,
        dim_ff: int,
        num_heads: int,
        dim_head: int,
        is_decoder: bool = False,
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
        parallel_ffn: bool = False,
        length_scale: bool = False,
        attn_scale: bool = False,
        dropout_p: float = 0,
        sparse_attention: bool = False,
        attention_window: int = 512,
        mask_att: bool = False,
        mask_cross: bool = False,
        mask_ffn: bool = False,
        num_heads_kv: int = -1,
        *,
        variant: LayerVariant = PLAIN,
    ) -> None:
        super().__init__()
        norm: dict[str, Any] = {
            "dtype": dtype,
            "int8": int8,
            "norm_init_var": norm_init_var,
            "norm_bias": norm_bias,
            "norm_eps": norm_eps,
            "length_scale": length_scale,
            "dropout_p": dropout_p,
        }
        attention: dict[str, Any] = norm | {
            "att_init_mean": att_init_mean,
            "att_init_std": att_init_std,
            "att_bias": att_bias,
            "att_mask_value": att_mask_value,
            "pos_bias_type": pos_bias_type,
            "attn_scale": attn_scale,
        }
        self.parallel_ffn = parallel_ffn
        self.self_att = self.cross_att = self.ffn = None
        if not mask_att:
            self.self_att = SelfAttentionBlock(
                dim_model,
                num_heads,
                dim_head,
                post_layer_norm=post_layer_norm,
                sparse_attention=sparse_attention,
                attention_window=attention_window,
                num_heads_kv=num_heads_kv,
                variant=variant,
                **attention,
            )
        if is_decoder and not mask_cross:
            self.cross_att = CrossAttentionBlock(dim_model, num_heads, dim_head, **attention)
        if not mask_ffn:
            self.ffn = FFNBlock(
                dim_model,
                dim_ff,
                ffn_init_mean=ffn_init_mean,
                ffn_init_std=ffn_init_std,
                ffn_bias=ffn_bias,
                ffn_activate_fn=ffn_activate_fn,
                post_layer_norm=post_layer_norm,
                **norm,
            )
        if variant.one_norm and self.self_att is not None and self.ffn is not None:
            self.ffn.layernorm_before_ffn = self.self_att.layernorm_before_attention

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        self_hidden_states: torch.Tensor,
        self_attention_mask: Mask = None,
        self_position_bias: PositionBias | None = None,
        cross_hidden_states: torch.Tensor | None = None,
        cross_attention_mask: Mask = None,
        cross_position_bias: PositionBias | None = None,
        use_cache: bool = False,
        past_key_value: Past = None,
        output_attentions: bool = False,
        output_normed: bool = False,
    ) -> Any:
        """(batch, seq, dim_model) to the same.

        Args:
            self_hidden_states: (batch, seq, dim_model).
            self_attention_mask, self_position_bias: as in `Attention`.
            cross_hidden_states: states of the encoder, (batch, keys, dim_model); in decoders.
            cross_attention_mask, cross_position_bias: as in `Attention`, for those.
            use_cache, past_key_value: the cache of the self-attention, to return and of earlier
                tokens. A LayerCache with `cross` keeps the keys of the encoder's states too.
            output_attentions: whether to return the probabilities.
            output_normed: whether to return the input as the self-attention reads it, normalised;
                in layers without cross-attention.

        Returns the hidden states, followed by the cache where asked for, by the probabilities of
        self-attention and, in decoders, of cross-attention, and by the normalised input.
        """
        hidden, extras = self_hidden_states, (past_key_value,) if use_cache else ()
        if self.self_att is not None:
            out = self.self_att(
                hidden,
                self_attention_mask,
                self_position_bias,
                use_cache,
                past_key_value,
                output_attentions,
                output_normed,
            )
            hidden, extras = split_extras(out)
        elif output_normed:
            extras = (*extras, hidden)
        if self.cross_att is not None:
            known = past_key_value.cross if isinstance(past_key_value, LayerCache) else None
            out = self.cross_att(
                hidden,
                cross_hidden_states,
                cross_attention_mask,
                cross_position_bias,
                past_key_value=known,
                output_attentions=output_attentions,
            )
            hidden, of_cross = split_extras(out)
            extras = (*extras, *of_cross)
        if self.ffn is not None:
            hidden = self._feed_forward(self.ffn, self_hidden_states, hidden)
        return (hidden, *extras) if extras else hidden

    def _feed_forward(
        self, ffn: FFNBlock, entered: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        if self.parallel_ffn:
            return hidden + ffn.added(ffn.layernorm_before_ffn(entered))
        return ffn(hidden)
