"""Seq2SeqModel: what encoder-decoders with T5's relative positions share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import RelativeConfig
from model_center.errors import InputError
from model_center.layer.embedding import Embedding
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask
from model_center.layer.position_embedding.relative import RelativePositionEmbedding
from model_center.layer.stack import StackOutput
from model_center.layer.transformer import Decoder, Encoder, Past
from model_center.model.base import BaseModel, policy_of
from model_center.model.decoding import Decoding, cache_bytes, check_inputs, select_rows
from model_center.model.inputs import attention_mask_of, embedded, past_length
from model_center.model.outputs import Seq2SeqModelOutput, as_tuple


@dataclasses.dataclass(kw_only=True)
class Seq2SeqConfig(RelativeConfig):
    """What configurations of encoder-decoders have in common.

    Attributes:
        num_encoder_layers, num_decoder_layers: numbers of layers.
    """

    num_encoder_layers: int = 12
    num_decoder_layers: int = 12


class Seq2SeqModel(BaseModel):
    """An encoder and a decoder over one embedding; the head is tied, its own, or for classes."""

    # What the decoder starts with in generation by default.
    DECODER_START: ClassVar[int] = 0

    def __init__(self, config: Seq2SeqConfig, embedding: Embedding) -> None:
        super().__init__(config)
        self.input_embedding = embedding
        self.position_bias_enc = RelativePositionEmbedding(**config.relative(bidirectional=True))
        self.position_bias_dec = RelativePositionEmbedding(**config.relative(bidirectional=False))
        self.embed_dropout = torch.nn.Dropout(config.dropout_p)
        self.encoder = Encoder(
            **config.stack(config.num_encoder_layers), sharding=policy_of(config)
        )
        self.decoder = Decoder(
            **config.stack(config.num_decoder_layers), sharding=policy_of(config)
        )
        if config.cls_head:
            self.cls_projection = Linear(config.dim_model, config.cls_head, **config.head())
        elif not config.tied:
            self.output_projection = Linear(config.dim_model, config.vocab_size, **config.head())

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        decoder_attention_mask: torch.Tensor | AttentionMask | None = None,
        head_mask: torch.Tensor | None = None,
        decoder_head_mask: torch.Tensor | None = None,
        cross_attn_head_mask: torch.Tensor | None = None,
        encoder_outputs: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        output_decoder_attentions: bool = False,
        output_decoder_hidden_states: bool = False,
        output_logits: bool = True,
        return_dict: bool = True,
    ) -> Any:
        """Encode a sequence and score the next token at every position of another.

        Args:
            input_ids: (batch, seq), integers; or `inputs_embeds` (batch, seq, dim_model); or
                `encoder_outputs`.
            length: (batch,), the number of valid tokens of the encoder at the start of
                each row; an alternative to the mask.
            attention_mask: (batch, seq), nonzero where a token of the encoder is valid; (batch,
                queries, keys) only with `encoder_outputs`.
            decoder_input_ids, decoder_inputs_embeds, decoder_length, decoder_attention_mask: the
            same for the decoder.
            head_mask, decoder_head_mask, cross_attn_head_mask: accepted and ignored, as in
                ModelCenter.
            encoder_outputs: last hidden states (batch, seq, dim_model) of the encoder, or a tuple
                that begins with them.
            use_cache, past_key_values: the decoder's cache to return, and of earlier tokens.
            output_attentions, output_hidden_states: of the encoder; those of the decoder with it.
            output_decoder_attentions, output_decoder_hidden_states: of the decoder only.
            output_logits: whether to score.
            return_dict: False for a tuple of all fields.
        """
        if encoder_outputs is None:
            encoded = self.encode(
                input_ids,
                inputs_embeds,
                length,
                _both(attention_mask),
                output_attentions,
                output_hidden_states,
            )
        else:
            encoded = StackOutput(
                encoder_outputs if isinstance(encoder_outputs, torch.Tensor) else encoder_outputs[0]
            )
        states = encoded.last_hidden_state
        hidden = self.embed_dropout(
            embedded(
                decoder_input_ids, decoder_inputs_embeds, self.input_embedding, "decoder_input"
            )
        )
        start = past_length(past_key_values)
        end = start + hidden.shape[1]
        out = self.decoder(
            hidden,
            attention_mask_of(decoder_attention_mask, decoder_length, hidden, start, causal=True),
            self.position_bias_dec(torch.arange(start, end, device=hidden.device), end),
            states,
            attention_mask_of(attention_mask, length, states),
            None,
            use_cache,
            past_key_values,
            output_attentions or output_decoder_attentions,
            output_hidden_states or output_decoder_hidden_states,
            return_dict=True,
        )
        output = Seq2SeqModelOutput(
            last_hidden_state=out.last_hidden_state,
            encoder_last_hidden_state=states,
            past_key_values=out.past_key_values if use_cache else None,
            logits=self.logits(out.last_hidden_state) if output_logits else None,
            decoder_hidden_states=out.hidden_states,
            decoder_attentions=out.attentions,
            cross_attentions=out.cross_attentions,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )
        return output if return_dict else as_tuple(output)

    def encode(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> StackOutput:
        """The encoder's part of `forward`: what generation does once for all tokens."""
        hidden = self.embed_dropout(embedded(input_ids, inputs_embeds, self.input_embedding))
        mask = attention_mask_of(attention_mask, length, hidden)
        bias = self.position_bias_enc(hidden.shape[1], hidden.shape[1])
        out: StackOutput = self.encoder(
            hidden,
            mask,
            bias,
            False,
            None,
            output_attentions,
            output_hidden_states,
            return_dict=True,
        )
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to scores (batch, seq, vocab_size), or (batch, seq, cls_head)."""
        if self.config.cls_head:
            scores = self.cls_projection(hidden)
        elif self.config.tied:
            scores = self.input_embedding.projection(hidden * self.logit_factor)
        else:
            scores = self.output_projection(hidden * self.logit_factor)
        return scores * self.score_factor if self.score_factor != 1 else scores

    @property
    def logit_factor(self) -> float:
        """What hidden states are multiplied by before the head of the language model."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """What scores are multiplied by, those of classes too."""
        return 1.0

    def decoding(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
    ) -> Decoding:
        """As in BaseModel; `inputs` may have `decoder_input_ids`, int64 (rows, length)."""
        name = type(self).__name__
        if self.config.cls_head:
            raise InputError(
                f"{name} has a head for {self.config.cls_head} classes: it does not generate text."
            )
        check_inputs(inputs, ["decoder_input_ids"], None, name)
        prefix = inputs.get(
            "decoder_input_ids", input_ids.new_full((len(input_ids), 1), self.DECODER_START)
        )
        if prefix.dim() != 2 or len(prefix) != len(input_ids) or prefix.shape[1] < 1:
            raise InputError(
                f"decoder_input_ids has shape {tuple(prefix.shape)}: expected "
                f"({len(input_ids)}, at least 1)."
            )
        return Seq2SeqDecoding(self, input_ids, mask, prefix.long())


class Seq2SeqDecoding(Decoding):
    """Sequences that a decoder continues, each for a sequence that was encoded once."""

    def __init__(
        self,
        model: Seq2SeqModel,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        prefix: torch.Tensor,
    ) -> None:
        super().__init__(prefix, None, model.config.num_decoder_layers, cross_attention=True)
        self._model, self._input_ids, self._encoder_mask = model, input_ids, mask
        self._states = prefix.new_empty(0)

    def start(self, num_new: int) -> torch.Tensor:
        """As in Decoding, after a pass of the encoder."""
        self._states = self._model.encode(
            self._input_ids, attention_mask=self._encoder_mask
        ).last_hidden_state
        return super().start(num_new)

    def num_bytes(self, num_new: int, copies: int) -> int:
        """As in Decoding; the encoder's tokens have keys and values too."""
        config, rows = self._model.config, copies * len(self.prefix)
        tokens = self.prefix.shape[1] + num_new + self._input_ids.shape[1]
        return cache_bytes(self._model, config, config.num_decoder_layers, rows * tokens)

    def _select_inputs(self, rows: torch.Tensor) -> None:
        # The states stay as they are: their keys and values are in the cache, so that only their
        # number is looked at.
        self._encoder_mask = select_rows(self._encoder_mask, rows)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self._model(
            decoder_input_ids=ids,
            encoder_outputs=self._states,
            attention_mask=self._encoder_mask,
            use_cache=True,
            past_key_values=self.cache,
            output_logits=False,
        )
        return self._model.logits(out.last_hidden_state[:, -1:])[:, 0]


def _both(
    attention_mask: torch.Tensor | AttentionMask | None,
) -> torch.Tensor | AttentionMask | None:
    """The mask, which encoder and decoder can share.

    Raises:
        InputError: for one of pairs of the encoder's tokens: it does not say which of them the
            decoder's tokens see.
    """
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() != 2:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected (batch, keys), "
            "since the decoder sees the encoder's tokens through it too. Use encode() with this "
            "mask, and pass its states as encoder_outputs."
        )
    return attention_mask
