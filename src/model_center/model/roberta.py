"""RoBERTa (Liu et al., "RoBERTa: A Robustly Optimized BERT Pretraining Approach", 2019)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from model_center.config.base import Config
from model_center.layer.mask import AttentionMask
from model_center.model.bert import Bert
from model_center.model.heads import LanguageModelHead, Pooler
from model_center.model.inputs import positions_after_padding
from model_center.model.masked import MaskedConfig, masked_key_map
from model_center.weights.keymap import KeyMap

# Names of the head in checkpoints of RoBERTa and its relatives.
HEAD = {
    "dense": "lm_head.dense",
    "layer_norm": "lm_head.layer_norm",
    "decoder": "lm_head.decoder",
    "bias": "lm_head.bias",
}

# ModelCenter's names of them.
RobertaLMHead, RobertaPooler = LanguageModelHead, Pooler


@dataclasses.dataclass(kw_only=True)
class RobertaConfig(MaskedConfig):
    """Configuration of Roberta; defaults are ModelCenter's.

    Attributes:
        pad_token_id: the token of padding, and its position: that of the first token is one more.
    """

    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaForMaskedLM"
    hugging_face_pad: ClassVar[int] = 1

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = (
        "type_size",
        "position_size",
        "",
        "pad_token_id",
    )
    POSITIONS: ClassVar[int | None] = 2
    POSITIONS_END: ClassVar[str] = (
        " The third is position_size in ModelCenter to 0.1.3 and dim_model from 0.1.5 on."
    )

    vocab_size: int = 50265
    type_size: int = 1
    dim_model: int = 1024
    num_heads: int = 16
    dim_ff: int = 4096
    num_layers: int = 24
    position_size: int = 514
    norm_eps: float = 1e-5
    pad_token_id: int = 1

    @property
    def position_padding_idx(self) -> int:
        """The position of padding."""
        return self.pad_token_id


class Roberta(Bert):
    """The encoder RoBERTa, with head and pooler; `forward` is that of Bert.

    Positions count the tokens that are not `pad_token_id`, from `pad_token_id` + 1 on.
    """

    _CONFIG_TYPE: ClassVar[type[Config]] = RobertaConfig

    def positions(
        self, input_ids: torch.Tensor | None, start: int, hidden: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        """Rows of the table of positions for new tokens: the number of tokens so far."""
        return positions_after_padding(input_ids, start, hidden, mask.keys, self.config)

    @classmethod
    def key_map(cls, config: MaskedConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of RobertaForMaskedLM."""
        return masked_key_map(config, "roberta.", HEAD)
