"""Bert against transformers' BertForPreTraining and BertForMaskedLM."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tests.models import parity
from tests.models.versions import since_5

import bmtrain as bmt
from model_center.errors import ConfigError, InputError, WeightsError
from model_center.model.bert import Bert, BertConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
SIDES = ("none", "left", "right")
# parts of theirs that the language model's loss does not reach
OTHER_LOSSES = ("cls.seq_relationship", "bert.pooler")


def hugging_face(model_class: Any = transformers.BertForPreTraining, **options: Any) -> Any:
    return parity.theirs(
        model_class, transformers.BertConfig(**SIZES, max_position_embeddings=20, **options)
    )


def inputs_of(side: str, **more: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of two sequences with token types, padded on this side, and which tokens are valid."""
    ids, mask = parity.token_ids(2, 12), parity.padding_mask(2, 12, side)
    inputs = {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": mask, **more}
    return inputs, parity.valid_of(mask, ids)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bert, Any]:
    model = hugging_face()
    return parity.loaded(Bert, model, tmp_path_factory.mktemp("bert")), model


@pytest.mark.parametrize("side", SIDES)
def test_scores_hidden_states_attentions(pair: tuple[Bert, Any], side: str) -> None:
    inputs, valid = inputs_of(side)
    parity.assert_same_logits(*pair, inputs, valid)
    parity.assert_same_extras(*pair, inputs, valid)


@pytest.mark.parametrize("side", SIDES)
def test_gradients_of_every_parameter(
    pair: tuple[Bert, Any], side: str, tmp_path: pathlib.Path
) -> None:
    inputs, valid = inputs_of(side)
    parity.assert_same_gradients(*pair, inputs, valid, tmp_path, without=OTHER_LOSSES)


def test_gradients_of_padding_ids_without_a_mask(
    pair: tuple[Bert, Any], tmp_path: pathlib.Path
) -> None:
    """The embedding of the padding token learns from the head only, as there."""
    inputs, valid = inputs_of("none", input_ids=parity.token_ids(2, 12, low=0, high=3))
    parity.assert_same_gradients(*pair, inputs, valid, tmp_path, without=OTHER_LOSSES)


def test_pooler(pair: tuple[Bert, Any]) -> None:
    """Its output, and the gradients of its parameters and of what is below."""
    ours, theirs = pair
    inputs, _ = inputs_of("right")
    out, expected = (
        ours(**inputs, output_pooler_output=True).pooler_output,
        theirs.bert(**inputs).pooler_output,
    )
    parity.assert_close(out, expected)
    weight, other = ours.pooler.dense.weight, theirs.bert.pooler.dense.weight
    found = torch.autograd.grad(out.sin().sum(), [weight, ours.input_embedding.weight])
    wanted = torch.autograd.grad(
        expected.sin().sum(), [other, theirs.bert.embeddings.word_embeddings.weight]
    )
    for one, reference in zip(found, wanted, strict=True):
        parity.assert_close(one, reference)
    out = ours(**inputs)
    assert "pooler_output" not in out
    assert len(out.to_tuple()) == len(out.keys())
    # as the program of ModelCenter's README reads it, without asking
    asked = ours(**inputs, output_pooler_output=True).pooler_output
    torch.testing.assert_close(out.pooler_output, asked, rtol=0, atol=0)


@since_5  # where the head has two biases
def test_untied_with_another_activation(tmp_path: pathlib.Path) -> None:
    """A head of its own, and an activation that the head shares with the layers."""
    model = hugging_face(tie_word_embeddings=False, hidden_act="relu", layer_norm_eps=1e-3)
    ours = parity.loaded(Bert, model, tmp_path)
    inputs, valid = inputs_of("left")
    parity.assert_same_logits(ours, model, inputs, valid)
    # the head there has a second bias then, which it does not add
    unused = ("cls.predictions.bias",)
    parity.assert_same_gradients(
        ours, model, inputs, valid, tmp_path, without=(*unused, *OTHER_LOSSES)
    )
    parity.assert_saved_alike(
        ours, model, inputs, valid, tmp_path, without=(*unused, *OTHER_LOSSES[:1])
    )


