"""MaskedModel: BERT and its relatives, but for positions and the form of attention."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import ConfigError
from model_center.layer.blocks import Mask
from model_center.layer.embedding import Embedding
from model_center.layer.linear import Linear
from model_center.layer.transformer import Encoder
from model_center.model.base import BaseModel, policy_of
from model_center.model.causal import ForwardOptions
from model_center.model.heads import LanguageModelHead, Pooler
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


@dataclasses.dataclass(kw_only=True)
class MaskedConfig(TransformerConfig):
    """Configuration of a MaskedModel.

    Attributes:
        type_size: number of token types.
        num_layers: number of layers.
        position_size: rows of the table of positions.
        pad_token_id: the token whose embedding is not learned from lookups; None for none.
    """

    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "vocab_size": "vocab_size",
        "type_size": ("type_vocab_size", 2),
        "dim_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "dim_ff": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "position_size": ("max_position_embeddings", 512),
        "dropout_p": ("hidden_dropout_prob", 0.1),
        "norm_eps": ("layer_norm_eps", 1e-12),
        "ffn_activate_fn": ("hidden_act", "gelu"),
        "tied": ("tie_word_embeddings", True),
    }
    hugging_face_pad: ClassVar[int] = 0  # the pad_token_id of a config.json that does not say it

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = ("type_size", "position_size", "", "")

    type_size: int = 2
    num_layers: int = 12
    position_size: int = 512
    norm_eps: float = 1e-12
    att_mask_value: float | str = -10000.0
    post_layer_norm: bool = True
    pad_token_id: int | None = None

    @property
    def head_activation(self) -> str:
        """The activation in the head of the language model."""
        return "gelu"

    @property
    def position_padding_idx(self) -> int | None:
        """The position of padding, whose embedding is not learned; None for none."""
        return None

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """As in Config; decoders, and relative positions, are refused."""
        if content.get("position_embedding_type", "absolute") != "absolute" or content.get(
            "is_decoder", False
        ):
            raise ConfigError(
                "only encoders with position_embedding_type 'absolute' are supported."
            )
        values = super().from_hugging_face(content)
        return values | {
            "dim_head": values["dim_model"] // values["num_heads"],
            "pad_token_id": content.get("pad_token_id", cls.hugging_face_pad),
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """As in Config."""
        self.refuse_unless_classic_layers(
            att_bias=True, ffn_bias=True, attn_scale=True, post_layer_norm=True
        )
        return super().to_hugging_face() | {
            "attention_probs_dropout_prob": self.dropout_p,
            "pad_token_id": self.pad_token_id,
        }


class MaskedModel(BaseModel):
    """Embeddings of tokens, positions and types, an encoder, the head, and the pooler.

    Args:
        config: of the model.
        attention: further arguments of the Encoder.
    """

    def __init__(self, config: MaskedConfig, **attention: Any) -> None:
        super().__init__(config)
        of_all = {"embedding_size": config.dim_model, **config.embedding()}
        self.input_embedding = Embedding(
            config.vocab_size, padding_idx=config.pad_token_id, **of_all
        )
        self.position_embedding = Embedding(
            config.position_size, padding_idx=config.position_padding_idx, **of_all
        )
        self.token_type_embedding = Embedding(config.type_size, **of_all)
        self.embed_dropout = torch.nn.Dropout(config.dropout_p)
        self.encoder = Encoder(
            **config.stack(config.num_layers),
            post_layer_norm=config.post_layer_norm,
            sharding=policy_of(config),
            **attention,
        )
        if config.cls_head:
            self.cls_projection = Linear(config.dim_model, config.cls_head, **config.head())
        width, dtype, std = config.dim_model, config.dtype, config.proj_init_std
        self.lm_head = LanguageModelHead(
            width,
            config.vocab_size,
            config.norm_eps,
            dtype,
            activate_fn=config.head_activation,
            init_mean=config.proj_init_mean,
            init_std=std,
            tied=config.tied,
        )
        self.pooler = Pooler(width, dtype, init_std=std)

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        mask: Mask,
        asked: ForwardOptions,
        *,
        output_pooler_output: bool,
    ) -> Any:
        """Tokens' embeddings through layers and heads: BaseModelOutputWithPooling, or its tuple.

        Args:
            hidden: (batch, seq, dim_model), of the tokens alone.
            positions: (seq,) or (batch, seq).
            token_type_ids: (batch, seq), or of all tokens so far; zeros if None.
            mask: of the attention.
            asked, output_pooler_output: what to return.
        """
        types = (
            torch.zeros_like(positions)
            if token_type_ids is None
            else token_type_ids[:, -hidden.shape[1] :]
        )
        hidden = hidden + self.position_embedding(positions) + self.token_type_embedding(types)
        return asked.run(
            self.encoder,
            self.embed_dropout(hidden),
            mask,
            None,
            self.logits,
            self.pooler,
            output_pooler_output=output_pooler_output,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to scores (batch, seq, vocab_size), or (batch, seq, cls_head)."""
        if self.config.cls_head:
            return self.cls_projection(hidden)
        return self.lm_head(hidden, self.input_embedding if self.config.tied else None)


