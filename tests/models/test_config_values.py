"""Values and arguments that cannot work, or that Hugging Face does not have: refused, and never
written as something else.
"""

import argparse
import json
from typing import Any

import pytest
import torch
import transformers
from tests.models import parity, small
from tests.models.test_weights_convert import run as convert
from tests.models.versions import since_5
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.errors import ConfigError, InputError, WeightsError
from model_center.layer.cache import LayerCache
from model_center.model.llama import Llama, LlamaConfig

IDS = parity.token_ids(2, 8)


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("dim_head", [0, "2", 2.5], "expected a whole number above 0"),
        ("num_layers", [-1, 0, "2", 2.5, True], "expected a whole number above 0"),
        ("cls_head", [-2, "3", 2.0, True], "expected the number of classes"),
        ("pos_bias_type", ["none"], "this model has 'rotary'"),
        ("dtype", [torch.int64, 16], "expected one of float32"),
    ],
)
def test_values_that_no_model_can_have(name, values, complaint):
    for value in values:
        with pytest.raises(ConfigError, match=rf"{name} is {value!r}: {complaint}"):
            small.config("Llama", **{name: value})
        if name == "num_layers":
            with pytest.raises(ConfigError, match=rf"num_decoder_layers is {value!r}: {complaint}"):
                small.config("T5", num_decoder_layers=value)
    for dim in (0, -2, 10):
        with pytest.raises(
            ConfigError, match=rf"pos_rotary_dim is {dim}: expected 1 to dim_head=8"
        ):
            small.config("GPTj", pos_rotary_dim=dim)


def test_a_cast_model_takes_the_images_that_it_took():
    model, images = small.model("ViT"), torch.randn(2, 3, 6, 6)
    expected = model(images)
    found = model.bfloat16()(images)
    assert found.dtype == torch.bfloat16
    parity.assert_close(found, expected, tolerance=0.02)


def test_half_names_a_dtype_in_place_of_the_file(tmp_path):
    small.config("Llama", dtype="bfloat16").to_json_file(tmp_path / "config.json")
    more: Any
    for more, expected in (
        ({}, torch.bfloat16),
        ({"half": True}, torch.float16),
        ({"half": False}, torch.float32),
        ({"half": True, "dtype": "float32"}, torch.float32),
    ):
        assert LlamaConfig.from_pretrained(tmp_path, **more).dtype == expected


@pytest.mark.parametrize(
    ("names", "values", "complaint"),
    [
        (
            "Bert GPT2 OPT",
            {"ffn_activate_fn": "gated_silu"},
            "ffn_activate_fn is 'gated_silu', there it is 'silu'",
        ),
        ("GPTj", {"ffn_activate_fn": "gated_relu"}, "'gated_relu', there it is 'relu'"),
        ("ViT", {"ffn_activate_fn": "gated_gelu"}, "'gated_gelu', there it is 'gelu'"),
        ("Llama", {"ffn_activate_fn": "silu"}, "'silu', there it is 'gated_silu'"),
        ("T5", {"ffn_activate_fn": "gated_gelu"}, "'gated_gelu', there it is 'gated_gelu_new'"),
        ("Llama", {"sliding_window": 3}, "sliding_window is 3, there it is None"),
        ("Bert GPT2 OPT", {"dim_model": 20}, "dim_model is 20, there it is 16"),
    ],
)
def test_what_their_model_cannot_be(names, values, complaint, tmp_path):
    """transformers would read such a folder as another model, or not at all."""
    for name in names.split():
        with pytest.raises(ConfigError, match=complaint):
            small.model(name, **values).save_pretrained(tmp_path / "out")
        assert not (tmp_path / "out").exists()


def converted(source, *arguments):
    """Where the other format is, after `python -m model_center convert`."""
    target = source.parent / "-".join(arguments[:2])
    convert(source, target, "--to", *arguments)
    return target


@since_5  # which loads in that dtype unless it is asked for another
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_and_special_ids_that_are_written(dtype, tmp_path):
    """transformers loads in the dtype of config.json: a model that was cast, or converted, must not
    be rounded by it. Ids of special tokens survive.
    """
    ids: dict[str, Any] = {"bos_token_id": 7, "eos_token_id": [9, 11], "pad_token_id": 5}
    small.model("Llama").save_pretrained(tmp_path / "start")
    config = transformers.LlamaConfig.from_pretrained(tmp_path / "start", **ids)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "start")
    model = Llama.from_pretrained(tmp_path / "start", dtype="float32").to(dtype)
    model.save_pretrained(tmp_path / "saved")
    ours = converted(tmp_path / "saved", "model_center")
    for folder in (tmp_path / "saved", converted(ours, "hf", "--model", "llama")):
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert theirs.dtype == dtype == next(model.parameters()).dtype
        assert torch.equal(theirs.lm_head.weight, model.output_projection.weight)
        assert {name: getattr(theirs.config, name) for name in ids} == ids


