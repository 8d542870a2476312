"""T5, T5 v1.1, mT5 and Flan-T5.

Sources: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (2020); Xue et al., "mT5" (2021); Chung et al., "Scaling Instruction-Finetuned Language
Models" (2022).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

from bmtrain.checkpoint.files import is_there
from bmtrain.checkpoint.sources import HUGGING_FACE, open_source
from model_center.config.base import RELATIVE
from model_center.config.rules import GATED
from model_center.errors import ConfigError
from model_center.layer.embedding import Embedding
from model_center.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from model_center.weights.keymap import FFN_IN, FFN_NORM, FFN_OUT, KeyMap, TensorPart, renamed


@dataclasses.dataclass(kw_only=True)
class T5Config(Seq2SeqConfig):
    """Configuration of T5; defaults are ModelCenter's.

    Attributes:
        scale: whether all scores are multiplied by 100 / sqrt(dim_model): ModelCenter's files of T5
            1.0, whose weights are a hundredth of the original ones so that fp16 does not overflow,
            need it.
        scale_logits: whether logits are multiplied by 1 / sqrt(dim_model), as the original files of
            T5 1.0 need it.
    """

    model_type: ClassVar[str] = "t5"
    other_types: ClassVar[tuple[str, ...]] = ("mt5",)
    architecture: ClassVar[str] = "T5ForConditionalGeneration"
    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "vocab_size": "vocab_size",
        "dim_model": "d_model",
        "num_heads": "num_heads",
        "dim_head": "d_kv",
        "dim_ff": "d_ff",
        "num_encoder_layers": "num_layers",
        "dropout_p": ("dropout_rate", 0.1),
        "norm_eps": ("layer_norm_epsilon", 1e-6),
        "position_bias_num_buckets": ("relative_attention_num_buckets", 32),
        "position_bias_max_distance": ("relative_attention_max_distance", 128),
    }

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = ("", RELATIVE, "", "scale")

    vocab_size: int = 32128
    ffn_activate_fn: str = "relu"
    scale: bool | None = None
    scale_logits: bool = False

    def __post_init__(self) -> None:
        """As in TransformerConfig; only one scale can be meant."""
        super().__post_init__()
        if self.scale and self.scale_logits:
            raise ConfigError(
                "scale and scale_logits are both true: set scale for ModelCenter's files, or "
                "scale_logits for the original ones."
            )

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str], **overrides: Any) -> T5Config:
        """As TransformerConfig, but tied where the weights beside the file have no head:
        transformers 5 makes it one tensor with the embedding then, whatever the file says.
        """
        config = super().from_json_file(json_file, **overrides)
        folder = pathlib.Path(json_file).parent
        if (
            config.tied
            or config.hugging_face is None
            or "tied" in overrides
            or not any(is_there(folder / name) for name in HUGGING_FACE)
            or any(name.endswith("lm_head.weight") for name in open_source(folder).headers)
        ):
            return config
        return super().from_json_file(json_file, tied=True, **overrides)

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json.

        transformers 5 says of every model that it is tied; those that do not scale their logits
        have heads of their own, if their files do.
        """
        tied = content.get("tie_word_embeddings", True)
        scaled = content.get("scale_decoder_outputs", tied and content.get("model_type") != "mt5")
        kind = content.get("feed_forward_proj", "relu")
        # What `kind` says in one word, other values may say otherwise.
        gated = content.get("is_gated_act", kind.startswith("gated-"))
        # "gated-gelu" means the tanh form, with which the models were trained.
        act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        act = content.get("dense_act_fn", act)
        return super().from_hugging_face(content) | {
            "num_decoder_layers": content.get("num_decoder_layers") or content["num_layers"],
            "ffn_activate_fn": GATED + act if gated else act,
            "tied": tied and scaled,
            "scale_logits": scaled,
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        if self.scale:
            raise ConfigError(
                "scale=True: the weights are those of ModelCenter, a hundredth of the "
                "original ones, which transformers' configuration cannot express. Save it with "
                "format='model_center'."
            )
        self.refuse_unless(
            norm_bias=False, att_bias=False, ffn_bias=False, attn_scale=False, length_scale=False
        )
        if self.ffn_activate_fn == "gated_gelu":  # "gated-gelu" means the tanh form there
            self.refuse_unless(ffn_activate_fn="gated_gelu_new")
        if not self.tied:
            self.refuse_unless(proj_bias=False)
        act = self.ffn_activate_fn.removeprefix(GATED)
        gated = self.ffn_activate_fn.startswith(GATED)
        kind = "gated-gelu" if gated and act == "gelu_new" else ("gated-" if gated else "") + act
        return super().to_hugging_face() | {
            "num_decoder_layers": self.num_decoder_layers,
            "feed_forward_proj": kind,
            # says whether logits are scaled; whether there is a head, the weights say
            "tie_word_embeddings": self.tied and self.scale_logits,
            "scale_decoder_outputs": self.scale_logits,
            "is_encoder_decoder": True,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


class T5(Seq2SeqModel):
    """The encoder-decoder T5."""

    _CONFIG_TYPE = T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(
            config, Embedding(config.vocab_size, config.dim_model, **config.embedding())
        )

    @property
    def logit_factor(self) -> float:
        """What hidden states are multiplied by before the head of the language model."""
        return self.config.dim_model**-0.5 if self.config.scale_logits else 1.0

    @property
    def score_factor(self) -> float:
        """What scores are multiplied by, those of classes too."""
        return 100 * self.config.dim_model**-0.5 if self.config.scale else 1.0

    @classmethod
    def key_map(cls, config: T5Config) -> KeyMap:
        """Where each tensor is in a checkpoint of T5ForConditionalGeneration."""
        pieces = {"input_embedding.weight": TensorPart("shared.weight")}
        tied = {f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")}
        head = {"lm_head.weight": "shared.weight"}
        if not config.tied:
            pieces["output_projection.weight"] = TensorPart("lm_head.weight")
        for part, short, depth in (
            ("encoder", "enc", config.num_encoder_layers),
            ("decoder", "dec", config.num_decoder_layers),
        ):
            bias = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            pieces[f"position_bias_{short}.relative_attention_bias"] = TensorPart(bias)
            pieces[f"{part}.output_layernorm.weight"] = TensorPart(
                f"{part}.final_layer_norm.weight"
            )
            for layer in range(depth):
                pieces |= _layer(
                    config,
                    f"{part}.layers.{layer}.",
                    f"{part}.block.{layer}.layer.",
                    part == "decoder",
                )
        ignored = (
            r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
        )
        return KeyMap(
            pieces,
            ignored=ignored,
            tied=tied | head if config.tied else tied,
            substitutes={} if config.tied else head,
            new=(r"cls_projection\.",),
        )


def _layer(config: T5Config, ours: str, theirs: str, is_decoder: bool) -> dict[str, TensorPart]:
    names = _attention("self_att.", "0.", "SelfAttention")
    if is_decoder:
        names |= _attention("cross_att.", "1.", "EncDecAttention")
    last = "2." if is_decoder else "1."
    names |= {FFN_NORM: last + "layer_norm", FFN_OUT: last + "DenseReluDense.wo"}
    ends = ("_0", "_1") if config.ffn_activate_fn.startswith(GATED) else ("",)
    names |= {FFN_IN + end: f"{last}DenseReluDense.wi{end}" for end in ends}
    return renamed(names, ours, theirs, kinds=["weight"])


def _attention(ours: str, theirs: str, kind: str) -> dict[str, str]:
    names = {f"{ours}self_attention.project_{name}": f"{theirs}{kind}.{name}" for name in "qkv"}
    names[f"{ours}self_attention.attention_out"] = f"{theirs}{kind}.o"
    return names | {f"{ours}layernorm_before_attention": f"{theirs}layer_norm"}
