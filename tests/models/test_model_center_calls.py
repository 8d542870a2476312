"""Calls that programs of ModelCenter make, and what they mean there."""

from __future__ import annotations

import inspect
import pathlib
from typing import Any

import pytest
import torch
from tests.models import parity

import model_center.model.config as configs
from model_center.errors import InputError, WeightsError
from model_center.layer.dense_attention import Attention
from model_center.layer.linear import Linear
from model_center.model.base import BaseModel
from model_center.model.bert import Bert, BertConfig
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.cpm3 import CPM3, CPM3Config
from model_center.model.glm import GLM, GLMConfig
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.longformer import Longformer, LongformerConfig
from model_center.model.opt import OPT, OPTConfig
from model_center.model.t5 import T5, T5Config

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "dim_model": 16,
    "num_heads": 2,
    "dim_head": 8,
    "dim_ff": 20,
    "half": False,
    "dropout_p": 0.0,
}
LAYERS = SIZES | {"num_layers": 2}
IDS = parity.token_ids(2, 8)
IDS[:, :2] = torch.tensor([2, 3])  # the prompt of CPM-3
CPM3_SIZES = LAYERS | {"prompt_types": 2, "prompt_length": 2, "segment_types": 3}
MODELS: dict[type[BaseModel], Any] = {
    Bert: BertConfig(**LAYERS),
    GPT2: GPT2Config(**LAYERS),
    GPTj: GPTjConfig(**LAYERS, pos_rotary_dim=4),
    OPT: OPTConfig(**LAYERS),
    CPM1: CPM1Config(**LAYERS),
    CPM3: CPM3Config(**CPM3_SIZES),
    T5: T5Config(**SIZES, num_encoder_layers=1, num_decoder_layers=2),
    Llama: LlamaConfig(**LAYERS),
    Longformer: LongformerConfig(**LAYERS, attention_window=4),
}
MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]])
LENGTH = torch.tensor([8, 3])
each_model = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)


def scores(model: Any, **inputs: Any) -> torch.Tensor:
    """Of all tokens."""
    if isinstance(model, T5):
        inputs.setdefault("decoder_input_ids", IDS)
    return parity.logits_of(parity.scored(model, inputs))


@each_model
def test_of_length_and_mask_one_counts(kind: type[BaseModel]) -> None:
    """The mask; in LLaMA the length."""
    model = parity.randomized(kind(MODELS[kind]))
    both = scores(model, input_ids=IDS, length=LENGTH, attention_mask=MASK)
    by_mask = scores(model, input_ids=IDS, attention_mask=MASK)
    by_length = scores(model, input_ids=IDS, length=LENGTH)
    assert torch.equal(both, by_length if kind is Llama else by_mask)
    if kind is T5:
        given = {"decoder_length": LENGTH, "decoder_attention_mask": MASK}
        both = scores(model, input_ids=IDS, **given)
        by_mask = scores(model, input_ids=IDS, decoder_attention_mask=MASK)
        assert torch.equal(both, by_mask)


@each_model
def test_of_ids_and_embeddings_the_embeddings_count(kind: type[BaseModel]) -> None:
    model = parity.randomized(kind(MODELS[kind]))
    embeds = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(3))
    both = scores(model, input_ids=IDS, inputs_embeds=embeds)
    assert torch.equal(both, scores(model, inputs_embeds=embeds))
    assert not torch.equal(both, scores(model, input_ids=IDS))
    with pytest.raises(InputError, match=r"\(2, 7, 16\): expected \(2, 8, dim_model\)"):
        scores(model, input_ids=IDS, inputs_embeds=embeds[:, :7])
    with pytest.raises(InputError, match="got neither"):
        scores(model)


@each_model
def test_head_masks_are_not_looked_at(kind: type[BaseModel]) -> None:
    model = parity.randomized(kind(MODELS[kind]))
    names = [name for name in inspect.signature(model.forward).parameters if "head_mask" in name]
    assert len(names) == {T5: 3, Llama: 0, Longformer: 0}.get(kind, 1)
    masked = {name: torch.zeros(2, 2) for name in names}
    assert torch.equal(scores(model, input_ids=IDS, **masked), scores(model, input_ids=IDS))


