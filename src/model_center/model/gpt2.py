"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import ConfigError
from model_center.layer.dense_attention import PositionBias
from model_center.layer.embedding import Embedding
from model_center.layer.mask import AttentionMask
from model_center.layer.transformer import Encoder
from model_center.model.base import policy_of
from model_center.model.causal import TokenModel
from model_center.model.inputs import Offset, positions_from
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
class GPT2Config(TransformerConfig):
    """Configuration of GPT2; defaults are ModelCenter's.

    Attributes:
        num_layers: number of layers.
        position_size: longest sequence.
    """

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "vocab_size": "vocab_size",
        "dim_model": "n_embd",
        "num_heads": "n_head",
        "num_layers": "n_layer",
        "position_size": ("n_positions", 1024),
        "dropout_p": ("resid_pdrop", 0.1),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "ffn_activate_fn": ("activation_function", "gelu_new"),
        "attn_scale": ("scale_attn_weights", True),
        "tied": ("tie_word_embeddings", True),
    }

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = ("", "position_size", "", "")

    vocab_size: int = 50258
    dim_model: int = 1024
    num_heads: int = 16
    dim_ff: int = 4096
    num_layers: int = 24
    position_size: int = 1024
    att_mask_value: float | str = -10000.0

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """As in Config; scores that are divided by the number of the layer are refused."""
        if content.get("scale_attn_by_inverse_layer_idx"):
            raise ConfigError("scale_attn_by_inverse_layer_idx=True is not supported.")
        return {**super().from_hugging_face(content), **sizes_of(content), "proj_bias": False}

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless_classic_layers(att_bias=True, ffn_bias=True)
        if not self.tied:
            self.refuse_unless(proj_bias=False)
        return super().to_hugging_face() | {
            "n_inner": self.dim_ff,
            "n_ctx": self.position_size,
            "embd_pdrop": self.dropout_p,
            "attn_pdrop": self.dropout_p,
        }


def sizes_of(content: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that the configurations of GPT-2 and GPT-J state by others."""
    width = content["n_embd"]
    dim_ff = content.get("n_inner") or 4 * width
    return {"dim_head": width // content["n_head"], "dim_ff": dim_ff}


class GPT2(TokenModel):
    """The decoder-only language model GPT-2."""

    _CONFIG_TYPE = GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.input_embedding = Embedding(config.vocab_size, config.dim_model, **config.embedding())
        self.position_embedding = Embedding(
            config.position_size, config.dim_model, **config.embedding()
        )
        self.embed_dropout = torch.nn.Dropout(config.dropout_p)
        self.encoder = Encoder(**config.stack(config.num_layers), sharding=policy_of(config))
        self.add_head(config)

    def enter(
        self,
        hidden: torch.Tensor,
        mask: AttentionMask,
        position_ids: torch.Tensor | None,
        start: Offset,
    ) -> tuple[torch.Tensor, PositionBias | None]:
        """As in TokenModel: positions have embeddings."""
        positions = positions_from(position_ids, start, hidden, self.config.position_size)
        hidden = hidden + self.position_embedding(positions)
        return self.embed_dropout(hidden), None

    @property
    def num_positions(self) -> int:
        """The rows of the table of positions."""
        return int(self.config.position_size)

    @classmethod
    def key_map(cls, config: GPT2Config) -> KeyMap:
        """Where each tensor is in a checkpoint of GPT2LMHeadModel."""
        pieces = {
            "input_embedding.weight": TensorPart("transformer.wte.weight"),
            "position_embedding.weight": TensorPart("transformer.wpe.weight"),
            **both("encoder.output_layernorm", "transformer.ln_f"),
        }
        if not config.tied:
            pieces["output_projection.weight"] = TensorPart("lm_head.weight")
        width = config.num_heads * config.dim_head
        norms = {ATTENTION_NORM: "ln_1", FFN_NORM: "ln_2"}
        maps = {ATTENTION_OUT: "attn.c_proj", FFN_IN: "mlp.c_fc", FFN_OUT: "mlp.c_proj"}
        for layer in range(config.num_layers):
            ours, theirs = f"encoder.layers.{layer}.", f"transformer.h.{layer}."
            pieces |= renamed(norms, ours, theirs)
            pieces |= packed(ours, theirs + "attn.c_attn", width, transpose=True)
            pieces |= renamed(maps, ours, theirs, transpose=True)  # matrices are (in, out) there
        return KeyMap(
            pieces,
            prefix="transformer.",
            ignored=(r"\.attn\.(masked_)?bias$",),
            tied={"lm_head.weight": "transformer.wte.weight"} if config.tied else {},
            new=(r"cls_projection\.",),
        )
