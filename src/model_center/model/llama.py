"""LLaMA 1, 2 and 3 (Touvron et al., "LLaMA", 2023; Grattafiori et al., "The Llama 3 Herd of
Models", 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.config.rules import GATED
from model_center.errors import ConfigError
from model_center.layer.embedding import Embedding
from model_center.layer.mask import AttentionMask
from model_center.layer.options import PLAIN, LayerVariant
from model_center.layer.position_embedding.rotary import RotaryEmbeddingESM
from model_center.layer.transformer import Encoder, Past
from model_center.model.base import policy_of
from model_center.model.causal import CausalModel, ForwardOptions
from model_center.model.inputs import attention_mask_of, embedded, past_position, positions_from
from model_center.weights.keymap import (
    ATTENTION_NORM,
    ATTENTION_OUT,
    FFN_NORM,
    FFN_OUT,
    PROJECTIONS,
    KeyMap,
    TensorPart,
    renamed,
)


@dataclasses.dataclass(kw_only=True)
class LlamaConfig(TransformerConfig):
    """Configuration of Llama; defaults are ModelCenter's.

    Attributes:
        num_layers: number of layers.
        num_heads_kv: heads of keys and values; -1 for num_heads.
        rope_base: base of the rotary positions' wavelengths.
        rope_scaling: how their frequencies are changed for longer sequences, as `rope_scaling` in
            Hugging Face configurations; None for not at all.
        position_size: longest sequence of pre-training; longer ones are computed all the same.
        sliding_window: number of last tokens that each token sees; None for all.
    """

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    has_window: ClassVar[bool] = False  # whether Hugging Face's model knows `sliding_window`
    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "vocab_size": "vocab_size",
        "dim_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "dim_ff": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "norm_eps": ("rms_norm_eps", 1e-6),
        "tied": ("tie_word_embeddings", False),
        "position_size": ("max_position_embeddings", 2048),
        "att_bias": ("attention_bias", False),
        "ffn_bias": ("mlp_bias", False),
    }

    POSITIONS: ClassVar[int | None] = 3
    POSITIONS_END: ClassVar[str] = (
        " The fourth is dim_head in ModelCenter's releases, num_heads_kv in its repository."
    )

    vocab_size: int = 32000
    dim_model: int = 4096
    num_heads: int = 32
    dim_head: int = 128
    dim_ff: int = 11008
    num_layers: int = 32
    num_heads_kv: int = -1
    pos_bias_type: str = "rotary"
    norm_bias: bool = False
    norm_eps: float = 1e-6
    att_bias: bool = False
    ffn_bias: bool = False
    ffn_activate_fn: str = "gated_silu"
    proj_bias: bool = False
    tied: bool = False
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    position_size: int = 2048
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """As in TransformerConfig; a window holds at least the token itself."""
        super().__post_init__()
        self.num_heads_kv = self.num_heads if self.num_heads_kv == -1 else self.num_heads_kv
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(
                f"sliding_window is {self.sliding_window}: expected a positive number of "
                "tokens, or None."
            )

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """As in Config."""
        values = super().from_hugging_face(content)
        num_heads = values["num_heads"]
        base, scaling = rope_of(content)
        return values | {
            "num_heads_kv": content.get("num_key_value_heads") or num_heads,
            "dim_head": content.get("head_dim") or values["dim_model"] // num_heads,
            "ffn_activate_fn": GATED + content.get("hidden_act", "silu"),
            "rope_base": base,
            "rope_scaling": scaling,
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        act = self.ffn_activate_fn.removeprefix(GATED)
        self.refuse_unless(
            norm_bias=False,
            attn_scale=True,
            length_scale=False,
            post_layer_norm=False,
            ffn_activate_fn=GATED + act,
        )
        if not self.has_window:
            self.refuse_unless(sliding_window=None)
        if not self.tied:
            self.refuse_unless(proj_bias=False)
        return super().to_hugging_face() | {
            "num_key_value_heads": self.num_heads_kv,
            "head_dim": self.dim_head,
            "hidden_act": act,
            "rope_theta": self.rope_base,
            "rope_scaling": self.rope_scaling,
        }

    def layer_variant(self) -> LayerVariant:
        """How the layers depart from ModelCenter's."""
        return PLAIN


