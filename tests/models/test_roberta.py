"""Roberta against transformers' RobertaForMaskedLM."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import transformers
from tests.models import parity
from tests.models.versions import since_5

from model_center.errors import ConfigError, InputError
from model_center.model.bert import Bert, BertConfig
from model_center.model.roberta import Roberta, RobertaConfig

PAD = 1
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "pad_token_id": PAD,
}
SIDES = ("none", "left", "right")


def inputs_of(side: str, **more: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of two sequences, the first padded on this side with the padding token, and which
    tokens are valid.
    """
    ids, mask = parity.token_ids(2, 12), parity.padding_mask(2, 12, side)
    valid = parity.valid_of(mask, ids)
    return {"input_ids": ids.masked_fill(~valid, PAD), "attention_mask": mask, **more}, valid


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Roberta, Any]:
    model = parity.theirs(transformers.RobertaForMaskedLM, transformers.RobertaConfig(**SIZES))
    with pytest.warns(UserWarning, match=r"pooler.dense.weight.*newly initialised"):
        return parity.loaded(Roberta, model, tmp_path_factory.mktemp("roberta")), model


@pytest.mark.parametrize("side", SIDES)
def test_scores_hidden_states_attentions(pair: tuple[Roberta, Any], side: str) -> None:
    inputs, valid = inputs_of(side)
    parity.assert_same_logits(*pair, inputs, valid)
    parity.assert_same_extras(*pair, inputs, valid)


@pytest.mark.parametrize("side", SIDES)
def test_gradients_of_every_parameter(
    pair: tuple[Roberta, Any], side: str, tmp_path: pathlib.Path
) -> None:
    parity.assert_same_gradients(*pair, *inputs_of(side), tmp_path)


@pytest.mark.parametrize("side", SIDES[1:])
def test_padding_tokens_without_a_mask(
    pair: tuple[Roberta, Any], side: str, tmp_path: pathlib.Path
) -> None:
    """They are seen then, at the position of padding, and learn nothing there."""
    inputs, _ = inputs_of(side)
    del inputs["attention_mask"]
    everything = torch.ones(2, 12, dtype=torch.bool)
    parity.assert_same_logits(*pair, inputs, everything)
    parity.assert_same_gradients(*pair, inputs, everything, tmp_path)


def test_left_padding_changes_nothing(pair: tuple[Roberta, Any]) -> None:
    """Positions count tokens, not padding."""
    ours, _ = pair
    ids = parity.token_ids(1, 8)
    padded = torch.cat([torch.full((1, 5), PAD), ids], 1)
    with torch.no_grad():
        found = ours(padded, attention_mask=padded != PAD).logits[:, 5:]
        parity.assert_close(found, ours(ids).logits)


def test_inputs_embeds(pair: tuple[Roberta, Any]) -> None:
    """Without ids all tokens count."""
    ours, theirs = pair
    embeds = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(3))
    parity.assert_same_logits(
        ours, theirs, {"inputs_embeds": embeds}, torch.ones(2, 12, dtype=torch.bool)
    )
    given = {"inputs_embeds": embeds, "position_ids": torch.arange(12).flip(0)[None]}
    parity.assert_same_logits(ours, theirs, given, torch.ones(2, 12, dtype=torch.bool))


@pytest.mark.parametrize("side", SIDES)
def test_cache_goes_on_counting(pair: tuple[Roberta, Any], side: str) -> None:
    """With a causal mask of pairs tokens may come later; positions of the new ones follow from the
    mask of all.
    """
    ours, _ = pair
    inputs, valid = inputs_of(side)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    pairs = torch.ones(12, 12).tril() * valid[:, None, :]
    with torch.no_grad():
        whole = ours(ids, attention_mask=pairs).logits
        first = ours(ids[:, :7], attention_mask=pairs[:, :7, :7], use_cache=True)
        # The second pass sees all valid tokens, which for the last token is what the causal mask
        # shows.
        out = ours(
            ids[:, 7:11],
            attention_mask=pairs[:, 7:11, :11],
            past_key_values=first.past_key_values,
            use_cache=True,
            position_ids=(valid.cumsum(1) * valid + PAD)[:, :11],
        )
        last = ours(ids[:, 11:], attention_mask=mask, past_key_values=out.past_key_values).logits
    keep = valid[:, 11]
    parity.assert_close(last[keep], whole[keep, 11:])


