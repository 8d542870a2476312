"""Parameters come in ModelCenter's order: its files of optimizer states go by position."""

import pytest
from tests.models import parity

from model_center import model as models

SIZES = "vocab_size=61 dim_model=16 num_heads=2 dim_head=8 dim_ff=20"
LAYERS, STACKS = f"{SIZES} num_layers=2", f"{SIZES} num_encoder_layers=2 num_decoder_layers=2"
SPECIAL = {
    "Longformer": f"{LAYERS} attention_window=4",
    "GPTj": f"{LAYERS} pos_rotary_dim=4",
    "CPM2": STACKS,
    "CPM3": f"{LAYERS} prompt_types=2 prompt_length=2 segment_types=3",
    "T5": STACKS,
    "ViT": "img_size=6 patch_size=2 num_classes=5 hidden_size=16 num_heads=2 mlp_size=20 "
    "num_layers=2",
}
# A name stands for its weight, with + for weight and bias, with = for itself. What ModelCenter has
# and no model here, because nothing is ever computed with it, is in brackets.
MASKED = "input_embedding position_embedding token_type_embedding encoder"
HEAD = "lm_head.dense+ lm_head.layer_norm+"
TIED = "[=lm_head.decoder.weight] =lm_head.decoder.bias pooler.dense+"
BIAS = "=position_bias{}.relative_attention_bias"
BOTH = f"input_embedding {BIAS.format('_enc')} {BIAS.format('_dec')} encoder decoder"
CPM = f"input_embedding {BIAS.format('')} encoder"
POSITIONS = "input_embedding position_embedding encoder"
GLM_ALL = "encoder input_embedding position_embedding block_position_embedding"
VIT = "=patch_embed.cls_token =patch_embed.pos_embed patch_embed.proj+ blocks"
MASKED_ORDERS = "".join(
    f"""{name}: {MASKED} {HEAD} {TIED}
{name} tied=False: {MASKED} {HEAD} lm_head.decoder+ pooler.dense+
{name} cls_head=3: {MASKED} cls_projection+ {HEAD} {TIED}
"""
    for name in ("Bert", "Roberta", "Longformer")
)
ORDERS = f"""{MASKED_ORDERS}GPT2: {POSITIONS}
GPT2 tied=False: {POSITIONS} output_projection+
GPT2 cls_head=3: {POSITIONS} cls_projection+
GPTj: input_embedding encoder output_projection+
GPTj tied=True: input_embedding encoder
GPTj cls_head=3: input_embedding encoder cls_projection+ [=output_projection.weight]
Llama: input_embedding encoder output_projection
Llama tied=True num_heads_kv=1: input_embedding encoder
Llama cls_head=3: input_embedding encoder cls_projection [output_projection]
OPT: input_embedding position_embedding decoder
OPT tied=False: input_embedding position_embedding decoder
GLM: {GLM_ALL}
GLM cls_head=3: {GLM_ALL} output_projection
CPM1: {CPM} output_projection
CPM1 tied=True: {CPM}
CPM1 cls_head=3: {CPM} cls_projection [output_projection]
CPM2: {BOTH} output_projection
CPM2 tied=True: {BOTH}
CPM2 cls_head=3: {BOTH} cls_projection [output_projection]
CPM3: prompt_embedding {CPM}
CPM3 tied=False: prompt_embedding {CPM} output_projection
CPM3 cls_head=3: prompt_embedding {CPM} cls_projection
T5: {BOTH}
T5 cls_head=3: {BOTH} cls_projection
T5 tied=False ffn_activate_fn=gated_gelu_new: {BOTH} output_projection
ViT: {VIT} head+
ViT representation_size=7: {VIT} representation_layer head+""".splitlines()


def attention(name, block, end):
    """An attention with its norm; GPT-J has biases in the norm only."""
    maps = ["project_q", "project_k", "project_v", "attention_out"]
    maps += [f"project_{x}_global" for x in "qkv"] if name == "Longformer" else []
    of_maps = "" if name == "GPTj" else end
    names = [f"{block}.self_attention.{x}{of_maps}" for x in maps]
    return [f"{block}.layernorm_before_attention{end}", *names]


def stack(name, part, gated):
    """A stack of two layers."""
    end = "" if name in {"Llama", "CPM1", "CPM2", "CPM3", "T5"} else "+"
    crossed = part == "decoder" and name in {"T5", "CPM2"}
    layer = [
        *attention(name, "self_att", end),
        *(attention(name, "cross_att", end) if crossed else ()),
        f"ffn.layernorm_before_ffn{end}",
        *(f"ffn.ffn.w_in.{x}{end}" for x in (("w_0", "w_1") if gated else ("w",))),
        f"ffn.ffn.w_out{end}",
    ]
    layers = [f"{part}.layers.{place}.{x}" for place in range(2) for x in layer]
    return [*layers, f"{part}.output_layernorm{end}"]


def spelled(token):
    """The parameters of one module."""
    if token.startswith("="):
        return [token[1:]]
    name = token.removesuffix("+")
    return [f"{name}.weight", *([f"{name}.bias"] if token.endswith("+") else [])]


@pytest.mark.parametrize("line", ORDERS)
def test_parameters_are_in_the_order_of_the_original(line):
    """As its constructors make them."""
    words, _, order = line.partition(": ")
    name, _, values = words.partition(" ")
    kind = vars(models)[name]
    config = kind._CONFIG_TYPE(**parity.values(f"{SPECIAL.get(name, LAYERS)} {values}"))
    gated = name != "ViT" and config.ffn_activate_fn.startswith("gated_")
    expected = []
    for token in order.split():
        in_stack = token in {"encoder", "decoder", "blocks"}
        whole = stack(name, token, gated) if in_stack else [token]
        expected += [x for part in whole if part[0] != "[" for x in spelled(part)]
    assert [x for x, _ in kind(config).named_parameters()] == expected
