"""Values and arguments that cannot work, or that Hugging Face does not have: refused, and never
written as something else.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from tests.models import parity
from tests.models.versions import since_5
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center import convert
from model_center.errors import ConfigError, InputError, WeightsError
from model_center.layer.cache import LayerCache
from model_center.model.base import BaseModel
from model_center.model.bert import Bert, BertConfig
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.mistral import Mistral, MistralConfig
from model_center.model.opt import OPT, OPTConfig
from model_center.model.roberta import Roberta, RobertaConfig
from model_center.model.t5 import T5, T5Config
from model_center.model.vit import ViT, VitConfig

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "dim_model": 18,
    "num_heads": 3,
    "dim_head": 6,
    "dim_ff": 20,
    "half": False,
}
LAYERS = SIZES | {"num_layers": 2}
SMALL_VIT: dict[str, Any] = {
    "img_size": 6,
    "patch_size": 2,
    "hidden_size": 18,
    "num_heads": 3,
    "mlp_size": 20,
    "num_layers": 1,
    "half": False,
}
IDS = parity.token_ids(2, 8)


def llama(**values: Any) -> Llama:
    return Llama(LlamaConfig(**LAYERS | values)).eval()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        *(
            ({"num_layers": value}, rf"num_layers is {value!r}: expected a whole number above 0")
            for value in (-1, 0, "2", 2.5, True)
        ),
        *(
            ({"cls_head": value}, rf"cls_head is {value!r}: expected the number of classes")
            for value in (-2, "3", 2.0, True)
        ),
        ({"pos_bias_type": "none"}, r"pos_bias_type is 'none': this model has 'rotary'"),
        ({"dtype": torch.int64}, r"dtype is torch\.int64: expected one of float32"),
        ({"dtype": 16}, r"dtype is 16: expected one of float32"),
    ],
)
def test_values_that_no_model_can_have(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LlamaConfig(**LAYERS | values)
    if "num_layers" in values:
        with pytest.raises(ConfigError, match=complaint.replace("num_", "num_decoder_")):
            T5Config(**SIZES, num_decoder_layers=values["num_layers"])


@pytest.mark.parametrize("dim", [0, -2, 8])
def test_rotary_positions_of_channels_that_there_are_not(dim: int) -> None:
    with pytest.raises(ConfigError, match=rf"pos_rotary_dim is {dim}: expected 1 to dim_head=6"):
        GPTjConfig(**LAYERS, pos_rotary_dim=dim)


def test_a_cast_model_takes_the_images_that_it_took() -> None:
    model = ViT(VitConfig(**SMALL_VIT)).eval()
    images = torch.randn(2, 3, 6, 6)
    expected = model(images)
    found = model.bfloat16()(images)
    assert found.dtype == torch.bfloat16
    parity.assert_close(found, expected, tolerance=0.02)


def test_half_names_a_dtype_in_place_of_the_file(tmp_path: pathlib.Path) -> None:
    LlamaConfig(**LAYERS, dtype="bfloat16").to_json_file(tmp_path / "config.json")
    read = LlamaConfig.from_pretrained
    assert read(tmp_path).dtype == torch.bfloat16
    assert (
        read(tmp_path, half=True).dtype == torch.float16
        and read(tmp_path, half=False).dtype == torch.float32
    )
    assert read(tmp_path, half=True, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "config", "complaint"),
    [
        *(
            (
                kind,
                config(**LAYERS, ffn_activate_fn="gated_silu"),
                "ffn_activate_fn is 'gated_silu', there it is 'silu'",
            )
            for kind, config in ((Bert, BertConfig), (GPT2, GPT2Config), (OPT, OPTConfig))
        ),
        (
            GPTj,
            GPTjConfig(**LAYERS, pos_rotary_dim=4, ffn_activate_fn="gated_relu"),
            "'gated_relu', there it is 'relu'",
        ),
        (
            ViT,
            VitConfig(**SMALL_VIT, ffn_activate_fn="gated_gelu"),
            "'gated_gelu', there it is 'gelu'",
        ),
        (Llama, LlamaConfig(**LAYERS, ffn_activate_fn="silu"), "'silu', there it is 'gated_silu'"),
        (
            T5,
            T5Config(**SIZES, ffn_activate_fn="gated_gelu"),
            "'gated_gelu', there it is 'gated_gelu_new'",
        ),
        (Llama, LlamaConfig(**LAYERS, sliding_window=3), "sliding_window is 3, there it is None"),
        *(
            (kind, config(**LAYERS | {"dim_model": 20}), "dim_model is 20, there it is 18")
            for kind, config in ((Bert, BertConfig), (GPT2, GPT2Config), (OPT, OPTConfig))
        ),
    ],
)
def test_what_their_model_cannot_be(
    kind: type[BaseModel], config: Any, complaint: str, tmp_path: pathlib.Path
) -> None:
    """transformers would read such a folder as another model, or not at all."""
    with pytest.raises(ConfigError, match=complaint), torch.device("meta"):
        kind(config).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_window_of_mistral_is_written(tmp_path: pathlib.Path) -> None:
    ours = parity.randomized(Mistral(MistralConfig(**LAYERS, num_heads_kv=1, sliding_window=3)))
    ours.save_pretrained(tmp_path)
    theirs = transformers.MistralForCausalLM.from_pretrained(tmp_path)
    parity.assert_same_logits(
        ours, theirs, {"input_ids": IDS}, torch.ones_like(IDS, dtype=torch.bool)
    )


@since_5  # which loads in that dtype unless it is asked for another
def test_the_dtype_that_is_written_is_that_of_the_tensors(tmp_path: pathlib.Path) -> None:
    """transformers loads in the dtype of config.json: a model that was cast, or converted, must not
    be rounded by it.
    """
    model = llama()
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        folders = [tmp_path / f"{dtype}" / name for name in ("saved", "ours", "back")]
        model.to(dtype).save_pretrained(folders[0])
        convert.run(parser.parse_args([str(folders[0]), str(folders[1]), "--to", "model_center"]))
        convert.run(
            parser.parse_args([str(folders[1]), str(folders[2]), "--to", "hf", "--model", "llama"])
        )
        for folder in (folders[0], folders[2]):
            theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
            assert theirs.dtype == dtype == next(model.parameters()).dtype
            assert torch.equal(theirs.lm_head.weight, model.output_projection.weight)


def test_the_widest_dtype_holds_all(tmp_path: pathlib.Path) -> None:
    model = llama(dtype=torch.bfloat16)
    model.output_projection.float()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_model_with_another_layer_inside_is_not_written(tmp_path: pathlib.Path) -> None:
    """Adapters that were not merged: transformers would draw the weights at random that it does not
    find.
    """
    model = llama()
    attention: Any = model.get_submodule("encoder.layers.1.self_att.self_attention")
    original, attention.project_q = attention.project_q, torch.nn.Sequential(attention.project_q)
    name = r"encoder\.layers\.1\.self_att\.self_attention\.project_q\.weight"
    with pytest.raises(
        WeightsError,
        match=rf"no '{name}' to be written as 'model\.layers\.1\.self_attn\.q_proj.*merge",
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    attention.project_q = original
    model.save_pretrained(tmp_path)


def refused_on_all(folder: str) -> list[str]:
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


def test_a_configuration_that_one_rank_cannot_read_is_an_error_on_all(
    tmp_path: pathlib.Path,
) -> None:
    llama().save_pretrained(tmp_path / "0")
    (tmp_path / "1").mkdir()
    for messages in run_ranks(refused_on_all, 2, str(tmp_path)):
        assert [
            ("no config.json" in text, "'half_' (nearest: 'half')" in text) for text in messages
        ] == [(True, False), (False, True), (True, False)]


def test_arguments_that_would_be_taken_for_others() -> None:
    model = llama()
    summands = torch.zeros(2, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -1e4)
    with pytest.raises(InputError, match=r"4 dims of floating point: expected bool"):
        model(IDS, attention_mask=summands)
    parity.assert_close(model(IDS, attention_mask=summands == 0).logits, model(IDS).logits)
    with pytest.raises(InputError, match=r"is for 4 queries: expected 8"):
        model(IDS, attention_mask=torch.ones(2, 4, 8))
    for length, got in (
        ([8, 3], "type list: expected a tensor"),
        (torch.ones(2, 1).long(), r"shape \(2, 1\), torch.int64: expected integers \(2,\)"),
        (torch.ones(3).long(), r"shape \(3,\), torch.int64: expected integers \(2,\)"),
        (torch.ones(1).long(), r"shape \(1,\), torch.int64: expected integers \(2,\)"),
        (torch.ones(2), r"shape \(2,\), torch.float32: expected integers \(2,\)"),
    ):
        with pytest.raises(InputError, match=f"length is of {got}"):
            model(IDS, length=length)
    with torch.no_grad():
        past = model(IDS[:1], use_cache=True).past_key_values
        with pytest.raises(InputError, match=r"the cache holds 1 rows: .* got 2"):
            model(IDS, use_cache=True, past_key_values=past)
    assert past[0][0].shape[2] == IDS.shape[1]


def test_a_cache_of_one_row_can_be_that_of_several() -> None:
    model = llama()
    with torch.no_grad():
        past = model(IDS[:1, :5], use_cache=True).past_key_values
        past = [(keys.expand(2, -1, -1, -1), values.repeat(2, 1, 1, 1)) for keys, values in past]
        found = model(IDS[:, 5:], use_cache=True, past_key_values=past).logits
        parity.assert_close(
            found, model(torch.cat([IDS[:1, :5].expand(2, -1), IDS[:, 5:]], 1)).logits[:, 5:]
        )
    with pytest.raises(InputError, match=r"holds 2 rows"):
        LayerCache.of(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4)).append(
            torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
        )


def test_positions_that_count_from_the_padding_need_it() -> None:
    model = Roberta(RobertaConfig(**LAYERS, position_size=12, pad_token_id=None))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"pad_token_id is None"):
        model(IDS)


def test_ids_of_special_tokens_survive(tmp_path: pathlib.Path) -> None:
    """Through our configuration and back, by `save_pretrained` and by conversion to ModelCenter's
    format and on.
    """
    ids: dict[str, Any] = {"bos_token_id": 7, "eos_token_id": [9, 11], "pad_token_id": 5}
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids)).save_pretrained(
        tmp_path / "start"
    )
    Llama.from_pretrained(tmp_path / "start", dtype="float32").save_pretrained(tmp_path / "saved")
    convert_to(tmp_path / "start", tmp_path / "ours", "model_center")
    convert_to(tmp_path / "ours", tmp_path / "back", "hf", "Llama")
    for folder in ("saved", "back"):
        found = transformers.AutoConfig.from_pretrained(tmp_path / folder)
        assert {name: getattr(found, name) for name in ids} == ids, folder


def test_ids_of_special_tokens_of_a_new_model_are_those_of_its_tokenizer() -> None:
    tokenizer = argparse.Namespace(bos_token_id=3, eos_token_id=4, pad_token_id=None)
    content = LlamaConfig(**LAYERS).hugging_face_content(tokenizer)
    assert (content["bos_token_id"], content["eos_token_id"]) == (
        3,
        4,
    ) and "pad_token_id" not in content
    assert "special_ids" not in LlamaConfig(**LAYERS).to_dict()


def convert_to(
    source: pathlib.Path, target: pathlib.Path, kind: str, model: str | None = None
) -> None:
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    named = [] if model is None else ["--model", model]
    convert.run(parser.parse_args([str(source), str(target), "--to", kind, *named]))
