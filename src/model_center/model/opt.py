"""OPT (Zhang et al., "OPT: Open Pre-trained Transformer Language Models", 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import ConfigError
from model_center.layer.dense_attention import PositionBias
from model_center.layer.embedding import Embedding
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask
from model_center.layer.options import LayerVariant
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
    PROJECTIONS,
    KeyMap,
    TensorPart,
    both,
    renamed,
)

# rows of the table of positions before that of the first token; padding has the one before it
OFFSET = 2


@dataclasses.dataclass(kw_only=True)
class OPTConfig(TransformerConfig):
    """Configuration of OPT; defaults are ModelCenter's.

    Attributes:
        num_layers: number of layers.
        position_size: longest sequence.
        pad_token_id: a token whose embedding is not trained by being looked up; None for none.
        dim_embedding: width of the embedding, between which and dim_model two maps stand
            (OPT-350m); None for dim_model.
        norms_behind: whether the norms are behind each part (OPT-350m). `post_layer_norm` and
            `tied` are accepted, and do nothing, as in ModelCenter.
        prefix: accepted; of the tokenizer.
    """

    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "vocab_size": "vocab_size",
        "dim_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "dim_ff": "ffn_dim",
        "num_layers": "num_hidden_layers",
        "position_size": ("max_position_embeddings", 2048),
        "dropout_p": ("dropout", 0.1),
        "ffn_activate_fn": ("activation_function", "relu"),
        "att_bias": ("enable_bias", True),
        "pad_token_id": ("pad_token_id", 1),
    }

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = (
        "",
        "pad_token_id prefix position_size",
        "",
        "",
    )

    vocab_size: int = 50272
    num_layers: int = 12
    position_size: int = 2048
    dropout_p: float = 0.1
    att_mask_value: float | str = -65504.0
    ffn_activate_fn: str = "relu"
    pad_token_id: int | None = 1
    dim_embedding: int | None = None
    prefix: str = "</s>"
    norms_behind: bool = False

    @classmethod
    def arguments(cls) -> tuple[str, ...]:
        """As in TransformerConfig; the head has none."""
        return tuple(name for name in super().arguments() if not name.startswith("proj_"))

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """As in Config; norms without parameters, or without a last one, are refused."""
        norms_first = content.get("do_layer_norm_before", True)
        if not content.get("layer_norm_elementwise_affine", True) or (
            norms_first and content.get("_remove_final_layer_norm")
        ):
            raise ConfigError(
                "layer_norm_elementwise_affine=False and _remove_final_layer_norm=True are "
                "not supported."
            )
        if not content.get("tie_word_embeddings", True):
            raise ConfigError("tie_word_embeddings=False: the head of OPT is its embedding.")
        values = super().from_hugging_face(content)
        width = values["dim_model"]
        dim_embedding = content.get("word_embed_proj_dim") or width
        return values | {
            "dim_head": width // values["num_heads"],
            "ffn_bias": values["att_bias"],
            "norms_behind": not norms_first,
            "dim_embedding": None if dim_embedding == width else dim_embedding,
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless_classic_layers(norm_eps=1e-5, ffn_bias=self.att_bias, attn_scale=True)
        return super().to_hugging_face() | {
            "attention_dropout": self.dropout_p,
            "tie_word_embeddings": True,
            "do_layer_norm_before": not self.norms_behind,
            "word_embed_proj_dim": self.dim_embedding or self.dim_model,
        }


class OPT(TokenModel):
    """The decoder-only language model OPT; its stack, an Encoder, is called `decoder`."""

    _CONFIG_TYPE = OPTConfig
    ALWAYS_TIED = True

    def __init__(self, config: OPTConfig) -> None:
        super().__init__(config)
        width = config.dim_embedding or config.dim_model
        self.input_embedding = Embedding(
            config.vocab_size, width, padding_idx=config.pad_token_id, **config.embedding()
        )
        self.position_embedding = Embedding(
            config.position_size + OFFSET, config.dim_model, **config.embedding()
        )
        self.decoder = Encoder(
            **config.stack(config.num_layers),
            post_layer_norm=config.norms_behind,
            variant=LayerVariant(norms_input=not config.norms_behind),
            sharding=policy_of(config),
        )
        if config.dim_embedding:
            maps: dict[str, Any] = {"dtype": config.dtype, "init_std": config.proj_init_std}
            self.project_in = Linear(width, config.dim_model, **maps)
            self.project_out = Linear(config.dim_model, width, **maps)
        self.add_head(config)

    @property
    def stack(self) -> Encoder:
        """The layers."""
        return self.decoder

    def enter(
        self,
        hidden: torch.Tensor,
        mask: AttentionMask,
        position_ids: torch.Tensor | None,
        start: Offset,
    ) -> tuple[torch.Tensor, PositionBias | None]:
        """As in TokenModel, but `inputs_embeds` are as wide as the embedding, and `position_ids`
        are rows of the table of positions, of which 2 is that of the first token; without them
        valid tokens are counted, those of a cache included.
        """
        positions = positions_from(position_ids, start, hidden, self.config.position_size)
        if position_ids is None and mask.keys is None:
            positions = positions + OFFSET
        elif position_ids is None and mask.keys is not None:
            positions = (mask.keys.cumsum(-1) * mask.keys - 1 + OFFSET)[:, start:]
        hidden = self.project_in(hidden) if self.config.dim_embedding else hidden
        return hidden + self.position_embedding(positions), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to scores (batch, seq, vocab_size), or (batch, seq, cls_head)."""
        is_narrow = self.config.dim_embedding and not self.config.cls_head
        return super().logits(self.project_out(hidden) if is_narrow else hidden)

    @property
    def num_positions(self) -> int:
        """The longest sequence that the table of positions is for."""
        return int(self.config.position_size)

    def position_ids_of(self, places: torch.Tensor) -> torch.Tensor:
        """Rows of the table of positions."""
        return places + OFFSET

    def mask_arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        """As in CausalModel: `forward` counts positions itself."""
        return {"attention_mask": mask}

    @classmethod
    def key_map(cls, config: OPTConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of OPTForCausalLM."""
        table = "model.decoder.embed_tokens.weight"
        pieces = {
            "input_embedding.weight": TensorPart(table),
            "position_embedding.weight": TensorPart("model.decoder.embed_positions.weight"),
        }
        if config.dim_embedding:
            maps = {f"project_{way}": f"model.decoder.project_{way}" for way in ("in", "out")}
            pieces |= renamed(maps, kinds=["weight"])
        below = ""
        for layer in range(config.num_layers):
            theirs = f"model.decoder.layers.{layer}."
            pieces |= _layer(config, f"decoder.layers.{layer}.", theirs, below)
            below = theirs
        last = below if config.norms_behind else "model.decoder."
        pieces |= both("decoder.output_layernorm", last + "final_layer_norm")
        return KeyMap(
            pieces, prefix="model.", tied={"lm_head.weight": table}, new=(r"cls_projection\.",)
        )


def _layer(config: OPTConfig, ours: str, theirs: str, below: str) -> dict[str, TensorPart]:
    """One layer; with norms behind each part, that before attention is the `below` layer's last."""
    norms = {ATTENTION_NORM: theirs + "self_attn_layer_norm", FFN_NORM: theirs + "final_layer_norm"}
    if config.norms_behind:
        norms = {FFN_NORM: norms[ATTENTION_NORM]}
        norms |= {ATTENTION_NORM: below + "final_layer_norm"} if below else {}
    maps = {name: f"self_attn.{name[-1]}_proj" for name in PROJECTIONS}
    maps |= {ATTENTION_OUT: "self_attn.out_proj", FFN_IN: "fc1", FFN_OUT: "fc2"}
    kinds = ("weight", "bias") if config.att_bias else ("weight",)
    return renamed(norms, ours) | renamed(maps, ours, theirs, kinds=kinds)
