"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

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
from model_center.layer.transformer import Encoder, Past
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
class GPT2Config(TransformerConfig):
    """Configuration of GPT2; defaults are ModelCenter's.

    Attributes:
        num_layers: number of layers.
        position_size: longest sequence.
    """

    model_type: ClassVar[str] = "gpt2"

    vocab_size: int = 50258
    dim_model: int = 1024
    num_heads: int = 16
    dim_ff: int = 4096
    num_layers: int = 24
    position_size: int = 1024
    att_mask_value: float | str = -10000.0

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json.

        Raises:
            ConfigError: for scores that are divided by the number of the layer.
        """
        if content.get("scale_attn_by_inverse_layer_idx"):
            raise ConfigError("scale_attn_by_inverse_layer_idx=True is not supported.")
        dim_model, num_heads = content["n_embd"], content["n_head"]
        return {
            "vocab_size": content["vocab_size"],
            "dim_model": dim_model,
            "num_heads": num_heads,
            "dim_head": dim_model // num_heads,
            "dim_ff": content.get("n_inner") or 4 * dim_model,
            "num_layers": content["n_layer"],
            "position_size": content.get("n_positions", 1024),
            "dropout_p": content.get("resid_pdrop", 0.1),
            "norm_eps": content.get("layer_norm_epsilon", 1e-5),
            "ffn_activate_fn": content.get("activation_function", "gelu_new"),
            "attn_scale": content.get("scale_attn_weights", True),
            "tied": content.get("tie_word_embeddings", True),
            "proj_bias": False,
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless(
            dim_model=self.num_heads * self.dim_head,
            norm_bias=True,
            att_bias=True,
            ffn_bias=True,
            length_scale=False,
            ffn_activate_fn=self.ffn_activate_fn.removeprefix(GATED),
        )
        if not self.tied:
            self.refuse_unless(proj_bias=False)
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "n_embd": self.dim_model,
            "n_head": self.num_heads,
            "n_inner": self.dim_ff,
            "n_layer": self.num_layers,
            "n_positions": self.position_size,
            "n_ctx": self.position_size,
            "resid_pdrop": self.dropout_p,
            "embd_pdrop": self.dropout_p,
            "attn_pdrop": self.dropout_p,
            "layer_norm_epsilon": self.norm_eps,
            "activation_function": self.ffn_activate_fn,
            "scale_attn_weights": self.attn_scale,
            "tie_word_embeddings": self.tied,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }


class GPT2(CausalModel):
    """The decoder-only language model GPT-2."""

    _CONFIG_TYPE = GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.encoder = Encoder(**config.stack(config.num_layers), sharding=policy_of(config))
        self.input_embedding = Embedding(config.vocab_size, config.dim_model, **config.embedding())
        self.position_embedding = Embedding(
            config.position_size, config.dim_model, **config.embedding()
        )
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
        """Score the next token at every position.

        Args:
            input_ids: (batch, seq), integers; or `inputs_embeds` (batch, seq, dim_model).
            length, attention_mask: see `attention_mask_of`. A mask (batch, queries, keys) is used
                as it is, not causal.
            token_type_ids: their embeddings are added to the tokens', if given.
            position_ids: (batch, seq); counted from the cached tokens on if None.
            head_mask: accepted as None only.
            use_cache, past_key_values: the cache to return, and of earlier tokens.
            output_logits, output_attentions, output_hidden_states: what to return beside the last
                hidden states.
            return_dict: False for a tuple of all fields.
        """
        refuse(head_mask=head_mask)
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        start = past_length(past_key_values)
        mask = attention_mask_of(attention_mask, length, start + hidden.shape[1], causal=True)
        positions = positions_from(position_ids, start, hidden, self.config.position_size)
        hidden = hidden + self.position_embedding(positions)
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
        return self.run(self.embed_dropout(hidden), mask, None, asked)

    @property
    def num_positions(self) -> int:
        """The rows of the table of positions."""
        return int(self.config.position_size)

    @classmethod
    def key_map(cls, config: GPT2Config) -> KeyMap:
        """Where each tensor is in a checkpoint of GPT2LMHeadModel."""
        pieces = {
            "input_embedding.weight": Piece("transformer.wte.weight"),
            "position_embedding.weight": Piece("transformer.wpe.weight"),
            "encoder.output_layernorm.weight": Piece("transformer.ln_f.weight"),
            "encoder.output_layernorm.bias": Piece("transformer.ln_f.bias"),
        }
        if not config.tied:
            pieces["output_projection.weight"] = Piece("lm_head.weight")
        width = config.num_heads * config.dim_head
        for layer in range(config.num_layers):
            pieces |= _layer(f"encoder.layers.{layer}.", f"transformer.h.{layer}.", width)
        return KeyMap(
            pieces,
            prefix="transformer.",
            ignored=(r"\.attn\.(masked_)?bias$",),
            tied={"lm_head.weight": "transformer.wte.weight"} if config.tied else {},
            new=(r"cls_projection\.",),
        )


def _layer(ours: str, theirs: str, width: int) -> dict[str, Piece]:
    """One layer: matrices are (in, out) there, and those of query, key and value are one."""
    attention, ffn = ours + "self_att.self_attention.", ours + "ffn.ffn."
    pieces = {}
    for kind in ("weight", "bias"):
        turned = kind == "weight"
        pieces[f"{ours}self_att.layernorm_before_attention.{kind}"] = Piece(f"{theirs}ln_1.{kind}")
        pieces[f"{ours}ffn.layernorm_before_ffn.{kind}"] = Piece(f"{theirs}ln_2.{kind}")
        for place, name in enumerate(("project_q", "project_k", "project_v")):
            rows = (place * width, (place + 1) * width)
            pieces[f"{attention}{name}.{kind}"] = Piece(
                f"{theirs}attn.c_attn.{kind}", transpose=turned, rows=rows
            )
        pieces[f"{attention}attention_out.{kind}"] = Piece(
            f"{theirs}attn.c_proj.{kind}", transpose=turned
        )
        pieces[f"{ffn}w_in.w.{kind}"] = Piece(f"{theirs}mlp.c_fc.{kind}", transpose=turned)
        pieces[f"{ffn}w_out.{kind}"] = Piece(f"{theirs}mlp.c_proj.{kind}", transpose=turned)
    return pieces
