"""GLM (Du et al., "GLM: General Language Model Pretraining with Autoregressive Blank Infilling",
2022).

A sequence is a text in which spans are replaced by [MASK], the context, followed by the spans, each
begun by a start token. Tokens of the context see each other; those of spans see the context and
what is before them. Every token has two positions: that in the context, where tokens of a span have
that of its [MASK], and that in the span, from 1 on, which is 0 in the context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import ConfigError, InputError
from model_center.layer.embedding import Embedding
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask, causal_pairs
from model_center.layer.transformer import Encoder, Past
from model_center.model.base import policy_of
from model_center.model.causal import CausalDecoding, CausalModel, ForwardOptions, extended
from model_center.model.cpm1 import prefix_mask
from model_center.model.decoding import check_inputs
from model_center.model.inputs import (
    attention_mask_of,
    embedded,
    needs_dict,
    past_length,
    positions_from,
)
from model_center.weights.keymap import (
    ATTENTION_NORM,
    ATTENTION_OUT,
    FFN_IN,
    FFN_NORM,
    FFN_OUT,
    KeyMap,
    TensorPart,
    both,
    packed,
    renamed,
)


@dataclasses.dataclass(kw_only=True)
class GLMConfig(TransformerConfig):
    """Configuration of GLM; defaults are ModelCenter's.

    Attributes:
        num_layers: number of layers.
        position_size: rows of both tables of positions.
        sop_tok_id, eop_tok_id: tokens that begin and end a span.
        mask_tok_id: the token in place of a span.
        tied: accepted; the head is the embedding, or of classes, as in ModelCenter.
    """

    model_type: ClassVar[str] = "glm"

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = (
        "",
        "position_size",
        "",
        "sop_tok_id eop_tok_id mask_tok_id",
    )

    vocab_size: int = 50048
    dim_model: int = 1024
    num_heads: int = 16
    dim_ff: int = 4096
    num_layers: int = 24
    dropout_p: float = 0.1
    position_size: int = 1025
    proj_bias: bool = False
    sop_tok_id: int = 50006
    eop_tok_id: int = 50007
    mask_tok_id: int = 50008

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of THUDM's repositories `glm-*`, which bring their own code.

        Their special tokens are not there: those of the English models are to be given beside.

        Raises:
            ConfigError: for another model called GLM, GLM-4 for example, or a variant.
        """
        if (
            not content.get("block_position_encoding")
            or content.get("relative_encoding")
            or content.get("spell_length")
        ):
            raise ConfigError(
                "model_type 'glm' is of another GLM: expected block_position_encoding "
                "true, and no other encoding."
            )
        dim_model, num_heads = content["hidden_size"], content["num_attention_heads"]
        return {
            "vocab_size": content["vocab_size"],
            "dim_model": dim_model,
            "num_heads": num_heads,
            "dim_head": dim_model // num_heads,
            "dim_ff": 4 * dim_model,
            "num_layers": content["num_layers"],
            "position_size": content["max_sequence_length"] + 1,
            "dropout_p": content.get("output_dropout_prob", 0.1),
            "ffn_activate_fn": "gelu_new",
        }