def test_cpm1_does_not_look_at_token_types() -> None:
    model = parity.randomized(CPM1(MODELS[CPM1]))
    types = torch.tensor([[1, 2]])
    assert torch.equal(
        scores(model, input_ids=IDS, token_type_ids=types), scores(model, input_ids=IDS)
    )


@pytest.mark.parametrize("kind", [CPM1, CPM3], ids=["CPM1", "CPM3"])
def test_masks_of_pairs_with_context_and_span(kind: type[BaseModel]) -> None:
    """Such a mask stands for the context; spans hide what is in others."""
    model = parity.randomized(kind(MODELS[kind]))
    generator = torch.Generator().manual_seed(4)
    pairs = torch.rand(2, 8, 8, generator=generator) < 0.6
    context, span = IDS % 2 == 0, torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    same = span[:, None, :] == span[:, :, None]
    plain = scores(model, input_ids=IDS, attention_mask=pairs)
    assert torch.equal(scores(model, input_ids=IDS, attention_mask=pairs, context=context), plain)
    found = scores(model, input_ids=IDS, attention_mask=pairs, context=context, span=span)
    parity.assert_close(found, scores(model, input_ids=IDS, attention_mask=pairs & same))
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("bias", ["none", "relative"])
@pytest.mark.parametrize("visibly", [False, True])
def test_a_query_that_sees_nothing_gets_zeros(bias: str, visibly: bool) -> None:
    """Before the last map; with gradients that are numbers, and only for that query."""
    layer = Attention(16, 8, 2, dtype=torch.float, bias=True, init_std=0.5, pos_bias_type=bias)
    torch.nn.init.normal_(layer.attention_out.bias)
    x = torch.randn(2, 5, 16, requires_grad=True)
    seen = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    some = layer(x, x, seen, torch.ones(2, 5, 5))
    seen[1, 3] = False
    out = layer(x, x, seen, torch.ones(2, 5, 5), False, None, visibly)
    if visibly:
        out, shown = out
        assert not shown[1, :, 3].any() and shown[1, :, 2].any()
    parity.assert_close(out[1, 3], layer.attention_out.bias)
    others = torch.ones(2, 5, dtype=torch.bool)
    others[1, 3] = False
    parity.assert_close(out[others], some[others])
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert grad.isfinite().all() and not grad[0].eq(0).all()


@pytest.mark.parametrize("kind", [GPT2, CPM1], ids=["GPT2", "CPM1"])
def test_a_model_whose_query_sees_nothing(kind: type[BaseModel]) -> None:
    """What the token gets is what it is alone, without attention: other tokens do not change it."""
    model = parity.randomized(kind(MODELS[kind]))
    seen = torch.ones(2, 8, 8).tril()
    seen[:, 5] = 0
    other = IDS.clone()
    other[:, [3, 6]] += 1
    one, two = (scores(model, input_ids=ids, attention_mask=seen) for ids in (IDS, other))
    assert torch.equal(one[:, 5], two[:, 5])
    assert not torch.equal(one[:, 4], two[:, 4])


@pytest.mark.parametrize(
    "kind", [GPT2, GPTj, OPT, CPM1, CPM3, T5, GLM], ids=lambda kind: kind.__name__
)
def test_flags_without_effect(kind: type[BaseModel]) -> None:
    config = MODELS.get(kind) or GLMConfig(**LAYERS, sop_tok_id=58, eop_tok_id=59, mask_tok_id=60)
    values = config.to_dict() | {"post_layer_norm": True, "int8": True}
    if kind in {OPT, GLM}:
        values["tied"] = False
    model = parity.randomized(kind(config))
    other = kind(type(config)(**values)).eval()
    assert list(other.state_dict()) == list(model.state_dict())
    other.load_state_dict(model.state_dict())
    assert torch.equal(scores(other, input_ids=IDS), scores(model, input_ids=IDS))
    assert Linear(2, 3, int8=True).weight.shape == (3, 2)


def test_llama_with_norms_behind_each_part(tmp_path: pathlib.Path) -> None:
    """As in ModelCenter, whose Llama has them where it is told; Hugging Face's cannot."""
    model = parity.randomized(Llama(LlamaConfig(**LAYERS, post_layer_norm=True)))
    plain = Llama(MODELS[Llama]).eval()
    plain.load_state_dict(model.state_dict())
    assert (scores(model, input_ids=IDS) - scores(plain, input_ids=IDS)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="post_layer_norm is True"):
        model.save_pretrained(tmp_path)


