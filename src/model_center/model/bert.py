"""BERT (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import Config
from model_center.layer.mask import AttentionMask
from model_center.layer.transformer import Past
from model_center.model.causal import ForwardOptions
from model_center.model.heads import LanguageModelHead, Pooler
from model_center.model.inputs import attention_mask_of, embedded, past_length, positions_from
from model_center.model.masked import MaskedConfig, MaskedModel, masked_key_map
from model_center.weights.keymap import KeyMap

# ModelCenter's names of them.
BertLMHead, BertPooler = LanguageModelHead, Pooler


@dataclasses.dataclass(kw_only=True)
class BertConfig(MaskedConfig):
    """Configuration of Bert; defaults are ModelCenter's.

    Attributes:
        head_activate_fn: the activation in the head of the language model, which in ModelCenter is
            gelu whatever that of the layers is, and in Hugging Face the same as theirs.
    """

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertForMaskedLM"

    POSITIONS: ClassVar[int | None] = 2
    POSITIONS_END: ClassVar[str] = (
        " The third is position_size in ModelCenter to 0.1.3 and dim_model from 0.1.5 on."
    )

    vocab_size: int = 119547
    head_activate_fn: str = "gelu"

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """As in MaskedConfig."""
        values = super().from_hugging_face(content)
        return values | {"head_activate_fn": values["ffn_activate_fn"]}

    def to_hugging_face(self) -> dict[str, Any]:
        """As in Config."""
        content = super().to_hugging_face()
        self.refuse_unless(head_activate_fn=self.ffn_activate_fn)
        return content

    @property
    def head_activation(self) -> str:
        """The activation in the head of the language model."""
        return self.head_activate_fn


class Bert(MaskedModel):
    """The encoder BERT, with the head of its pre-training and the pooler."""

    _CONFIG_TYPE: ClassVar[type[Config]] = BertConfig

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_logits: bool = True,
        output_pooler_output: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """Encode sequences; all valid tokens see each other.

        Args:
            input_ids: (batch, seq), integers; or `inputs_embeds` (batch, seq, dim_model).
            length: (batch,), the number of valid tokens at the start of each row; an
                alternative to the mask.
            attention_mask: (batch, seq), nonzero where a token is valid, any dtype, or (batch, seq,
                seq). It counts if `length` is given too.
            token_type_ids: (batch, seq); zeros if None.
            position_ids: (batch, seq); counted from 0 if None.
            head_mask: accepted and ignored, as in ModelCenter.
            inputs_embeds: instead of `input_ids`.
            use_cache: whether to return the keys and values.
            past_key_values: keys and values of earlier tokens, as they were returned.
            output_logits: scores of the language model's head, or with `cls_head` of the classes,
                at every position.
            output_pooler_output: whether to return what the pooler makes of the first token.
            output_attentions: whether to return the attention probabilities.
            output_hidden_states: whether to return the inputs of all layers.
            return_dict: False for a tuple of all fields.

        Returns:
            A BaseModelOutputWithPooling: `last_hidden_state` (batch, seq, dim_model), `logits`
            (batch, seq, vocab_size), or (batch, seq, cls_head).

        Raises:
            InputError: for shapes that do not match, and on the CPU for ids out of range.
        """
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        start = past_length(past_key_values)
        mask = attention_mask_of(attention_mask, length, hidden, start)
        if position_ids is None:
            positions = self.positions(input_ids, start, hidden, mask)
        else:
            positions = positions_from(position_ids, start, hidden)
        asked = ForwardOptions(
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_logits=output_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        return self.run(
            hidden,
            positions,
            token_type_ids,
            mask,
            asked,
            output_pooler_output=output_pooler_output,
        )

    def positions(
        self, input_ids: torch.Tensor | None, start: int, hidden: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        """Rows of the table of positions for new tokens, (seq,) or (batch, seq)."""
        return positions_from(None, start, hidden, self.config.position_size)

    @classmethod
    def key_map(cls, config: MaskedConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of BertForMaskedLM or BertForPreTraining."""
        head = "cls.predictions."
        return masked_key_map(
            config,
            "bert.",
            {
                "dense": head + "transform.dense",
                "layer_norm": head + "transform.LayerNorm",
                "decoder": head + "decoder",
                "bias": head + "bias",
            },
        )