def masked_key_map(
    config: MaskedConfig, prefix: str, head: dict[str, str], *, global_attention: bool = False
) -> KeyMap:
    """Where each tensor of a MaskedModel is in a checkpoint of Hugging Face.

    Args:
        prefix: of all but the head.
        head: their names for `dense`, `layer_norm`, `decoder` and `bias` of the head.
        global_attention: whether there are projections for global tokens.
    """
    pieces = _encoder_pieces(config, prefix, global_attention)
    pieces |= both("lm_head.dense", head["dense"]) | both("lm_head.layer_norm", head["layer_norm"])
    ignored: tuple[str, ...] = (r"embeddings\.position_ids$", r"^cls\.seq_relationship\.")
    decoder, substitutes = head["decoder"], {}
    if config.tied:
        pieces["lm_head.decoder.bias"] = TensorPart(head["bias"])
        tied = {
            f"{decoder}.bias": head["bias"],
            f"{decoder}.weight": prefix + "embeddings.word_embeddings.weight",
        }
    else:  # `bias` is another tensor then, which nothing adds; transformers 4 has that one alone
        pieces |= both("lm_head.decoder", decoder)
        substitutes = {f"{decoder}.bias": head["bias"]}
        tied, ignored = {}, (*ignored, f"^{re.escape(head['bias'])}$")
    return KeyMap(
        pieces,
        prefix=prefix,
        ignored=ignored,
        tied=tied,
        substitutes=substitutes,
        new=(r"cls_projection\.", r"pooler\.", r"lm_head\."),
    )


def _encoder_pieces(
    config: MaskedConfig, prefix: str, global_attention: bool
) -> dict[str, TensorPart]:
    """Embeddings, layers and pooler.

    Norms there follow each part: that before attention is the last one of the layer below, or of
    the embeddings.
    """
    pieces = {
        "input_embedding.weight": TensorPart(prefix + "embeddings.word_embeddings.weight"),
        "position_embedding.weight": TensorPart(prefix + "embeddings.position_embeddings.weight"),
        "token_type_embedding.weight": TensorPart(
            prefix + "embeddings.token_type_embeddings.weight"
        ),
    }
    maps = {
        name: f"attention.self.{other}"
        for name, other in zip(PROJECTIONS, ("query", "key", "value"), strict=True)
    }
    if global_attention:
        maps |= {f"{own}_global": f"{other}_global" for own, other in maps.items()}
    maps |= {
        ATTENTION_OUT: "attention.output.dense",
        FFN_NORM: "attention.output.LayerNorm",
        FFN_IN: "intermediate.dense",
        FFN_OUT: "output.dense",
    }
    below = prefix + "embeddings.LayerNorm"
    for layer in range(config.num_layers):
        ours, theirs = f"encoder.layers.{layer}.", f"{prefix}encoder.layer.{layer}."
        pieces |= renamed({ATTENTION_NORM: below}, ours) | renamed(maps, ours, theirs)
        below = theirs + "output.LayerNorm"
    return pieces | renamed(
        {"encoder.output_layernorm": below, "pooler.dense": prefix + "pooler.dense"}
    )
