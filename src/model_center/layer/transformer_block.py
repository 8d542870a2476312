"""TransformerBlock: one layer of an encoder or a decoder."""

from __future__ import annotations

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


class TransformerBlock(torch.nn.Module):
    """Self-attention, in decoders cross-attention, and a feed-forward network, with their norms.

    Args: see `LayerOptions`.
    """

    self_att: SelfAttentionBlock | None
    cross_att: CrossAttentionBlock | None
    ffn: FFNBlock | None

    @takes(
        "dim_model dim_ff num_heads dim_head",
        *("is_decoder", DTYPE, NORM, ATTENTION, FFN, "pos_bias_type post_layer_norm parallel_ffn"),
        *(SCALES, SPARSE, "mask_att mask_cross mask_ffn num_heads_kv"),
        by_name="variant",
    )
    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.parallel_ffn = options.parallel_ffn
        self.self_att = None if options.mask_att else SelfAttentionBlock(options)
        has_cross = options.is_decoder and not options.mask_cross
        self.cross_att = CrossAttentionBlock(options) if has_cross else None
        self.ffn = None if options.mask_ffn else FFNBlock(options)

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
