"""Qwen2, Qwen2.5 (Yang et al., "Qwen2 Technical Report", 2024): LLaMA with biases of q, k, v."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from model_center.errors import ConfigError
from model_center.layer.options import LayerVariant
from model_center.model.llama import Llama, LlamaConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(kw_only=True)
class Qwen2Config(LlamaConfig):
    """Configuration of Qwen2; defaults are those of the 7B model."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    has_window: ClassVar[bool] = True

    vocab_size: int = 152064
    dim_model: int = 3584
    num_heads: int = 28
    num_heads_kv: int = 4
    dim_ff: int = 18944
    num_layers: int = 28
    att_bias: bool = True
    rope_base: float = 1000000.0
    position_size: int = 131072

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json."""
        return super().from_hugging_face(content) | {
            "att_bias": True,
            "sliding_window": window_of(content),
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless(ffn_bias=False, **self.of_attention())
        slides = self.sliding_window is not None
        return super().to_hugging_face() | {
            "use_sliding_window": slides,
            "sliding_window": self.sliding_window,
            "max_window_layers": 0 if slides else self.num_layers,
            "layer_types": [SLIDING if slides else FULL] * self.num_layers,
        }

    def of_attention(self) -> dict[str, Any]:
        """What the configuration in Hugging Face cannot say of attention, and has to be so."""
        return {"att_bias": True, "dim_head": self.dim_model // self.num_heads}

    def layer_variant(self) -> LayerVariant:
        """How the layers depart from ModelCenter's."""
        return LayerVariant(out_bias=False)


class Qwen2(Llama):
    """The decoder-only language model Qwen2."""

    _CONFIG_TYPE = Qwen2Config


def window_of(content: Mapping[str, Any]) -> int | None:
    """The sliding window of all layers, or None.

    Raises:
        ConfigError: if some layers have a window and others not, or for another kind of attention.
    """
    size = content.get("sliding_window") if content.get("use_sliding_window") else None
    depth, first = content["num_hidden_layers"], content.get("max_window_layers", 28)
    kinds = content.get("layer_types") or [
        SLIDING if size is not None and layer >= first else FULL for layer in range(depth)
    ]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"layers of several kinds of attention ({', '.join(sorted(set(kinds)))}; "
            f"max_window_layers={first} of {depth}) are not "
            f"supported: expected {FULL!r} or {SLIDING!r} for all."
        )
    if kinds[0] not in {FULL, SLIDING}:
        raise ConfigError(f"layer_types are {kinds[0]!r}: expected {FULL!r} or {SLIDING!r}.")
    if kinds[0] == SLIDING and size is None:
        raise ConfigError(
            f"layer_types are {SLIDING!r}, but use_sliding_window or sliding_window says "
            "that there is no window."
        )
    return size if kinds[0] == SLIDING else None