class GLM(CausalModel):
    """The language model GLM, which fills in blanks."""

    _CONFIG_TYPE = GLMConfig

    def __init__(self, config: GLMConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(**config.stack(config.num_layers), sharding=policy_of(config))
        self.input_embedding = Embedding(config.vocab_size, config.dim_model, **config.embedding())
        self.position_embedding = Embedding(
            config.position_size, config.dim_model, **config.embedding()
        )
        self.block_position_embedding = Embedding(
            config.position_size, config.dim_model, **config.embedding()
        )
        self.embed_dropout = torch.nn.Dropout(config.dropout_p)
        if config.cls_head:
            self.output_projection = Linear(config.dim_model, config.cls_head, **config.head())

    def forward(  # noqa: PLR0913 (ModelCenter's arguments, and those of other models)
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        block_position_ids: torch.Tensor | None = None,
        sep: torch.Tensor | None = None,
        *,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_logits: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
    ) -> Any:
        """Score the next token at every position.

        Returns scores (batch, seq, vocab_size), or with `cls_head` (batch, seq, cls_head).

        Args:
            input_ids: (batch, seq), integers; or `inputs_embeds` (batch, seq, dim_model), with all
                as described below for ids.
            position_ids, block_position_ids: (batch, tokens), those of a cache included; found by
                `places` if None.
            sep: (batch,), the number of tokens of the context, padding before them included: the
                place of the first start token if None. With a cache None means that it holds all of
                the context.
            length: (batch,), the number of valid tokens at the start of each row.
            attention_mask: (batch, keys), nonzero where a token is valid, any dtype. A mask (batch,
                queries, keys) is used as it is. It counts if `length` is given too.
            past_key_values: of earlier tokens, the whole context at least.
            return_dict: return a BaseModelOutput, with what the other arguments ask for, as in
                GPT2.

        Raises:
            InputError: for positions that cannot be found: without ids, or with a cache; for
                further outputs without `return_dict`.
        """
        more = use_cache or output_attentions or output_hidden_states or not output_logits
        needs_dict(return_dict, more)
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        start = past_length(past_key_values)
        mask = attention_mask_of(attention_mask, length, hidden, start)
        if sep is None and input_ids is not None and start == 0:
            sep = self.context_length(input_ids)
        if position_ids is None or block_position_ids is None:
            if input_ids is None or start > 0 or sep is None:
                raise InputError(
                    "position_ids and block_position_ids of all tokens are needed with a "
                    "cache, or without input_ids."
                )
            found = self.places(input_ids, mask.keys, sep)
            position_ids = found[0] if position_ids is None else position_ids
            block_position_ids = found[1] if block_position_ids is None else block_position_ids
        places, inner = (
            positions_from(given, start, hidden) for given in (position_ids, block_position_ids)
        )
        hidden = hidden + self.position_embedding(places) + self.block_position_embedding(inner)
        asked = ForwardOptions(
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_logits=output_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        out = self.run(
            self.embed_dropout(hidden),
            _with_context(mask, sep, hidden.shape[1], start),
            None,
            asked,
        )
        return out if return_dict else out.logits

    def context_length(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The first start token's place in each row of (batch, seq), int64 (batch,), else seq."""
        is_start = input_ids == self.config.sop_tok_id
        return torch.where(is_start.any(1), is_start.int().argmax(1), input_ids.shape[1])

    def places(
        self, input_ids: torch.Tensor, valid: torch.Tensor | None, sep: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the context and in the spans, each int64 (batch, seq).

        The spans belong to the [MASK]s in their order. In a context without [MASK] all are behind
        its last token.

        Args:
            input_ids: (batch, seq).
            valid: bool (batch, seq), False where a token is padding, which does not count; None
                where none is.
            sep: (batch,), number of tokens of the context.

        Raises:
            InputError: on the CPU, for more spans than [MASK]s.
        """
        place = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        counted = place if valid is None else (valid.cumsum(1) - 1).clamp(min=0)
        in_span = place >= sep[:, None]
        is_mask, is_start = (
            (input_ids == self.config.mask_tok_id) & ~in_span,
            (input_ids == self.config.sop_tok_id) & in_span,
        )
        num_masks = is_mask.sum(1, keepdim=True)
        _check_spans(is_start.sum(1, keepdim=True), num_masks)
        # the k-th [MASK] comes k-th
        of_masks = is_mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        span = torch.minimum(is_start.cumsum(1) - 1, num_masks - 1).clamp(min=0)
        blank = torch.where(
            num_masks > 0, of_masks.gather(1, span), (sep[:, None] - 1).clamp(min=0)
        )
        begin = torch.maximum(torch.where(is_start, place, 0).cummax(1).values, sep[:, None])
        return torch.where(in_span, counted.gather(1, blank), counted), torch.where(
            in_span, place - begin + 1, 0
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to scores (batch, seq, vocab_size), or (batch, seq, cls_head)."""
        has_classes = self.config.cls_head
        return (self.output_projection if has_classes else self.input_embedding.projection)(hidden)

    @property
    def num_positions(self) -> int:
        """The longest sequence for which positions are certain to suffice, whatever its context."""
        return int(self.config.position_size)

    def mask_arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        """As in CausalModel: positions are found with the prompt."""
        return {"attention_mask": mask}

    def decoding(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
    ) -> CausalDecoding:
        """As in BaseModel. Prompts without a start token get one, at their end.

        Raises:
            InputError: if some of the prompts have one, and others not.
        """
        self.check_generates()
        check_inputs(inputs, (), None, type(self).__name__)
        has_start = (input_ids == self.config.sop_tok_id).any(1)
        if not bool(has_start.all()):
            if bool(has_start.any()):
                raise InputError(
                    f"some prompts have the token {self.config.sop_tok_id}, which "
                    "starts a span: give it to all or none."
                )
            input_ids = torch.nn.functional.pad(input_ids, (0, 1), value=self.config.sop_tok_id)
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=True)
        sep = self.context_length(input_ids)
        places, inner = self.places(input_ids, mask, sep)
        return GLMDecoding(
            self, input_ids, mask, {"position_ids": places, "block_position_ids": inner, "sep": sep}
        )

    @classmethod
    def key_map(cls, config: GLMConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of THUDM's repositories `glm-*`."""
        pieces = {
            "input_embedding.weight": TensorPart("word_embeddings.weight"),
            "position_embedding.weight": TensorPart("transformer.position_embeddings.weight"),
            "block_position_embedding.weight": TensorPart(
                "transformer.block_position_embeddings.weight"
            ),
            **both("encoder.output_layernorm", "transformer.final_layernorm"),
        }
        parts = {
            ATTENTION_NORM: "input_layernorm",
            ATTENTION_OUT: "attention.dense",
            FFN_NORM: "post_attention_layernorm",
            FFN_IN: "mlp.dense_h_to_4h",
            FFN_OUT: "mlp.dense_4h_to_h",
        }
        width = config.num_heads * config.dim_head
        for layer in range(config.num_layers):
            ours, theirs = f"encoder.layers.{layer}.", f"transformer.layers.{layer}."
            pieces |= renamed(parts, ours, theirs)
            pieces |= packed(ours, theirs + "attention.query_key_value", width)
        return KeyMap(pieces, prefix="glm.", new=(r"output_projection\.",))


class GLMDecoding(CausalDecoding):
    """Prompts whose last span is continued."""

    def _extended(self, name: str, value: torch.Tensor, length: int) -> torch.Tensor:
        """Inside a span the outer position and `sep` stay, and the inner position grows."""
        if name == "sep":
            return value
        longer = extended(value, length, None)
        if name == "block_position_ids" and length > value.shape[1]:
            longer[:, value.shape[1] :] += torch.arange(
                1, length - value.shape[1] + 1, device=value.device
            )
        return longer


def _with_context(
    mask: AttentionMask, sep: torch.Tensor | None, num_queries: int, start: int
) -> AttentionMask:
    """The mask for contexts of `sep` (batch,) tokens; causal where that is None."""
    if mask.pairs is not None:
        return mask
    if sep is None:
        return mask._replace(causal=True)
    end = start + num_queries
    context = torch.arange(end, device=sep.device) < sep[:, None]
    return prefix_mask(mask, context, None, causal_pairs(num_queries, end, sep.device))


def _check_spans(num_spans: torch.Tensor, num_masks: torch.Tensor) -> None:
    # Where numbers are on a GPU, looking at them would stop the program until the GPU has them.
    if num_spans.device.type == "cpu" and bool(((num_spans > num_masks) & (num_masks > 0)).any()):
        row = int((num_spans - num_masks).argmax())
        raise InputError(
            f"row {row} has {int(num_spans[row])} spans and {int(num_masks[row])} [MASK]s: "
            "give position_ids."
        )
