"""Layers of an encoder or a decoder, and their parts, each with its norm and residual."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from model_center.errors import ConfigError, InputError
from model_center.layer.cache import KeyValues, LayerCache, layer_of
from model_center.layer.decode_row import is_inactive_dropout, is_row, is_unmodified
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
_FORWARD = Attention.forward


class SelfAttentionBlock(torch.nn.Module):
    """Self-attention with its norm and residual: `h + dropout(attention(norm(h)))`.

    With `post_layer_norm` it is `norm(h) + dropout(attention(norm(h)))`.

    A network whose norms follow each part is written with each norm moved to the start of the next
    part, so that its last norm is the `output_layernorm` of the stack.

    The arguments are those of `LayerOptions`.
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
        """`hidden_states` (batch, seq, dim_model) to the same.

        Args:
            hidden_states: (batch, seq, dim_model).
            attention_mask, position_bias: as in `Attention`.
            use_cache: whether to return the keys and values.
            past_key_value: as they were returned.
            output_attentions: whether to return the probabilities.
            output_normed: whether to return the normalised input.

        Returns the hidden states, followed by cache, probabilities and normalised input where asked
        for.
        """
        is_asked_more = output_attentions or output_normed
        if is_row(hidden_states) and isinstance(past_key_value, LayerCache) and not is_asked_more:
            row = self._of_row(hidden_states, attention_mask, position_bias, past_key_value)
            if row is not None:
                return (row, past_key_value) if use_cache else row
        normed = self.layernorm_before_attention(hidden_states)
        more = {"output_attentions": True} if output_attentions else {}
        if isinstance(self.self_attention, SparseSelfAttention):
            of_cache = (use_cache, past_key_value)
            out = self.self_attention(normed, attention_mask, position_bias, *of_cache, **more)
        else:
            given = (normed, normed, attention_mask, position_bias, use_cache, past_key_value)
            if is_exchanged(self.self_attention):
                out = _attend_by(self.self_attention, given, more)
            else:
                out = self.self_attention(*given, **more)
        out, extras = split_extras(out)
        out = (normed if self.post_layer_norm else hidden_states) + self.dropout(out)
        extras = (*extras, normed) if output_normed else extras
        return (out, *extras) if extras else out

    def _of_row(
        self,
        hidden: torch.Tensor,
        mask: Mask,
        position_bias: PositionBias | None,
        cache: LayerCache,
    ) -> torch.Tensor | None:
        """As `forward`, of one row by few kernels; None where parts must be called themselves."""
        attention = self.self_attention
        if (
            self.post_layer_norm
            or not is_inactive_dropout(self.dropout)
            or not isinstance(attention, Attention)
            or isinstance(mask, SparseMask)
        ):
            return None
        return attention.of_row(hidden, self.layernorm_before_attention, mask, position_bias, cache)


class CrossAttentionBlock(torch.nn.Module):
    """Cross-attention with its norm: `h + dropout(attention(norm(h), key_value_states))`.

    With `post_layer_norm` it is `norm(h) + dropout(attention(norm(h), key_value_states))`.

    The arguments are those of `LayerOptions`.

    Raises:
        ConfigError: for `sparse_attention`, which exists as self-attention only.
    """

    @takes(
        "dim_model num_heads dim_head",
        *(DTYPE, NORM, ATTENTION, "pos_bias_type post_layer_norm", SCALES, SPARSE),
    )
    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        if options.sparse_attention:
            raise ConfigError("sparse_attention=True: cross-attention is dense only.")
        self.layernorm_before_attention = options.norm()
        self.self_attention = Attention(options.attention())
        self.post_layer_norm = options.post_layer_norm
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
        """`hidden_states` (batch, seq, dim_model) to the same, with what they read of an encoder.

        Args:
            hidden_states: (batch, seq, dim_model).
            key_value_states: (batch, keys, dim_model), not normalised; ignored if `past_key_value`
                has content, which is then the keys and values of all of them.
            attention_mask, position_bias: as in `Attention`.
            use_cache: whether to return the keys and values.
            past_key_value: as they were returned.
            output_attentions: whether to return the probabilities.

        Returns the hidden states, followed by cache and probabilities where asked for.
        """
        is_known = past_key_value is not None and not (
            isinstance(past_key_value, LayerCache) and past_key_value.length == 0
        )
        normed = self.layernorm_before_attention(hidden_states)
        more = {"output_attentions": True} if output_attentions else {}
        if is_exchanged(self.self_attention):
            # It does not know a cache of the encoder's keys.
            past = None if isinstance(past_key_value, LayerCache) else past_key_value
            given = (normed, key_value_states, attention_mask, position_bias, use_cache, past)
            out = _attend_by(self.self_attention, given, more)
        else:
            states = None if is_known else key_value_states
            of_cache = (use_cache, past_key_value)
            out = self.self_attention(
                normed, states, attention_mask, position_bias, *of_cache, **more
            )
        out, extras = split_extras(out)
        out = (normed if self.post_layer_norm else hidden_states) + self.dropout(out)
        return (out, *extras) if extras else out