class Llama(CausalModel):
    """The decoder-only language model LLaMA, and what is built alike."""

    _CONFIG_TYPE = LlamaConfig
    TELLS_PLACES = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.input_embedding = Embedding(config.vocab_size, config.dim_model, **config.embedding())
        self.position_bias = RotaryEmbeddingESM(
            config.dim_head, config.rope_base, scaling=config.rope_scaling
        )
        self.encoder = Encoder(
            **config.stack(config.num_layers),
            num_heads_kv=config.num_heads_kv,
            post_layer_norm=config.post_layer_norm,
            variant=config.layer_variant(),
            sharding=policy_of(config),
        )
        self.add_head(config)

    def forward(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        input_ids: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        attention_mask: torch.Tensor | AttentionMask | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_values: Past = None,
        output_logits: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
        *,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """Score the next token at every position.

        Args:
            input_ids: (batch, seq), integers; or `inputs_embeds` (batch, seq, dim_model).
            length: (batch,), the number of valid tokens at the start of each row. It
                counts if `attention_mask` is given too, as in ModelCenter.
            attention_mask: (batch, keys), nonzero where a token is valid, any dtype; keys are those
                of the cache and the new ones. A mask (batch, queries, keys) is used as it is.
            inputs_embeds: instead of `input_ids`.
            use_cache: whether to return the keys and values, for the next call.
            past_key_values: the keys and values of earlier tokens, as they were returned.
            output_logits: whether to return the scores.
            output_attentions: whether to return the attention probabilities.
            output_hidden_states: whether to return the inputs of all layers.
            return_dict: False for a tuple of all fields.
            position_ids: (batch, seq); counted from the cached tokens on if None.

        Returns:
            A BaseModelOutput: `logits` (batch, seq, vocab_size), or (batch, seq, cls_head), in the
            configuration's dtype.

        Raises:
            InputError: for shapes that do not match, and on the CPU for ids out of range.
        """
        hidden = embedded(input_ids, inputs_embeds, self.input_embedding)
        start = past_position(past_key_values)
        mask = attention_mask_of(
            attention_mask, length, hidden, start, causal=True, length_counts=True
        )
        mask = mask._replace(window=self.config.sliding_window if mask.causal else None)
        tables = self.position_bias.tables(positions_from(position_ids, start, hidden))
        asked = ForwardOptions(
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_logits=output_logits,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        return self.run(hidden, mask, tables, asked)

    @classmethod
    def key_map(cls, config: LlamaConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of LlamaForCausalLM."""
        pieces = {
            "input_embedding.weight": TensorPart("model.embed_tokens.weight"),
            "encoder.output_layernorm.weight": TensorPart("model.norm.weight"),
        }
        if not config.tied:
            pieces["output_projection.weight"] = TensorPart("lm_head.weight")
        for layer in range(config.num_layers):
            pieces |= cls._layer(config, f"encoder.layers.{layer}.", f"model.layers.{layer}.")
        return KeyMap(
            pieces,
            prefix="model.",
            ignored=(r"rotary_emb\.inv_freq$",),
            tied={"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {},
            new=(r"cls_projection\.",),
        )

    @classmethod
    def _layer(cls, config: LlamaConfig, ours: str, theirs: str) -> dict[str, TensorPart]:
        variant, weight = config.layer_variant(), ["weight"]
        out_bias = config.att_bias if variant.out_bias is None else variant.out_bias
        norms = {ATTENTION_NORM: "input_layernorm", FFN_NORM: "post_attention_layernorm"}
        if variant.head_norm_eps is not None:
            norms |= {
                f"self_att.self_attention.norm_{name}": f"self_attn.{name}_norm" for name in "qk"
            }
        projections = {name: f"self_attn.{name[-1]}_proj" for name in PROJECTIONS}
        out = {ATTENTION_OUT: "self_attn.o_proj"}
        ffn = {
            "ffn.ffn.w_in.w_0": "mlp.gate_proj",
            "ffn.ffn.w_in.w_1": "mlp.up_proj",
            FFN_OUT: "mlp.down_proj",
        }
        pieces = renamed(norms, ours, theirs, kinds=weight)
        for maps, biased in (
            (projections, config.att_bias),
            (out, out_bias),
            (ffn, config.ffn_bias),
        ):
            kinds = [*weight, "bias"] if biased else weight
            pieces |= renamed(maps, ours, theirs, kinds=kinds)
        return pieces


def rope_of(content: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of rotary positions, as transformers before and after 5 states them.

    Raises:
        ConfigError: for values that are no mapping, or positions of a part of the channels.
    """
    stated = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise ConfigError(f"rope_scaling is a {type(stated).__name__}: expected a mapping.")
    if stated.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"partial_rotary_factor={stated['partial_rotary_factor']} is not supported: expected 1."
        )
    base = stated.get("rope_theta", content.get("rope_theta", 10000.0))
    scaling = {
        name: value
        for name, value in stated.items()
        if name not in {"rope_theta", "partial_rotary_factor"}
    }
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return float(base), scaling if kind != "default" else None
