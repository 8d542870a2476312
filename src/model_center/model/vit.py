"""ViT (Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at
Scale", 2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import Config
from model_center.config.rules import GATED
from model_center.errors import ConfigError, InputError
from model_center.layer.embedding import PatchEmbedding
from model_center.layer.linear import Linear
from model_center.layer.mask import mask_from
from model_center.layer.transformer import Encoder
from model_center.model.base import BaseModel, policy_of
from model_center.model.inputs import needs_dict
from model_center.model.outputs import BaseModelOutput
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
class VitConfig(Config):
    """Configuration of ViT; defaults are ModelCenter's.

    Attributes:
        img_size, patch_size: of square images and patches, in pixels.
        channels_in: colours.
        num_classes: what the head scores.
        hidden_size, num_layers, num_heads, mlp_size: sizes.
        attn_bias, norm_bias, ffn_bias: which parts have a bias.
        attn_scale: accepted; scores are always divided by the square root of their length, as in
            ModelCenter.
        representation_size: width of a layer before the head; None for none.
        drop: dropout probability.
        norm_eps: of the norms. Models that Google published were trained with 1e-12, which Hugging
            Face's files say; ModelCenter's files do not, and its default is 1e-5.
        ffn_activate_fn: activation of the feed-forward networks.
    """

    model_type: ClassVar[str] = "vit"
    architecture: ClassVar[str] = "ViTForImageClassification"
    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "img_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "channels_in": ("num_channels", 3),
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_size": "intermediate_size",
        "drop": ("hidden_dropout_prob", 0.0),
        "norm_eps": ("layer_norm_eps", 1e-12),
        "ffn_activate_fn": ("hidden_act", "gelu"),
    }

    img_size: int = 224
    patch_size: int = 16
    channels_in: int = 3
    num_classes: int = 1000
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    mlp_size: int = 3072
    attn_bias: bool = True
    attn_scale: bool | None = None
    norm_bias: bool = True
    ffn_bias: bool = True
    representation_size: int | None = None
    drop: float = 0.0
    norm_eps: float = 1e-5
    ffn_activate_fn: str = "gelu"

    POSITIONS_END: ClassVar[str] = (
        " The 15th is dtype in ModelCenter to 0.1.3 and half from 0.1.5 on."
    )

    @classmethod
    def arguments(cls) -> tuple[str, ...]:
        """Those of ModelCenter's arguments that all its versions have in the same order."""
        sizes = "img_size patch_size channels_in num_classes hidden_size num_layers num_heads"
        flags = "attn_bias attn_scale norm_bias ffn_bias representation_size drop"
        return tuple(f"{sizes} mlp_size {flags}".split())

    def __post_init__(self) -> None:
        """As in Config; sizes are checked too."""
        super().__post_init__()
        for whole, part in (("hidden_size", "num_heads"), ("img_size", "patch_size")):
            if (
                getattr(self, part) < 1
                or getattr(self, whole) < 1
                or getattr(self, whole) % getattr(self, part)
            ):
                raise ConfigError(
                    f"{whole} is {getattr(self, whole)}: expected a multiple of "
                    f"{part}={getattr(self, part)}."
                )

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """As in Config; sides that differ, and projections without bias, are refused."""
        values = super().from_hugging_face(content)
        sizes = {name: values[name] for name in ("img_size", "patch_size")}
        has_bias = content.get("qkv_bias", True)
        if not all(isinstance(size, int) for size in sizes.values()) or not has_bias:
            raise ConfigError(
                f"{sizes}, qkv_bias {has_bias}: expected squares, and projections with a bias."
            )
        labels = content.get("id2label")
        return values | {"num_classes": len(labels) if labels else content.get("num_labels", 2)}

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model.

        Raises:
            ConfigError: for values that transformers' model cannot have.
        """
        self.refuse_unless(attn_bias=True, norm_bias=True, ffn_bias=True, representation_size=None)
        self.refuse_unless(ffn_activate_fn=self.ffn_activate_fn.removeprefix(GATED))
        labels = [f"LABEL_{number}" for number in range(self.num_classes)]
        return super().to_hugging_face() | {
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
            "attention_probs_dropout_prob": self.drop,
            "qkv_bias": self.attn_bias,
        }


class ViT(BaseModel):
    """The classifier of images ViT."""

    _CONFIG_TYPE = VitConfig

    def __init__(self, config: VitConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.patch_embed = PatchEmbedding(
            config.img_size, config.patch_size, config.channels_in, width, dtype=config.dtype
        )
        self.pos_drop = torch.nn.Dropout(config.drop)
        self.blocks = Encoder(
            config.num_layers,
            width,
            config.mlp_size,
            config.num_heads,
            width // config.num_heads,
            dtype=config.dtype,
            norm_bias=config.norm_bias,
            norm_eps=config.norm_eps,
            att_bias=config.attn_bias,
            ffn_bias=config.ffn_bias,
            ffn_activate_fn=config.ffn_activate_fn,
            attn_scale=True,
            dropout_p=config.drop,
            sharding=policy_of(config),
        )
        self.representation_layer: Linear | None = None
        if config.representation_size:
            self.representation_layer = Linear(
                width, config.representation_size, dtype=config.dtype, init_std=0.02
            )
            width = config.representation_size
        self.head = Linear(width, config.num_classes, dtype=config.dtype, init_std=0.02, bias=True)

    def forward(
        self,
        input_seq: torch.Tensor,
        register_blk: int = -1,
        attention_mask: torch.Tensor | None = None,
        *,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
    ) -> Any:
        """Classify images.

        Args:
            input_seq: images (batch, channels_in, img_size, img_size) of any floating-point dtype.
            register_blk: only -1.
            attention_mask: (batch, patches + 1) or (batch, patches + 1, patches + 1), nonzero where
                a patch is seen; the class token comes first.
            output_attentions, output_hidden_states: what else to return, with `return_dict`.
            return_dict: return a BaseModelOutput, whose last hidden state is (batch, patches + 1,
                hidden_size).

        Returns scores (batch, num_classes).

        Raises:
            InputError: for images of another shape, a mask of another length, or further outputs
                without `return_dict`.
        """
        needs_dict(return_dict, output_attentions or output_hidden_states)
        if register_blk != -1:
            raise InputError(
                f"register_blk is {register_blk}: only -1 is supported; ask for "
                "output_attentions instead."
            )
        hidden = self.pos_drop(self.patch_embed(input_seq))
        if attention_mask is not None and attention_mask.shape[-1] != hidden.shape[1]:
            raise InputError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: expected "
                f"{hidden.shape[1]} patches and class."
            )
        out = self.blocks(
            hidden,
            mask_from(attention_mask),
            None,
            False,
            None,
            output_attentions,
            output_hidden_states,
            return_dict=True,
        )
        logits = self.logits(out.last_hidden_state[:, 0])
        if not return_dict:
            return logits
        return BaseModelOutput(
            last_hidden_state=out.last_hidden_state,
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Class tokens (batch, hidden_size) to scores (batch, num_classes)."""
        if self.representation_layer is not None:
            hidden = torch.tanh(self.representation_layer(hidden))
        return self.head(hidden)

    @classmethod
    def key_map(cls, config: VitConfig) -> KeyMap:
        """Where each tensor is in a checkpoint of ViTForImageClassification."""
        pieces = {
            "patch_embed.cls_token": TensorPart("vit.embeddings.cls_token"),
            "patch_embed.pos_embed": TensorPart("vit.embeddings.position_embeddings"),
            **both("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
            **both("blocks.output_layernorm", "vit.layernorm"),
            **both("head", "classifier"),
        }
        query, key, value = PROJECTIONS
        parts = {
            query: "attention.attention.query",
            key: "attention.attention.key",
            value: "attention.attention.value",
            ATTENTION_NORM: "layernorm_before",
            ATTENTION_OUT: "attention.output.dense",
            FFN_NORM: "layernorm_after",
            FFN_IN: "intermediate.dense",
            FFN_OUT: "output.dense",
        }
        for layer in range(config.num_layers):
            pieces |= renamed(parts, f"blocks.layers.{layer}.", f"vit.encoder.layer.{layer}.")
        return KeyMap(
            pieces,
            prefix="vit.",
            ignored=(r"^(vit\.)?pooler\.",),
            new=(r"head\.", r"representation_layer\."),
        )
