"""Parameters come in ModelCenter's order: its files of optimizer states go by position."""

from __future__ import annotations

from typing import Any

import pytest

from model_center.model.base import BaseModel
from model_center.model.bert import Bert, BertConfig
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.cpm2 import CPM2, CPM2Config
from model_center.model.cpm3 import CPM3, CPM3Config
from model_center.model.glm import GLM, GLMConfig
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.longformer import Longformer, LongformerConfig
from model_center.model.opt import OPT, OPTConfig
from model_center.model.roberta import Roberta, RobertaConfig
from model_center.model.t5 import T5, T5Config
from model_center.model.vit import ViT, VitConfig

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "dim_model": 16,
    "num_heads": 2,
    "dim_head": 8,
    "dim_ff": 20,
}
LAYERS = SIZES | {"num_layers": 2}
TWO_STACKS = SIZES | {"num_encoder_layers": 2, "num_decoder_layers": 2}
IMAGES = {
    "img_size": 6,
    "patch_size": 2,
    "num_classes": 5,
    "hidden_size": 16,
    "num_heads": 2,
    "mlp_size": 20,
    "num_layers": 2,
}
CONFIGS: dict[type[BaseModel], Any] = {
    Bert: (BertConfig, LAYERS),
    Roberta: (RobertaConfig, LAYERS),
    Longformer: (LongformerConfig, LAYERS | {"attention_window": 4}),
    GPT2: (GPT2Config, LAYERS),
    GPTj: (GPTjConfig, LAYERS | {"pos_rotary_dim": 4}),
    Llama: (LlamaConfig, LAYERS),
    OPT: (OPTConfig, LAYERS),
    GLM: (GLMConfig, LAYERS),
    CPM1: (CPM1Config, LAYERS),
    CPM2: (CPM2Config, TWO_STACKS),
    CPM3: (CPM3Config, LAYERS | {"prompt_types": 2, "prompt_length": 2, "segment_types": 3}),
    T5: (T5Config, TWO_STACKS),
    ViT: (VitConfig, IMAGES),
}
# A name stands for its weight, with + for weight and bias, with = for itself. What ModelCenter has
# and no model here, because nothing is ever computed with it, is in brackets.
ATTENTION = ("project_q", "project_k", "project_v", "attention_out")
GLOBALS = ("project_q_global", "project_k_global", "project_v_global")
MASKED = "input_embedding position_embedding token_type_embedding encoder {classes}"
HEAD = "lm_head.dense+ lm_head.layer_norm+ {decoder} pooler.dense+"
TIED = "[=lm_head.decoder.weight] =lm_head.decoder.bias"
BIAS = "=position_bias{}.relative_attention_bias"
BOTH = f"input_embedding {BIAS.format('_enc')} {BIAS.format('_dec')} encoder decoder"
CPM = f"input_embedding {BIAS.format('')} encoder"
GLM_ALL = "encoder input_embedding position_embedding block_position_embedding"
VIT = "=patch_embed.cls_token =patch_embed.pos_embed patch_embed.proj+ blocks {}head+"
BERT_LIKE = f"{MASKED} {HEAD}"