def test_ids_of_special_tokens_of_a_new_model_are_those_of_its_tokenizer():
    tokenizer = argparse.Namespace(bos_token_id=3, eos_token_id=4, pad_token_id=None)
    content = small.config("Llama").hugging_face_content(tokenizer)
    assert (content["bos_token_id"], content["eos_token_id"]) == (3, 4)
    assert "pad_token_id" not in content
    assert "special_ids" not in small.config("Llama").to_dict()


def test_what_is_no_whole_model_is_not_written(tmp_path):
    """Adapters that were not merged: transformers would draw the weights at random that it does not
    find. The widest dtype of all is written.
    """
    model = small.model("Llama", dtype="bfloat16")
    attention = model.encoder.layers[1].self_att.self_attention
    original, attention.project_q = attention.project_q, torch.nn.Sequential(attention.project_q)
    name = r"encoder\.layers\.1\.self_att\.self_attention\.project_q\.weight"
    with pytest.raises(
        WeightsError,
        match=rf"no '{name}' to be written as 'model\.layers\.1\.self_attn\.q_proj.*merge",
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    attention.project_q = original
    model.output_projection.float()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"


def refused_on_all(folder):
    """What every rank is told of a configuration that rank 1 alone cannot read, or asks for with a
    misspelt name.
    """
    own: dict[str, Any] = {"half_": True} if bmt.rank() == 1 else {}
    messages = []
    for call in (
        lambda: Llama.from_pretrained(f"{folder}/{bmt.rank()}"),
        lambda: Llama.from_pretrained(f"{folder}/0", **own),
        lambda: Llama.from_json_file(f"{folder}/{bmt.rank()}/config.json"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_a_configuration_that_one_rank_cannot_read_is_an_error_on_all(tmp_path):
    small.model("Llama").save_pretrained(tmp_path / "0")
    (tmp_path / "1").mkdir()
    for first, second, third in run_ranks(refused_on_all, 2, str(tmp_path)):
        assert "no config.json" in first and "no config.json" in third
        assert "'half_' (nearest: 'half')" in second


def test_arguments_that_would_be_taken_for_others():
    model = small.model("Llama")
    expected, number = model(IDS).logits, torch.ones(2).long()
    summands = torch.zeros(2, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -1e4)
    for given, message in (
        ({"attention_mask": summands}, "4 dims of floating point: expected bool"),
        ({"attention_mask": torch.ones(2, 4, 8)}, "is for 4 queries: expected 8"),
        ({"length": [8, 3]}, "length is of type list: expected a tensor"),
        (
            {"length": number[:, None]},
            r"length is of shape \(2, 1\): expected \(2,\), a real number",
        ),
        ({"length": torch.ones(3).long()}, r"length is of shape \(3,\): expected"),
        ({"length": number[:1]}, r"length is of shape \(1,\): expected"),
        ({"length": number.to(torch.complex64)}, "a real number for each row"),
    ):
        with pytest.raises(InputError, match=message):
            model(IDS, **given)
    parity.assert_close(model(IDS, attention_mask=summands == 0).logits, expected)
    with pytest.raises(InputError, match="pad_token_id is None"):
        small.model("Roberta", pad_token_id=None)(IDS)


def test_a_cache_of_one_row_can_be_that_of_several():
    model, first = small.model("Llama"), IDS[:1, :5].expand(2, -1)
    with torch.no_grad():
        past = model(first[:1], use_cache=True).past_key_values
        with pytest.raises(InputError, match=r"the cache holds 1 rows: .* got 2"):
            model(IDS, use_cache=True, past_key_values=past)
        assert past[0][0].shape[2] == 5
        past = [(keys.expand(2, -1, -1, -1), values.repeat(2, 1, 1, 1)) for keys, values in past]
        found = model(IDS[:, 5:], use_cache=True, past_key_values=past).logits
        whole = model(torch.cat([first, IDS[:, 5:]], 1)).logits
    parity.assert_close(found, whole[:, 5:])
    cache, new = LayerCache.of(*torch.ones(2, 2, 1, 3, 4)), torch.ones(1, 1, 1, 4)
    with pytest.raises(InputError, match="holds 2 rows"):
        cache.append(new, new)
    assert cache.length == 3
