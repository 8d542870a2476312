"""GPT-J (Wang and Komatsuzaki, "GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model",
2021).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import TransformerConfig
from model_center.errors import ConfigError
from model_center.layer.dense_attention import PositionBias
from model_center.layer.embedding import Embedding
from model_center.layer.mask import AttentionMask
from model_center.layer.position_embedding.rotary import RotaryEmbedding
from model_center.layer.quantized import whole
from model_center.layer.transformer import Encoder
from model_center.model.base import policy_of
from model_center.model.causal import TokenModel
from model_center.model.gpt2 import sizes_of
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
from model_center.weights.saving import Changes


@dataclasses.dataclass(kw_only=True)
class GPTjConfig(TransformerConfig):
    """Configuration of GPTj; defaults are ModelCenter's, but weights were trained with gelu_new.

    Attributes:
        num_layers: number of layers.
        pos_rotary_dim: channels of each head that positions turn.
        position_size: longest sequence of pre-training; longer ones are computed all the same.
    """

    model_type: ClassVar[str] = "gptj"
    architecture: ClassVar[str] = "GPTJForCausalLM"
    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "vocab_size": "vocab_size",
        "dim_model": "n_embd",
        "num_heads": "n_head",
        "num_layers": "n_layer",
        "pos_rotary_dim": "rotary_dim",
        "position_size": ("n_positions", 2048),
        "dropout_p": ("resid_pdrop", 0.0),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "ffn_activate_fn": ("activation_function", "gelu_new"),
        "tied": ("tie_word_embeddings", False),
    }

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = ("", "pos_rotary_dim", "", "")

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
        if content.get("tie_word_embeddings"):
            raise ConfigError(
                "tie_word_embeddings=True: the head of GPT-J has a bias, and a tied one has none "
                "here. Wrap Transformers' model instead (bmtrain.BMTrainModelWrapper)."
            )
        return super().from_hugging_face(content) | sizes_of(content)

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model."""
        self.refuse_unless_classic_layers(
            att_bias=False, ffn_bias=True, proj_bias=True, tied=False, attn_scale=True
        )
        return super().to_hugging_face() | {
            "n_inner": self.dim_ff,
            "embd_pdrop": self.dropout_p,
            "attn_pdrop": self.dropout_p,
        }


def _changed(factor: torch.Tensor, summand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`factor x + summand`, computed in fp32."""
    return (x.float() * factor.to(x.device) + summand.to(x.device)).to(x.dtype)


class GPTj(TokenModel):
    """GPT-J: attention and feed-forward network side by side, each after its norm of the input.

    A layer has two norms, as in ModelCenter; the original one has one, which files of Hugging Face
    give to both. Where both have been trained, the one for attention is written there, and the map
    behind the other takes up the difference.
    """

    _CONFIG_TYPE = GPTjConfig

    def __init__(self, config: GPTjConfig) -> None:
        super().__init__(config)
        self.input_embedding = Embedding(config.vocab_size, config.dim_model, **config.embedding())
        self.position_bias = RotaryEmbedding(config.pos_rotary_dim)
        self.embed_dropout = torch.nn.Dropout(config.dropout_p)
        self.encoder = Encoder(
            **config.stack(config.num_layers), parallel_ffn=True, sharding=policy_of(config)
        )
        self.add_head(config)

    def enter(
        self,
        hidden: torch.Tensor,
        mask: AttentionMask,
        position_ids: torch.Tensor | None,
        start: Offset,
    ) -> tuple[torch.Tensor, PositionBias | None]:
        """As in TokenModel: positions turn queries and keys. They are counted, whatever
        `position_ids` say, as in ModelCenter.
        """
        tables = self.position_bias.tables(positions_from(None, start, hidden))
        return self.embed_dropout(hidden), tables

    def mask_arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        """As in CausalModel: only distances count, which padding in front does not change."""
        return {"attention_mask": mask}

    @torch.no_grad()
    def changes(self) -> Changes:
        """As in BaseModel: of norms g x + b and h x + c, the map W (h x + c) + d is W' (g x + b) +
        d', where W' = W diag(h / g) and d' = d + W (c - h / g b). Computed in fp32.
        """
        found: dict[str, Any] = {}
        params = dict(self.named_parameters())
        for layer in range(self.config.num_layers):
            place = f"encoder.layers.{layer}."
            kept, other = (
                [params[f"{place}{norm}.{kind}"] for kind in ("weight", "bias")]
                for norm in (ATTENTION_NORM, FFN_NORM)
            )
            (g, b), (h, c) = ([whole(x).float() for x in norm] for norm in (kept, other))
            if torch.equal(g, h) and torch.equal(b, c):
                continue
            ratio, weight = h / g, params.get(f"{place}{FFN_IN}.weight")
            if weight is None or not ratio.isfinite().all():
                continue  # which the writer refuses, as both are one tensor there
            shift = whole(weight).float() @ (c - ratio * b)
            none, one = torch.zeros_like(g), torch.ones_like(shift)
            found |= {
                f"{place}{FFN_NORM}.weight": functools.partial(_changed, none, g),
                f"{place}{FFN_NORM}.bias": functools.partial(_changed, none, b),
                f"{place}{FFN_IN}.weight": functools.partial(_changed, ratio, none),
                f"{place}{FFN_IN}.bias": functools.partial(_changed, one, shift),
            }
        return found

    @classmethod
    def key_map(cls, config: GPTjConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of GPTJForCausalLM."""
        pieces = {
            "input_embedding.weight": TensorPart("transformer.wte.weight"),
            **both("encoder.output_layernorm", "transformer.ln_f"),
            **both("output_projection", "lm_head"),
        }
        maps = {name: f"attn.{name[-1]}_proj" for name in PROJECTIONS}
        maps[ATTENTION_OUT] = "attn.out_proj"
        parts = {
            ATTENTION_NORM: "ln_1",
            FFN_NORM: "ln_1",
            FFN_IN: "mlp.fc_in",
            FFN_OUT: "mlp.fc_out",
        }
        for layer in range(config.num_layers):
            ours, theirs = f"encoder.layers.{layer}.", f"transformer.h.{layer}."
            pieces |= renamed(maps, ours, theirs, kinds=["weight"])
            pieces |= renamed(parts, ours, theirs)
        return KeyMap(
            pieces,
            prefix="transformer.",
            ignored=(r"\.attn\.(masked_)?bias$", r"\.attn\.embed_positions$"),
            new=(r"cls_projection\.",),
        )