class FFNBlock(torch.nn.Module):
    """A feed-forward network with its norm and residual: `h + dropout(ffn(norm(h)))`.

    With `post_layer_norm` it is `norm(h) + dropout(ffn(norm(h)))`.

    The arguments are those of `LayerOptions`.
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
        """`hidden_states` (batch, seq, dim_model) to the same."""
        if is_row(hidden_states):
            row = self._of_row(hidden_states)
            if row is not None:
                return row
        normed = self.layernorm_before_ffn(hidden_states)
        return (normed if self.post_layer_norm else hidden_states) + self.added(normed)

    def _of_row(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """As `forward`, of one row by few kernels; None where parts must be called themselves."""
        if self.post_layer_norm or not is_inactive_dropout(self.dropout):
            return None
        # what tools have put in its place has no way of its own for a row
        is_ours = isinstance(self.ffn, FeedForward)
        return self.ffn.of_row(hidden, self.layernorm_before_ffn) if is_ours else None

    def added(self, normed: torch.Tensor) -> torch.Tensor:
        """What is added to the residual, of the normalised input."""
        return self.dropout(self.ffn(normed))


class TransformerBlock(torch.nn.Module):
    """Self-attention, in decoders cross-attention, and a feed-forward network, with their norms.

    The arguments are those of `LayerOptions`.
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
        of_cross = dataclasses.replace(options, post_layer_norm=False, sparse_attention=False)
        self.cross_att = CrossAttentionBlock(of_cross) if has_cross else None
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
        self-attention (None in a decoder's layer without it) and, in decoders, of cross-attention,
        and by the normalised input.
        """
        hidden, extras = self_hidden_states, (past_key_value,) if use_cache else ()
        if self.self_att is not None:
            # By name, and nothing that nobody asks for: as ModelCenter calls it, whose programs
            # exchange `forward`.
            asked = {"output_attentions": output_attentions, "output_normed": output_normed}
            out = self.self_att(
                hidden,
                attention_mask=self_attention_mask,
                position_bias=self_position_bias,
                use_cache=use_cache,
                past_key_value=past_key_value,
                **{name: value for name, value in asked.items() if value},
            )
            hidden, extras = split_extras(out)
        elif output_normed:
            extras = (*extras, hidden)
        elif output_attentions and self.cross_att is not None:
            extras = (*extras, None)  # the place of its probabilities
        if self.cross_att is not None:
            known = past_key_value.cross if isinstance(past_key_value, LayerCache) else None
            more: dict[str, Any] = {} if known is None else {"past_key_value": known}
            if output_attentions:
                more["output_attentions"] = True
            out = self.cross_att(
                hidden_states=hidden,
                key_value_states=cross_hidden_states,
                attention_mask=cross_attention_mask,
                position_bias=cross_position_bias,
                **more,
            )
            hidden, of_cross = split_extras(out)
            extras = (*extras, *of_cross)
        if self.ffn is not None:
            hidden = self._feed_forward(self.ffn, self_hidden_states, hidden)
        return (hidden, *extras) if extras else hidden

    def _feed_forward(
        self, ffn: FFNBlock, entered: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        if not self.parallel_ffn:
            return ffn(hidden)
        if is_unmodified(ffn, FFNBlock):
            return hidden + ffn.added(ffn.layernorm_before_ffn(entered))
        return hidden - entered + ffn(entered)  # a hook or another `forward` is called


def is_exchanged(module: torch.nn.Module) -> bool:
    """Whether it is an attention whose `forward` the program has exchanged."""
    return isinstance(module, Attention) and (
        "forward" in vars(module) or type(module).forward is not _FORWARD
    )


def _attend_by(
    attention: Attention,
    given: tuple[torch.Tensor, torch.Tensor | None, Mask, PositionBias | None, bool, Past],
    more: dict[str, bool],
) -> Any:
    """Call a `forward` of the program's own as ModelCenter does: the mask is bool (batch, queries,
    keys), the cache (keys, values), or None before the first token.

    Raises:
        InputError: without keys, or if it returns another thing than keys and values as its cache.
    """
    query, key_value, mask, position_bias, use_cache, past = given
    if key_value is None:
        raise InputError(
            f"the replaced forward of {type(attention).__name__} got no key_value: give the "
            "encoder's states in every call."
        )
    cache = layer_of(past) if use_cache or past is not None else None
    num_queries = query.shape[1]
    num_keys = key_value.shape[1] + (0 if cache is None else cache.length)
    if isinstance(mask, AttentionMask):
        seen = mask.visible(num_queries, num_keys, query.device)
        if seen is None:
            seen = torch.ones((), dtype=torch.bool, device=query.device)
        heads = seen.shape[1] if seen.dim() == 4 else 1
        mask = seen.expand(query.shape[0], heads, num_queries, num_keys).squeeze(1)
    pair = cache.pair if cache is not None and cache.length else None
    out = attention(query, key_value, mask, position_bias, use_cache, pair, **more)
    if cache is None or not use_cache:
        return out
    out, current, *rest = out
    if not isinstance(current, tuple | list):
        raise InputError(
            f"the replaced forward of {type(attention).__name__} returned "
            f"{type(current).__name__} as its cache: expected (keys, values), two tensors."
        )
    kept = layer_of((current[0], current[1]))
    if cache is past:
        cache.truncate(0)
        cache.append(*kept)
    return (out, cache if cache is past else kept.pair, *rest)


def split_extras(out: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Hidden states, and what came with them."""
    return (out[0], tuple(out[1:])) if isinstance(out, tuple) else (out, ())