def test_saved_for_transformers_and_for_us(
    pair: tuple[Roberta, Any], tmp_path: pathlib.Path
) -> None:
    ours, model = pair
    parity.assert_saved_alike(ours, model, *inputs_of("right"), tmp_path)
    ours.save_pretrained(tmp_path / "own", format="model_center")
    again = Roberta.from_pretrained(tmp_path / "own", dtype="float32")
    parity.assert_same_parameters(again, ours)
    assert again.config == ours.config


@since_5  # where the head has two biases
def test_untied(tmp_path: pathlib.Path) -> None:
    """The head has a matrix and a bias of its own, and its activation stays that of RoBERTa."""
    config = transformers.RobertaConfig(**SIZES, tie_word_embeddings=False, hidden_act="relu")
    model = parity.theirs(transformers.RobertaForMaskedLM, config)
    with pytest.warns(UserWarning, match=r"pooler"):
        ours = parity.loaded(Roberta, model, tmp_path)
    inputs, valid = inputs_of("left")
    parity.assert_same_logits(ours, model, inputs, valid)
    parity.assert_same_gradients(ours, model, inputs, valid, tmp_path, without=("lm_head.bias",))
    parity.assert_saved_alike(ours, model, inputs, valid, tmp_path, without=("lm_head.bias",))


def test_a_model_without_head(tmp_path: pathlib.Path) -> None:
    """Files of the class without head have no prefix; the pooler is there."""
    model = parity.theirs(transformers.RobertaModel, transformers.RobertaConfig(**SIZES))
    with pytest.warns(UserWarning, match=r"lm_head.*newly initialised"):
        ours = parity.loaded(Roberta, model, tmp_path)
    inputs, valid = inputs_of("right")
    with torch.no_grad():
        out, expected = ours(**inputs, output_pooler_output=True), model(**inputs)
    parity.assert_close(out.last_hidden_state[valid], expected.last_hidden_state[valid])
    parity.assert_close(out.pooler_output, expected.pooler_output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(pair: tuple[Roberta, Any], dtype: torch.dtype) -> None:
    parity.assert_trains_in(dtype, pair[0], *inputs_of("left"))


def test_classification_head_and_deep_copy(pair: tuple[Roberta, Any]) -> None:
    ours, _ = pair
    ids = parity.token_ids(2, 5)
    parity.assert_close(copy.deepcopy(ours)(ids).logits, ours(ids).logits, tolerance=0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "dim_model": 32,
        "num_heads": 4,
        "dim_head": 8,
        "dim_ff": 48,
        "num_layers": 1,
        "half": False,
    }
    model = Roberta(RobertaConfig(**sizes, cls_head=3))
    assert model(ids).logits.shape == (2, 5, 3)
    assert not model.input_embedding.weight[PAD].any()


def test_bad_arguments(pair: tuple[Roberta, Any]) -> None:
    ours, _ = pair
    assert ours(parity.token_ids(1, 18)).logits.shape == (1, 18, 64)  # positions 2 to 19
    with pytest.raises(InputError, match=r"sequence has 19 tokens.*18 at most"):
        ours(parity.token_ids(1, 19))
    with pytest.raises(InputError, match=r"expected 12 keys"):
        ours(parity.token_ids(1, 12), attention_mask=torch.ones(1, 13))
    with pytest.raises(ConfigError, match=r"got BertConfig: expected RobertaConfig"):
        Roberta(BertConfig(num_layers=1))
    with pytest.raises(ConfigError, match=r"'pad_token'"):
        RobertaConfig.from_dict({"pad_token": 1})
    assert issubclass(Roberta, Bert)


def test_published_defaults() -> None:
    with torch.device("meta"):
        model = Roberta(RobertaConfig())
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert shapes["position_embedding.weight"] == (514, 1024)
    assert shapes["token_type_embedding.weight"] == (1, 1024)
    assert shapes["encoder.layers.23.ffn.ffn.w_out.weight"] == (1024, 4096)
    assert shapes["lm_head.decoder.bias"] == (50265,)
    assert model.config.norm_eps == 1e-5