def test_untied_as_transformers_4_writes_it(tmp_path: pathlib.Path) -> None:
    """The bias under one name, that of the head."""
    model = hugging_face(tie_word_embeddings=False)
    head = model.cls.predictions
    with torch.no_grad():
        head.bias.normal_()
        head.decoder.bias.copy_(head.bias)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors.pop("cls.predictions.decoder.bias", None)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    inputs, valid = inputs_of("left")
    ours = Bert.from_pretrained(tmp_path, dtype="float32").eval()
    parity.assert_same_logits(ours, model, inputs, valid)


def test_saved_for_transformers_and_for_us(pair: tuple[Bert, Any], tmp_path: pathlib.Path) -> None:
    ours, model = pair
    parity.assert_saved_alike(
        ours, model, *inputs_of("right"), tmp_path, without=("cls.seq_relationship",)
    )
    ours.save_pretrained(tmp_path / "own", format="model_center")
    again = Bert.from_pretrained(tmp_path / "own", dtype="float32")
    parity.assert_same_parameters(again, ours)
    assert again.config == ours.config


def test_inputs_embeds_positions_and_length(pair: tuple[Bert, Any]) -> None:
    """Every way to say the same gives the same."""
    ours, theirs = pair
    ids = parity.token_ids(2, 12)
    reversed_positions = torch.arange(12).flip(0)[None]
    parity.assert_same_logits(
        ours,
        theirs,
        {"input_ids": ids, "position_ids": reversed_positions},
        torch.ones(2, 12, dtype=torch.bool),
    )
    length = torch.tensor([7, 12])
    mask = torch.arange(12) < length[:, None]
    with torch.no_grad():
        expected = ours(ids, attention_mask=mask).logits
        parity.assert_close(ours(ids, length).logits[mask], expected[mask])
        parity.assert_close(ours(ids.int(), attention_mask=mask.half()).logits, expected)
        pairs = mask[:, None, :].expand(-1, 12, -1)
        parity.assert_close(ours(ids, attention_mask=pairs).logits, expected)
        parity.assert_close(
            ours(inputs_embeds=ours.input_embedding(ids), attention_mask=mask).logits, expected
        )


def test_cache_with_a_mask_of_pairs(pair: tuple[Bert, Any]) -> None:
    """With a causal mask of pairs, tokens may come one after another."""
    ours, _ = pair
    ids, causal = parity.token_ids(2, 12), torch.ones(2, 12, 12).tril()
    with torch.no_grad():
        whole = ours(ids, attention_mask=causal, token_type_ids=ids % 2)
        past, pieces = None, []
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            out = ours(
                ids[:, start:stop],
                attention_mask=causal[:, :stop, :stop],
                token_type_ids=(ids % 2)[:, :stop],
                position_ids=torch.arange(stop)[None],
                past_key_values=past,
                use_cache=True,
            )
            past = out.past_key_values
            pieces.append(out.logits)
    parity.assert_close(torch.cat(pieces, 1), whole.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(pair: tuple[Bert, Any], dtype: torch.dtype) -> None:
    """All of it, the heads too, is in the dtype of the configuration."""
    parity.assert_trains_in(dtype, pair[0], *inputs_of("right"))


def test_outputs(pair: tuple[Bert, Any]) -> None:
    ours, _ = pair
    ids = parity.token_ids(2, 5)
    out = ours(ids, output_pooler_output=True, return_dict=False)
    assert len(out) == 6
    assert out[0].shape == (2, 5, 32)
    assert out[1].shape == (2, 32)
    assert out[2] is None
    assert out[3].shape == (2, 5, 64)
    assert list(ours(ids, output_logits=False)) == ["last_hidden_state"]


def test_a_classification_head(pair: tuple[Bert, Any], tmp_path: pathlib.Path) -> None:
    """`cls_head` scores every position; from a file without it, it is new, and the user is told."""
    ours, _ = pair
    ours.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"cls_projection.*newly initialised"):
        model = Bert.from_pretrained(tmp_path, dtype="float32", cls_head=3).eval()
    ids = parity.token_ids(2, 5)
    assert model(ids).logits.shape == (2, 5, 3)
    expected = (
        model(ids).last_hidden_state @ model.cls_projection.weight.T + model.cls_projection.bias
    )
    parity.assert_close(model(ids).logits, expected)