ORDERS: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    *(
        (kind, values, BERT_LIKE.format(classes=classes, decoder=decoder))
        for kind in (Bert, Roberta, Longformer)
        for values, classes, decoder in (
            ({}, "", TIED),
            ({"tied": False}, "", "lm_head.decoder+"),
            ({"cls_head": 3}, "cls_projection+", TIED),
        )
    ),
    (GPT2, {}, "input_embedding position_embedding encoder"),
    (GPT2, {"tied": False}, "input_embedding position_embedding encoder output_projection+"),
    (GPT2, {"cls_head": 3}, "input_embedding position_embedding encoder cls_projection+"),
    (GPTj, {}, "input_embedding encoder output_projection+"),
    (GPTj, {"tied": True}, "input_embedding encoder"),
    (
        GPTj,
        {"cls_head": 3},
        "input_embedding encoder cls_projection+ "
        "[=output_projection.weight] [=output_projection.bias]",
    ),
    (Llama, {}, "input_embedding encoder output_projection"),
    (Llama, {"tied": True, "num_heads_kv": 1}, "input_embedding encoder"),
    (Llama, {"cls_head": 3}, "input_embedding encoder cls_projection [output_projection]"),
    (OPT, {}, "input_embedding position_embedding decoder"),
    (GLM, {}, GLM_ALL),
    (GLM, {"cls_head": 3}, f"{GLM_ALL} output_projection"),
    (CPM1, {}, f"{CPM} output_projection"),
    (CPM1, {"tied": True}, CPM),
    (CPM1, {"cls_head": 3}, f"{CPM} cls_projection [output_projection]"),
    (CPM2, {}, f"{BOTH} output_projection"),
    (CPM2, {"tied": True}, BOTH),
    (CPM2, {"cls_head": 3}, f"{BOTH} cls_projection [output_projection]"),
    (CPM3, {}, f"prompt_embedding {CPM}"),
    (CPM3, {"tied": False}, f"prompt_embedding {CPM} output_projection"),
    (CPM3, {"cls_head": 3}, f"prompt_embedding {CPM} cls_projection"),
    (T5, {}, BOTH),
    (T5, {"cls_head": 3}, f"{BOTH} cls_projection"),
    # T5 1.1, mT5 and Flan-T5
    (T5, {"tied": False, "ffn_activate_fn": "gated_gelu_new"}, f"{BOTH} output_projection"),
    (ViT, {}, VIT.format("")),
    (ViT, {"representation_size": 7}, VIT.format("representation_layer ")),
]
STACKS = ("encoder", "decoder", "blocks")
WITHOUT_BIASES = (Llama, CPM1, CPM2, CPM3, T5)


def attention(kind: type[BaseModel], block: str, end: str) -> list[str]:
    """An attention with its norm; GPT-J has biases in the norm only."""
    maps = ATTENTION + (GLOBALS if kind is Longformer else ())
    of_maps = "" if kind is GPTj else end
    names = [f"{block}.self_attention.{name}{of_maps}" for name in maps]
    return [f"{block}.layernorm_before_attention{end}", *names]


def stack(kind: type[BaseModel], name: str, gated: bool) -> list[str]:
    """A stack of two layers."""
    end = "" if kind in WITHOUT_BIASES else "+"
    crossed = name == "decoder" and kind in {T5, CPM2}
    layer = [
        *attention(kind, "self_att", end),
        *(attention(kind, "cross_att", end) if crossed else ()),
        f"ffn.layernorm_before_ffn{end}",
        *(f"ffn.ffn.w_in.{part}{end}" for part in (("w_0", "w_1") if gated else ("w",))),
        f"ffn.ffn.w_out{end}",
    ]
    layers = [f"{name}.layers.{place}.{part}" for place in range(2) for part in layer]
    return [*layers, f"{name}.output_layernorm{end}"]


def spelled(token: str) -> list[str]:
    """The parameters of one module."""
    if token.startswith("="):
        return [token[1:]]
    name = token.removesuffix("+")
    return [f"{name}.weight", f"{name}.bias"] if token.endswith("+") else [f"{name}.weight"]


@pytest.mark.parametrize(
    ("kind", "values", "order"), ORDERS, ids=lambda x: x.__name__ if isinstance(x, type) else ""
)
def test_parameters_are_in_the_order_of_the_original(
    kind: type[BaseModel], values: dict[str, Any], order: str
) -> None:
    """As its constructors make them."""
    make_config, sizes = CONFIGS[kind]
    config = make_config(**sizes | values)
    gated = kind is not ViT and config.ffn_activate_fn.startswith("gated_")
    expected: list[str] = []
    for token in order.split():
        whole = stack(kind, token, gated) if token in STACKS else [token]
        expected += [name for part in whole if part[0] != "[" for name in spelled(part)]
    model = kind(config)
    assert [name for name, _ in model.named_parameters()] == expected
