"""The surface that programs written for ModelCenter use: keys and defaults of configurations, order
of forward arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest

from model_center.config.base import TransformerConfig
from model_center.model import config as configs
from model_center.model.base import BaseModel
from model_center.model.bert import Bert
from model_center.model.cpm1 import CPM1
from model_center.model.cpm2 import CPM2
from model_center.model.cpm3 import CPM3
from model_center.model.glm import GLM
from model_center.model.gpt2 import GPT2
from model_center.model.gptj import GPTj
from model_center.model.llama import Llama
from model_center.model.longformer import Longformer
from model_center.model.opt import OPT
from model_center.model.roberta import Roberta
from model_center.model.t5 import T5

# A column for each model; "." where it does not have the key.
DEFAULTS = """
key                        Bert   Roberta GPT2  GPTj   Llama  OPT      GLM   Longformer T5       CPM1     CPM2     CPM3
vocab_size                 119547 50265   50258 50400  32000  50272    50048 119547     32128    30968    26240    30720
type_size                  2      1       .     .      .      .        .     2          .        .        .        .
dim_model                  768    1024    1024  4096   4096   768      1024  768        768      768      768      4096
num_heads                  12     16      16    16     32     12       16    12         12       12       12       64
dim_head                   64     64      64    256    128    64       64    64         64       64       64       64
dim_ff                     3072   4096    4096  16384  11008  3072     4096  3072       3072     1920     1920     10240
num_layers                 12     24      24    28     32     12       24    12         .        12       .        32
dropout_p                  0.0    0.0     0.0   0      0      0.1      0.1   0.1        0.0      0.0      0.0      0.0
emb_init_mean              0.0    0.0     0.0   0.0    0.0    0.0      0     0.0        0.0      0.0      0.0      0.0
emb_init_std               0.02   0.02    0.02  1      0.02   0.02     0.02  1          0.02     0.02     0.02     1.0
pos_bias_type              none   none    none  rotary rotary none     none  none       relative relative relative relative
position_size              512    514     1024  .      .      2048     1025  512        .        .        .        .
norm_init_var              1.0    1.0     1.0   1.0    1.0    1.0      1.0   1.0        1.0      1.0      1.0      1.0
norm_bias                  yes    yes     yes   yes    no     yes      yes   yes        no       no       no       no
norm_eps                   1e-12  1e-05   1e-05 1e-05  1e-06  1e-05    1e-05 1e-12      1e-06    1e-06    1e-06    1e-06
att_init_mean              0.0    0.0     0.0   0.0    0.0    0.0      0.0   0.0        0.0      0.0      0.0      0.0
att_init_std               0.02   0.02    0.02  0.1    0.02   0.02     0.02  0.02       0.02     0.02     0.02     1.0
att_bias                   yes    yes     yes   no     no     yes      yes   yes        no       no       no       no
att_mask_value             -1e4   -1e4    -1e4  -inf   -inf   -65504.0 -inf  -1e4       -inf     -inf     -inf     -inf
ffn_init_mean              0.0    0.0     0.0   0.0    0.0    0.0      0.0   0.0        0.0      0.0      0.0      0.0
ffn_init_std               0.02   0.02    0.02  0.1    0.02   0.02     0.02  0.02       0.02     0.02     0.02     1.0
ffn_bias                   yes    yes     yes   yes    no     yes      yes   yes        no       no       no       no
ffn_activate_fn            gelu   gelu    gelu  gelu   g_silu relu     gelu  gelu       relu     g_gelu   g_gelu   g_gelu
proj_init_mean             0.0    0.0     0.0   0.0    0.0    .        0.0   0.0        0.0      0.0      0.0      0.0
proj_init_std              0.02   0.02    0.02  1      0.02   .        0.02  1          0.02     0.02     0.02     1.0
proj_bias                  yes    yes     yes   yes    no     .        no    yes        no       no       no       no
length_scale               no     no      no    no     no     no       no    no         no       no       no       yes
attn_scale                 yes    yes     yes   yes    yes    yes      yes   yes        no       no       no       yes
half                       yes    yes     yes   yes    yes    yes      yes   yes        yes      yes      yes      yes
int8                       no     no      no    no     no     no       no    no         no       no       no       no
tied                       yes    yes     yes   no     no     yes      yes   yes        yes      no       no       yes
cls_head                   None   None    None  None   None   None     None  None       None     None     None     None
post_layer_norm            yes    yes     no    no     no     no       no    yes        no       no       no       no
pad_token_id               .      1       .     .      .      1        .     1          .        .        .        .
pos_rotary_dim             .      .       .     64     .      .        .     .          .        .        .        .
num_heads_kv               .      .       .     .      -1     .        .     .          .        .        .        .
prefix                     .      .       .     .      .      </s>     .     .          .        .        .        .
sop_tok_id                 .      .       .     .      .      .        50006 .          .        .        .        .
eop_tok_id                 .      .       .     .      .      .        50007 .          .        .        .        .
mask_tok_id                .      .       .     .      .      .        50008 .          .        .        .        .
position_bias_max_distance .      .       .     .      .      .        .     1024       128      128      128      2048
sep_tok_id                 .      .       .     .      .      .        .     2          .        .        .        .
attention_window           .      .       .     .      .      .        .     512        .        .        .        .
num_encoder_layers         .      .       .     .      .      .        .     .          12       .        12       .
num_decoder_layers         .      .       .     .      .      .        .     .          12       .        12       .
position_bias_num_buckets  .      .       .     .      .      .        .     .          32       32       32       512
pos_init_mean              .      .       .     .      .      .        .     .          0.0      0.0      0.0      0.0
pos_init_std               .      .       .     .      .      .        .     .          1        1        1        1.0
scale                      .      .       .     .      .      .        .     .          None     .        .        .
prompt_types               .      .       .     .      .      .        .     .          .        .        .        32
prompt_length              .      .       .     .      .      .        .     .          .        .        .        64
segment_types              .      .       .     .      .      .        .     .          .        .        .        34
max_exact_rate             .      .       .     .      .      .        .     .          .        .        .        0.25
max_distance_rate          .      .       .     .      .      .        .     .          .        .        .        1.0
absolute_inner_segment     .      .       .     .      .      .        .     .          .        .        .        yes
"""

GPT = (
    "input_ids length attention_mask token_type_ids position_ids head_mask "
    "inputs_embeds use_cache past_key_values output_logits "
    "output_attentions output_hidden_states return_dict"
)
CPM = GPT.replace("head_mask", "context span head_mask")
BERT = GPT.replace("output_logits", "output_logits output_pooler_output")
SEQ2SEQ = (
    "input_ids length decoder_input_ids decoder_length attention_mask "
    "decoder_attention_mask head_mask decoder_head_mask "
    "cross_attn_head_mask encoder_outputs inputs_embeds decoder_inputs_embeds "
    "use_cache past_key_values output_attentions "
    "output_hidden_states output_decoder_attentions output_decoder_hidden_states "
    "output_logits return_dict"
)
LLAMA = (
    "input_ids length attention_mask inputs_embeds use_cache past_key_values "
    "output_logits output_attentions output_hidden_states "
    "return_dict"
)
FORWARD: dict[type[BaseModel], str] = {
    GPT2: GPT,
    GPTj: GPT,
    OPT: GPT,
    Llama: LLAMA,
    T5: SEQ2SEQ,
    CPM1: CPM,
    CPM2: SEQ2SEQ,
    CPM3: CPM,
    Bert: BERT,
    Roberta: BERT,
    GLM: "input_ids position_ids block_position_ids sep",
    Longformer: (
        "input_ids length attention_mask global_attention_mask token_type_ids "
        "position_ids inputs_embeds return_dict return_logits"
    ),
}
NAMES = DEFAULTS.split()[1 : 1 + 12]
WORDS = {
    "yes": True,
    "no": False,
    "g_gelu": "gated_gelu",
    "g_silu": "gated_silu",
    "-inf": -float("inf"),
}


def value_of(text: str) -> object:
    """What a cell of the table says."""
    if text in {"gelu", "relu", "none", "relative", "rotary", "</s>"}:
        return text
    return WORDS[text] if text in WORDS else ast.literal_eval(text)


@pytest.mark.parametrize("name", NAMES)
def test_defaults(name: str) -> None:
    """Every key is there with the default that it has in ModelCenter, and `checked` takes it."""
    config_class: type[TransformerConfig] = vars(configs)[f"{name}Config"]
    column = 1 + NAMES.index(name)
    rows = [line.split() for line in DEFAULTS.strip().splitlines()[1:]]
    expected = {row[0]: value_of(row[column]) for row in rows if row[column] != "."}
    assert len(expected) > 25
    own = {field.name: field.default for field in dataclasses.fields(config_class)}
    assert {key: own.get(key, "missing") for key in expected} == expected


@pytest.mark.parametrize("model", FORWARD, ids=lambda model: model.__name__)
def test_order_of_forward_arguments(model: type[BaseModel]) -> None:
    """What may be passed by position, and nothing else."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [
        one.name
        for one in parameters
        if one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "self"
    ]
    assert positional == FORWARD[model].split()
