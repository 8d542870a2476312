"""Mistral (Jiang et al., "Mistral 7B", 2023): LLaMA with a window of last tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from model_center.model.llama import Llama, LlamaConfig


@dataclasses.dataclass(kw_only=True)
class MistralConfig(LlamaConfig):
    """Configuration of Mistral; defaults are those of the 7B model, version 0.1."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    has_window: ClassVar[bool] = True

    dim_ff: int = 14336
    num_heads_kv: int = 8
    norm_eps: float = 1e-5
    position_size: int = 32768
    sliding_window: int | None = 4096

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json."""
        return super().from_hugging_face(content) | {
            "sliding_window": content.get("sliding_window", 4096)
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless(att_bias=False, ffn_bias=False)
        return super().to_hugging_face() | {"sliding_window": self.sliding_window}


class Mistral(Llama):
    """The decoder-only language model Mistral."""

    _CONFIG_TYPE = MistralConfig
