"""Longformer (Beltagy et al., "Longformer: The Long-Document Transformer", 2020), and Lawformer,
which is built alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.errors import ConfigError, InputError
from model_center.layer.mask import mask_of_lengths
from model_center.layer.sparse_attention import SparseMask, sparse_mask
from model_center.model.causal import ForwardOptions
from model_center.model.heads import LanguageModelHead, Pooler
from model_center.model.inputs import embedded, positions_after_padding, positions_from
from model_center.model.masked import MaskedConfig, MaskedModel, masked_key_map
from model_center.model.roberta import HEAD
from model_center.weights.keymap import KeyMap

# ModelCenter's names of them.
LongformerLMHead, LongformerPooler = LanguageModelHead, Pooler


@dataclasses.dataclass(kw_only=True)
class LongformerConfig(MaskedConfig):
    """Configuration of Longformer; defaults are ModelCenter's.

    Attributes:
        attention_window: tokens that each token sees around it; even.
        pad_token_id: the token of padding, and its position: that of the first token is one more.
        sep_tok_id: the token between two texts; the model itself does not look for it.
        position_bias_max_distance: accepted; there are no relative positions.
    """

    model_type: ClassVar[str] = "longformer"
    architecture: ClassVar[str] = "LongformerForMaskedLM"
    hugging_face_pad: ClassVar[int] = 1

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = (
        "type_size position_size",
        "position_bias_max_distance",
        "",
        "sep_tok_id attention_window pad_token_id",
    )

    vocab_size: int = 119547
    dropout_p: float = 0.1
    emb_init_std: float = 1
    proj_init_std: float = 1
    pad_token_id: int = 1
    sep_tok_id: int = 2
    attention_window: int = 512
    position_bias_max_distance: int = 1024

    @property
    def position_padding_idx(self) -> int:
        """The position of padding."""
        return self.pad_token_id

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json.

        Raises:
            ConfigError: if layers have windows of different widths.
        """
        windows = content.get("attention_window", 512)
        widths = {windows} if isinstance(windows, int) else set(windows)
        if len(widths) != 1:
            raise ConfigError(f"attention_window is {windows}: expected one width for all layers.")
        of_longformer = {
            "attention_window": widths.pop(),
            "sep_tok_id": content.get("sep_token_id", 2),
        }
        return super().from_hugging_face(content) | of_longformer

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        windows = [self.attention_window] * self.num_layers
        return super().to_hugging_face() | {
            "attention_window": windows,
            "sep_token_id": self.sep_tok_id,
        }


class Longformer(MaskedModel):
    """An encoder for texts of any length: memory and time grow linearly with it."""

    _CONFIG_TYPE = LongformerConfig

    def __init__(self, config: LongformerConfig) -> None:
        super().__init__(config, sparse_attention=True, attention_window=config.attention_window)

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        return_dict: bool = True,
        return_logits: bool = False,
        *,
        output_logits: bool = False,
        output_pooler_output: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> Any:
        """Encode sequences.

        Args:
            input_ids: (batch, seq), integers; or `inputs_embeds` (batch, seq, dim_model).
            length: (batch,), the number of valid tokens at the start of each row; an
                alternative to the mask.
            attention_mask: (batch, seq), nonzero where a token is valid, any dtype.
            global_attention_mask: (batch, seq), nonzero where a valid token sees all and is seen by
                all; None for none.
            token_type_ids: (batch, seq); zeros if None.
            position_ids: (batch, seq); the number of tokens so far if None.
            inputs_embeds: instead of `input_ids`.
            return_dict: False for a tuple of all fields.
            return_logits: return nothing but the scores, (batch, seq, vocab_size), or with
                `cls_head` (batch, seq, cls_head).
            output_logits: whether to return the scores beside the hidden states.
            output_pooler_output: whether to return what the pooler makes of the first token.
            output_attentions: probabilities (batch, heads, seq, seq), for which memory grows
                quadratically with seq.
            output_hidden_states: whether to return the inputs of all layers.

        Raises:
            InputError: for masks of another shape.
        """
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        mask = _mask(attention_mask, length, global_attention_mask, hidden)
        if position_ids is None:
            positions = positions_after_padding(input_ids, 0, hidden, None, self.config)
        else:
            positions = positions_from(position_ids, 0, hidden)
        asked = ForwardOptions(
            output_logits=output_logits or return_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict or return_logits,
        )
        pooled = output_pooler_output and not return_logits
        out = self.run(hidden, positions, token_type_ids, mask, asked, output_pooler_output=pooled)
        return out.logits if return_logits else out

    @classmethod
    def key_map(cls, config: LongformerConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of LongformerForMaskedLM."""
        return masked_key_map(config, "longformer.", HEAD, global_attention=True)


def _mask(
    attention_mask: torch.Tensor | None,
    length: torch.Tensor | None,
    global_attention_mask: torch.Tensor | None,
    hidden: torch.Tensor,
) -> SparseMask:
    """The mask of a pass over `hidden` (batch, seq, dim_model) from the arguments of the model."""
    shape = hidden.shape[:2]
    for name, mask in (
        ("attention_mask", attention_mask),
        ("global_attention_mask", global_attention_mask),
    ):
        if mask is not None and mask.shape != shape:
            raise InputError(
                f"{name} has shape {tuple(mask.shape)}: expected (batch, seq) = {tuple(shape)}."
            )
    if length is not None and attention_mask is None:
        attention_mask = mask_of_lengths(length, shape[1])
    if attention_mask is None:
        attention_mask = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    return sparse_mask(
        attention_mask.bool(),
        None if global_attention_mask is None else global_attention_mask.bool(),
    )
