"""Qwen3 (Yang et al., "Qwen3 Technical Report", 2025): Qwen2, q and k normed, not biased."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from model_center.layer.options import LayerVariant
from model_center.model.llama import Llama
from model_center.model.qwen2 import Qwen2Config


@dataclasses.dataclass(kw_only=True)
class Qwen3Config(Qwen2Config):
    """Configuration of Qwen3; defaults are those of the 8B model."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    vocab_size: int = 151936
    dim_model: int = 4096
    num_heads: int = 32
    num_heads_kv: int = 8
    dim_ff: int = 12288
    num_layers: int = 36
    att_bias: bool = False
    position_size: int = 40960

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json."""
        own = {
            "att_bias": content.get("attention_bias", False),
            "dim_head": content.get("head_dim", 128),
        }
        return super().from_hugging_face(content) | own

    def of_attention(self) -> dict[str, Any]:
        """What the configuration in Hugging Face cannot say of attention: nothing."""
        return {}

    def layer_variant(self) -> LayerVariant:
        """How the layers depart from ModelCenter's."""
        return LayerVariant(head_norm_eps=self.norm_eps)


class Qwen3(Llama):
    """The decoder-only language model Qwen3."""

    _CONFIG_TYPE = Qwen3Config