POSITIONAL = {
    "GPT2Config": "vocab_size dim_model num_heads dim_head dim_ff num_layers dropout_p emb_init_mean "
    "emb_init_std pos_bias_type position_size norm_init_var norm_bias norm_eps",
    "RobertaConfig": "vocab_size type_size dim_model num_heads dim_head dim_ff num_layers",
    "LongformerConfig": "vocab_size type_size position_size dim_model num_heads dim_head dim_ff",
    "GPTjConfig": "vocab_size dim_model num_heads dim_head dim_ff num_layers dropout_p emb_init_mean "
    "emb_init_std pos_bias_type pos_rotary_dim norm_init_var",
    "T5Config": "vocab_size dim_model num_heads dim_head dim_ff num_encoder_layers num_decoder_layers "
    "dropout_p emb_init_mean emb_init_std pos_bias_type position_bias_num_buckets "
    "position_bias_max_distance pos_init_mean pos_init_std norm_init_var",
    "OPTConfig": "vocab_size dim_model num_heads dim_head dim_ff num_layers dropout_p emb_init_mean "
    "emb_init_std pos_bias_type pad_token_id prefix position_size",
    "VitConfig": "img_size patch_size channels_in num_classes hidden_size num_layers num_heads "
    "mlp_size attn_bias attn_scale norm_bias ffn_bias representation_size drop half dtype",
}
LAST = {
    "GPT2Config": "length_scale attn_scale half int8 tied cls_head post_layer_norm",
    "RobertaConfig": "half int8 tied cls_head post_layer_norm pad_token_id",
    "LongformerConfig": "post_layer_norm sep_tok_id attention_window pad_token_id",
    "GPTjConfig": "proj_init_mean proj_init_std proj_bias length_scale attn_scale half int8 tied "
    "cls_head post_layer_norm",
    "T5Config": "tied cls_head post_layer_norm scale",
    "OPTConfig": "ffn_activate_fn length_scale attn_scale half int8 tied cls_head post_layer_norm",
    "VitConfig": "half dtype",
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_configurations_by_position(name: str) -> None:
    kind: Any = vars(configs)[name]
    first, last = POSITIONAL[name].split(), LAST[name].split()
    order = list(kind.arguments())
    assert (order[: len(first)], order[-len(last) :]) == (first, last)
    plain = kind()
    values = [getattr(plain, argument) for argument in first]
    values[0], values[3] = values[0] + 32, values[3] * 2
    found = kind(*values)
    assert (getattr(found, first[0]), getattr(found, first[3])) == (values[0], values[3])
    assert found == kind(**dict(zip(first, values, strict=True)))
    assert list(inspect.signature(kind).parameters)[: len(order)] == order
    with pytest.raises(TypeError, match=f"{name} got {first[0]} by position and by name"):
        kind(values[0], **{first[0]: 3})
    with pytest.raises(TypeError, match=f"takes {len(order)} arguments by position: got"):
        kind(*range(len(order) + 1))


def test_a_configuration_as_programs_write_it() -> None:
    made: Any = GPT2Config
    config = made(97, 24, 3, num_layers=2)
    assert (config.vocab_size, config.dim_model, config.num_heads, config.num_layers) == (
        97,
        24,
        3,
        2,
    )


def test_loading_what_is_not_all_there(tmp_path: pathlib.Path) -> None:
    """What a file lacks is an error, or, if not strict, initialised and named."""
    model = parity.randomized(GPT2(MODELS[GPT2]))
    model.save_pretrained(tmp_path, format="model_center")
    weights = dict(model.state_dict())
    lost = "encoder.layers.1.ffn.layernorm_before_ffn.weight"
    del weights[lost]
    torch.save(weights, tmp_path / "pytorch_model.pt")
    with pytest.raises(WeightsError, match=lost):
        GPT2.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"{lost}: newly initialised"):
        found = GPT2.from_pretrained(tmp_path, strict=False)
    assert found.get_parameter(lost).eq(1).all()
    for name, value in weights.items():
        assert torch.equal(found.state_dict()[name], value), name
    torch.save({**weights, lost: torch.ones(3)}, tmp_path / "pytorch_model.pt")
    with pytest.raises(WeightsError, match=lost):
        GPT2.from_pretrained(tmp_path, strict=False)