def test_a_deep_copy_is_independent(pair: tuple[Bert, Any]) -> None:
    ours, _ = pair
    other, ids = copy.deepcopy(ours), parity.token_ids(2, 5)
    parity.assert_same_parameters(other, ours)
    before = ours(ids).logits
    with torch.no_grad():
        other.input_embedding.weight.zero_()
    assert torch.equal(ours(ids).logits, before)


def test_dropout_is_for_training_only() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "dim_model": 32,
        "num_heads": 4,
        "dim_head": 8,
        "dim_ff": 48,
        "num_layers": 1,
    }
    model = Bert(BertConfig(**sizes, dropout_p=0.5, half=False))
    ids = parity.token_ids(1, 6)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_bad_arguments(pair: tuple[Bert, Any]) -> None:
    ours, _ = pair
    ids = parity.token_ids(2, 12)
    with pytest.raises(InputError, match=r"sequence has 21 tokens.*20"):
        ours(parity.token_ids(1, 21))
    with pytest.raises(InputError, match=r"neither"):
        ours()
    with pytest.raises(InputError, match=r"input_ids has shape \(12,\)"):
        ours(ids[0])
    with pytest.raises(InputError, match=r"expected 12 keys"):
        ours(ids, attention_mask=torch.ones(2, 11))
    with pytest.raises(InputError, match=r"from 3 to 64"):
        ours(torch.tensor([[3, 64]]))
    with pytest.raises(InputError, match=r"ids of torch.float32"):
        ours(ids.float())


def test_bad_configurations(pair: tuple[Bert, Any], tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"'dim_modl' .nearest: 'dim_model'"):
        BertConfig.from_dict({"dim_modl": 3})
    with pytest.raises(ConfigError, match=r"position_embedding_type"):
        BertConfig.from_dict(
            {
                **transformers.BertConfig(**SIZES).to_dict(),
                "position_embedding_type": "relative_key",
            }
        )
    odd = Bert(
        BertConfig(
            vocab_size=8, dim_model=8, num_heads=2, dim_head=6, dim_ff=8, num_layers=1, half=False
        )
    )
    with pytest.raises(ConfigError, match=r"dim_model is 8, there it is 12.*model_center"):
        odd.save_pretrained(tmp_path / "odd")
    assert not (tmp_path / "odd" / "config.json").exists()
    pair[0].save_pretrained(tmp_path / "saved")
    with pytest.raises(WeightsError, match=r"64.*vocab_size=64|vocab_size=64"):
        Bert.from_pretrained(tmp_path / "saved", vocab_size=65)


def test_published_defaults() -> None:
    """Names and shapes of a model in ModelCenter's own configuration, on the meta device."""
    with torch.device("meta"):
        model = Bert(BertConfig(vocab_size=28996))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    layer = "encoder.layers.11."
    assert shapes["input_embedding.weight"] == (28996, 768)
    assert shapes["position_embedding.weight"] == (512, 768)
    assert shapes["token_type_embedding.weight"] == (2, 768)
    assert shapes[layer + "self_att.layernorm_before_attention.bias"] == (768,)
    assert shapes[layer + "self_att.self_attention.attention_out.bias"] == (768,)
    assert shapes[layer + "ffn.ffn.w_in.w.weight"] == (3072, 768)
    assert shapes["lm_head.decoder.bias"] == (28996,)
    assert shapes["pooler.dense.weight"] == (768, 768)
    assert "lm_head.decoder.weight" not in shapes
    assert not bmt.is_initialized()
