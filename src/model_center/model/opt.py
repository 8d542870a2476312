"""OPT (Zhang et al., "OPT: Open Pre-trained Transformer Language Models", 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import ConfigError
from model_center.layer.embedding import Embedding
from model_center.layer.feedforward import GATED
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask
from model_center.layer.transformer import Encoder, Past
from model_center.layer.variant import LayerVariant
from model_center.model.base import policy_of
from model_center.model.causal import Asked, CausalModel
from model_center.model.inputs import (
    attention_mask_of,
    embedded,
    past_length,
    positions_from,
    refuse,
)
from model_center.weights.keymap import KeyMap, Piece, both

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
        prefix: accepted; of the tokenizer.
    """

    model_type: ClassVar[str] = "opt"
    has_post_layer_norm: ClassVar[bool] = True

    vocab_size: int = 50272
    num_layers: int = 12
    position_size: int = 2048
    dropout_p: float = 0.1
    att_mask_value: float | str = -65504.0
    ffn_activate_fn: str = "relu"
    pad_token_id: int | None = 1
    dim_embedding: int | None = None
    prefix: str = "</s>"

    def __post_init__(self) -> None:
        """As in TransformerConfig; the head must be tied."""
        super().__post_init__()
        if not self.tied:
            raise ConfigError("tied=False: the head of OPT is its embedding; leave it out.")

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json.

        Raises:
            ConfigError: for norms without parameters, or without a last one.
        """
        norms_first = content.get("do_layer_norm_before", True)
        if not content.get("layer_norm_elementwise_affine", True) or (
            norms_first and content.get("_remove_final_layer_norm")
        ):
            raise ConfigError(
                "layer_norm_elementwise_affine=False and _remove_final_layer_norm=True are "
                "not supported."
            )
        dim_model, num_heads = content["hidden_size"], content["num_attention_heads"]
        dim_embedding = content.get("word_embed_proj_dim") or dim_model
        return {
            "vocab_size": content["vocab_size"],
            "dim_model": dim_model,
            "num_heads": num_heads,
            "dim_head": dim_model // num_heads,
            "dim_ff": content["ffn_dim"],
            "num_layers": content["num_hidden_layers"],
            "position_size": content.get("max_position_embeddings", 2048),
            "dropout_p": content.get("dropout", 0.1),
            "ffn_activate_fn": content.get("activation_function", "relu"),
            "att_bias": content.get("enable_bias", True),
            "ffn_bias": content.get("enable_bias", True),
            "post_layer_norm": not norms_first,
            "dim_embedding": None if dim_embedding == dim_model else dim_embedding,
            "pad_token_id": content.get("pad_token_id", 1),
            "tied": content.get("tie_word_embeddings", True),
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless(
            dim_model=self.num_heads * self.dim_head,
            norm_bias=True,
            norm_eps=1e-5,
            ffn_bias=self.att_bias,
            attn_scale=True,
            length_scale=False,
            ffn_activate_fn=self.ffn_activate_fn.removeprefix(GATED),
        )
        return {
            "architectures": ["OPTForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim_model,
            "num_attention_heads": self.num_heads,
            "ffn_dim": self.dim_ff,
            "num_hidden_layers": self.num_layers,
            "max_position_embeddings": self.position_size,
            "dropout": self.dropout_p,
            "attention_dropout": self.dropout_p,
            "activation_function": self.ffn_activate_fn,
            "enable_bias": self.att_bias,
            "do_layer_norm_before": not self.post_layer_norm,
            "word_embed_proj_dim": self.dim_embedding or self.dim_model,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": True,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }


class OPT(CausalModel):
    """The decoder-only language model OPT; its stack, an Encoder, is called `decoder`."""

    _CONFIG_TYPE = OPTConfig

    def __init__(self, config: OPTConfig) -> None:
        super().__init__(config)
        self.decoder = Encoder(
            **config.stack(config.num_layers),
            post_layer_norm=config.post_layer_norm,
            variant=LayerVariant(norms_input=not config.post_layer_norm),
            sharding=policy_of(config),
        )
        width = config.dim_embedding or config.dim_model
        self.input_embedding = Embedding(
            config.vocab_size, width, padding_idx=config.pad_token_id, **config.embedding()
        )
        self.position_embedding = Embedding(
            config.position_size + OFFSET, config.dim_model, **config.embedding()
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

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        token_type_ids: None = None,
        position_ids: torch.Tensor | None = None,
        head_mask: None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_logits: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """Score the next token at every position.

        Arguments as in `GPT2`, but `inputs_embeds` are as wide as the embedding, and `position_ids`
        are rows of the table of positions, of which 2 is that of the first token; without them
        valid tokens are counted, those of a cache included.
        """
        refuse(head_mask=head_mask, token_type_ids=token_type_ids)
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        start = past_length(past_key_values)
        mask = attention_mask_of(attention_mask, length, start + hidden.shape[1], causal=True)
        positions = self.positions(position_ids, mask.keys, start, hidden)
        hidden = self.project_in(hidden) if self.config.dim_embedding else hidden
        asked = Asked(
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_logits=output_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        return self.run(hidden + self.position_embedding(positions), mask, None, asked)

    def positions(
        self,
        position_ids: torch.Tensor | None,
        valid: torch.Tensor | None,
        start: int,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Rows of the table of positions for the new tokens, (seq,) or (batch, seq); `valid` is
        bool (batch, tokens so far).
        """
        counted = positions_from(position_ids, start, hidden, self.config.position_size)
        if position_ids is not None:
            return counted
        if valid is None:
            return counted + OFFSET
        return (valid.cumsum(-1) * valid - 1 + OFFSET)[:, start:]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim_model) to scores (batch, seq, vocab_size), or (batch, seq, cls_head)."""
        is_narrow = self.config.dim_embedding and not self.config.cls_head
        return super().logits(self.project_out(hidden) if is_narrow else hidden)

    @property
    def num_positions(self) -> int:
        """The longest sequence that the table of positions is for."""
        return int(self.config.position_size)

    def mask_arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        """As in CausalModel: `forward` counts positions itself."""
        return {"attention_mask": mask}

    @classmethod
    def key_map(cls, config: OPTConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of OPTForCausalLM."""
        table = "model.decoder.embed_tokens.weight"
        pieces = {
            "input_embedding.weight": Piece(table),
            "position_embedding.weight": Piece("model.decoder.embed_positions.weight"),
        }
        if config.dim_embedding:
            pieces |= {
                f"project_{way}.weight": Piece(f"model.decoder.project_{way}.weight")
                for way in ("in", "out")
            }
        below = ""
        for layer in range(config.num_layers):
            theirs = f"model.decoder.layers.{layer}."
            pieces |= _layer(config, f"decoder.layers.{layer}.", theirs, below)
            below = theirs
        last = below if config.post_layer_norm else "model.decoder."
        pieces |= both("decoder.output_layernorm", last + "final_layer_norm")
        return KeyMap(
            pieces, prefix="model.", tied={"lm_head.weight": table}, new=(r"cls_projection\.",)
        )


def _layer(config: OPTConfig, ours: str, theirs: str, below: str) -> dict[str, Piece]:
    """One layer. With norms behind each part, that before attention is the last one of the layer
    `below`, if there is one.
    """
    attention, before, after = (
        ours + "self_att.self_attention.",
        "self_attn_layer_norm",
        "final_layer_norm",
    )
    pieces: dict[str, Piece] = {}
    if not config.post_layer_norm:
        pieces |= both(ours + "self_att.layernorm_before_attention", theirs + before)
    elif below:
        pieces |= both(ours + "self_att.layernorm_before_attention", below + after)
    pieces |= both(
        ours + "ffn.layernorm_before_ffn", theirs + (before if config.post_layer_norm else after)
    )
    maps = {f"{attention}project_{name}": f"{theirs}self_attn.{name}_proj" for name in "qkv"}
    maps[attention + "attention_out"] = theirs + "self_attn.out_proj"
    maps |= {f"{ours}ffn.ffn.w_in.w": f"{theirs}fc1", f"{ours}ffn.ffn.w_out": f"{theirs}fc2"}
    for own, other in maps.items():
        pieces |= (
            both(own, other) if config.att_bias else {f"{own}.weight": Piece(f"{other}.weight")}
        )
    return pieces
