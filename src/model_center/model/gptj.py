"""GPT-J (Wang and Komatsuzaki, "GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model",
2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import ConfigError
from model_center.layer.embedding import Embedding
from model_center.layer.feedforward import GATED
from model_center.layer.mask import AttentionMask
from model_center.layer.position_embedding.rotary import RotaryEmbedding
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
from model_center.weights.keymap import KeyMap, Piece


@dataclasses.dataclass(kw_only=True)
class GPTjConfig(TransformerConfig):
    """Configuration of GPTj; defaults are ModelCenter's, whose activation is not the one that the
    weights were trained with.

    Attributes:
        num_layers: number of layers.
        pos_rotary_dim: channels of each head that positions turn.
        position_size: longest sequence of pre-training; longer ones are computed all the same.
    """

    model_type: ClassVar[str] = "gptj"

    vocab_size: int = 50400
    dim_model: int = 4096
    num_heads: int = 16
    dim_head: int = 256
    dim_ff: int = 16384
    num_layers: int = 28
    emb_init_std: float = 1
    pos_bias_type: str = "rotary"
    pos_rotary_dim: int = 64
    att_init_std: float = 0.1
    att_bias: bool = False
    ffn_init_std: float = 0.1
    proj_init_std: float = 1
    tied: bool = False
    position_size: int = 2048

    def __post_init__(self) -> None:
        """As in TransformerConfig; positions turn channels that there are."""
        super().__post_init__()
        if not 0 < self.pos_rotary_dim <= self.dim_head:
            raise ConfigError(
                f"pos_rotary_dim is {self.pos_rotary_dim}: expected 1 to dim_head={self.dim_head}."
            )

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json."""
        dim_model, num_heads = content["n_embd"], content["n_head"]
        return {
            "vocab_size": content["vocab_size"],
            "dim_model": dim_model,
            "num_heads": num_heads,
            "dim_head": dim_model // num_heads,
            "dim_ff": content.get("n_inner") or 4 * dim_model,
            "num_layers": content["n_layer"],
            "pos_rotary_dim": content["rotary_dim"],
            "position_size": content.get("n_positions", 2048),
            "dropout_p": content.get("resid_pdrop", 0.0),
            "norm_eps": content.get("layer_norm_epsilon", 1e-5),
            "ffn_activate_fn": content.get("activation_function", "gelu_new"),
            "tied": content.get("tie_word_embeddings", False),
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless(
            dim_model=self.num_heads * self.dim_head,
            norm_bias=True,
            att_bias=False,
            ffn_bias=True,
            proj_bias=True,
            tied=False,
            attn_scale=True,
            length_scale=False,
            ffn_activate_fn=self.ffn_activate_fn.removeprefix(GATED),
        )
        return {
            "architectures": ["GPTJForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "n_embd": self.dim_model,
            "n_head": self.num_heads,
            "n_inner": self.dim_ff,
            "n_layer": self.num_layers,
            "n_positions": self.position_size,
            "rotary_dim": self.pos_rotary_dim,
            "resid_pdrop": self.dropout_p,
            "embd_pdrop": self.dropout_p,
            "attn_pdrop": self.dropout_p,
            "layer_norm_epsilon": self.norm_eps,
            "activation_function": self.ffn_activate_fn,
            "tie_word_embeddings": self.tied,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }


class GPTj(CausalModel):
    """The decoder-only language model GPT-J: attention and feed-forward network read one normalised
    input, side by side.

    ModelCenter has two norms in a layer, which are copies of the original one; here they are one
    parameter under both names.
    """

    _CONFIG_TYPE = GPTjConfig

    def __init__(self, config: GPTjConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(
            **config.stack(config.num_layers),
            parallel_ffn=True,
            variant=LayerVariant(one_norm=True),
            sharding=policy_of(config),
        )
        self.input_embedding = Embedding(config.vocab_size, config.dim_model, **config.embedding())
        self.position_bias = RotaryEmbedding(config.pos_rotary_dim)
        self.embed_dropout = torch.nn.Dropout(config.dropout_p)
        self.add_head(config)

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        token_type_ids: torch.Tensor | None = None,
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
        """Score the next token at every position; arguments as in `GPT2`."""
        refuse(head_mask=head_mask)
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        start = past_length(past_key_values)
        mask = attention_mask_of(attention_mask, length, start + hidden.shape[1], causal=True)
        tables = self.position_bias.tables(positions_from(position_ids, start, hidden))
        if token_type_ids is not None:
            hidden = hidden + self.input_embedding(token_type_ids[:, -hidden.shape[1] :])
        asked = Asked(
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_logits=output_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        return self.run(self.embed_dropout(hidden), mask, tables, asked)

    @classmethod
    def key_map(cls, config: GPTjConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of GPTJForCausalLM."""
        pieces = {"input_embedding.weight": Piece("transformer.wte.weight")}
        for kind in ("weight", "bias"):
            pieces[f"encoder.output_layernorm.{kind}"] = Piece(f"transformer.ln_f.{kind}")
            pieces[f"output_projection.{kind}"] = Piece(f"lm_head.{kind}")
        for layer in range(config.num_layers):
            pieces |= _layer(f"encoder.layers.{layer}.", f"transformer.h.{layer}.")
        return KeyMap(
            pieces,
            prefix="transformer.",
            ignored=(r"\.attn\.(masked_)?bias$", r"\.attn\.embed_positions$"),
            new=(r"cls_projection\.",),
        )


def _layer(ours: str, theirs: str) -> dict[str, Piece]:
    attention = ours + "self_att.self_attention."
    pieces = {
        f"{attention}project_{name}.weight": Piece(f"{theirs}attn.{name}_proj.weight")
        for name in "qkv"
    }
    pieces[f"{attention}attention_out.weight"] = Piece(f"{theirs}attn.out_proj.weight")
    for kind in ("weight", "bias"):
        for norm in ("self_att.layernorm_before_attention", "ffn.layernorm_before_ffn"):
            pieces[f"{ours}{norm}.{kind}"] = Piece(f"{theirs}ln_1.{kind}")
        pieces[f"{ours}ffn.ffn.w_in.w.{kind}"] = Piece(f"{theirs}mlp.fc_in.{kind}")
        pieces[f"{ours}ffn.ffn.w_out.{kind}"] = Piece(f"{theirs}mlp.fc_out.{kind}")
    return pieces
