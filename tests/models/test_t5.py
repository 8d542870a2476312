"""T5 1.0, T5 v1.1 and mT5 against transformers."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from tests.models import parity
from tests.models.versions import IS_4, since_5
from transformers import MT5ForConditionalGeneration, T5ForConditionalGeneration

from model_center.errors import ConfigError, InputError
from model_center.layer.cache import KeyValueCache
from model_center.model.t5 import T5, T5Config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 10,
    "num_heads": 3,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
VERSIONS = ("1.0", "1.1", "mt5")
SOURCE, TARGET = 14, 12
STD = 0.12  # of weights: scores, which nothing scales, make differences of rounding large beyond


def hugging_face(version: str, **options: Any) -> Any:
    """A random model; those with a head of their own get one, which transformers 5 ties at
    first.
    """
    if version == "1.0":
        return parity.theirs(
            T5ForConditionalGeneration, transformers.T5Config(**SIZES, **options), STD
        )
    gated = {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **options}
    if version == "mt5":
        model = parity.theirs(MT5ForConditionalGeneration, transformers.MT5Config(**gated), STD)
    else:
        model = parity.theirs(T5ForConditionalGeneration, transformers.T5Config(**gated), STD)
    head = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(3)) * 0.2
    model.lm_head.weight = torch.nn.Parameter(head)
    if not IS_4:
        model.all_tied_weights_keys.pop("lm_head.weight")
    return model


def pair(version: str, folder: pathlib.Path, **options: Any) -> tuple[T5, Any]:
    model = hugging_face(version, **options)
    return parity.loaded(T5, model, folder / "theirs"), model


def inputs_of(side: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Both sequences with padding on this side, and which tokens of the decoder are valid."""
    decoder = parity.padding_mask(2, TARGET, side, 3)
    decoder_ids = parity.token_ids(2, TARGET, seed=5)
    inputs = {
        "input_ids": parity.token_ids(2, SOURCE),
        "attention_mask": parity.padding_mask(2, SOURCE, side),
        "decoder_input_ids": decoder_ids,
        "decoder_attention_mask": decoder,
    }
    inputs = {name: value for name, value in inputs.items() if value is not None}
    return inputs, parity.valid_of(decoder, decoder_ids)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("version", VERSIONS)
def test_values_and_gradients(version: str, side: str, tmp_path: pathlib.Path) -> None:
    ours, model = pair(version, tmp_path)
    inputs, valid = inputs_of(side)
    parity.assert_same_logits(ours, model, inputs, valid)
    parity.assert_same_gradients(ours, model, inputs, valid, tmp_path)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_hidden_states_and_attentions(side: str, tmp_path: pathlib.Path) -> None:
    ours, model = pair("1.1", tmp_path)
    inputs, valid = inputs_of(side)
    encoder = parity.valid_of(inputs.get("attention_mask"), inputs["input_ids"])
    with torch.no_grad():
        plain = ours(**inputs)
        found = ours(**inputs, output_hidden_states=True, output_attentions=True)
        expected = model(**inputs, output_hidden_states=True, output_attentions=True)
        only = ours(**inputs, output_decoder_hidden_states=True, output_decoder_attentions=True)
    parity.assert_close(found.logits[valid], plain.logits[valid], "logits, with extras asked for")
    parity.assert_close(
        found.encoder_last_hidden_state[encoder],
        expected.encoder_last_hidden_state[encoder],
        "encoder's last hidden states",
    )
    for name, tokens in (
        ("encoder_hidden_states", encoder),
        ("decoder_hidden_states", valid),
        ("encoder_attentions", encoder),
        ("decoder_attentions", valid),
        ("cross_attentions", valid),
    ):
        assert len(found[name]) == len(expected[name]), name
        for one, other in zip(found[name], expected[name], strict=True):
            of_tokens = (lambda x: x.transpose(1, 2)) if "attentions" in name else (lambda x: x)
            parity.assert_close(of_tokens(one)[tokens], of_tokens(other)[tokens], name)
    assert only.encoder_hidden_states is None and only.encoder_attentions is None
    parity.assert_close(
        only.decoder_hidden_states[1], found.decoder_hidden_states[1], "decoder's alone"
    )
    assert len(only.cross_attentions) == 3


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_saved(version: str, tmp_path: pathlib.Path) -> None:
    ours, model = pair(version, tmp_path)
    inputs, valid = inputs_of("none")
    parity.assert_saved_alike(ours, model, inputs, valid, tmp_path)
    ours.save_pretrained(tmp_path / "own", format="model_center")
    again = T5.from_pretrained(tmp_path / "own", dtype="float32")
    parity.assert_same_parameters(again, ours)
    assert again.config == ours.config


def test_multilingual_is_saved_as_it_came(tmp_path: pathlib.Path) -> None:
    ours, model = pair("mt5", tmp_path)
    inputs, _ = inputs_of("none")
    ours.save_pretrained(tmp_path / "ours")
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    assert back.config.model_type == "mt5"
    with torch.no_grad():
        parity.assert_close(back(**inputs).logits, model(**inputs).logits, "logits")


@since_5  # which writes of its own accord whether they are
def test_who_is_tied(tmp_path: pathlib.Path) -> None:
    """As the files on the hub say it, and as transformers 5 writes it of the same models."""
    old = {**SIZES, "model_type": "t5"}
    for content, tied, scaled in (
        (old, True, True),
        ({**old, "tie_word_embeddings": False}, False, False),
        ({**old, "model_type": "mt5", "tie_word_embeddings": False}, False, False),
        (transformers.T5Config(**SIZES).to_dict(), True, True),
        (transformers.T5Config(**SIZES | {"tie_word_embeddings": False}).to_dict(), False, False),
        (transformers.MT5Config(**SIZES).to_dict(), False, False),
    ):
        config = T5Config.from_dict(content)
        assert (config.tied, config.scale_logits) == (tied, scaled), content
    model = parity.theirs(
        T5ForConditionalGeneration, transformers.T5Config(**SIZES | {"tie_word_embeddings": False})
    )
    # its file has no head: it was tied, whatever was asked
    ours = parity.loaded(T5, model, tmp_path)
    assert torch.equal(ours.output_projection.weight, ours.input_embedding.weight)
    inputs, valid = inputs_of("none")
    parity.assert_same_logits(ours, model, inputs, valid)


def test_cache(tmp_path: pathlib.Path) -> None:
    """The decoder token by token over the encoder's states, which go through the cross-attention
    once.
    """
    for side in ("none", "left"):
        ours, _ = pair("1.0", tmp_path / side)
        inputs, valid = inputs_of(side)
        of_encoder = {name: inputs[name] for name in ("attention_mask",) if name in inputs}
        ids, mask = inputs["decoder_input_ids"], inputs.get("decoder_attention_mask")
        with torch.no_grad():
            whole = ours(**inputs).logits
            states = ours.encode(inputs["input_ids"], **of_encoder).last_hidden_state
            past: Any = KeyValueCache(ours.config.num_decoder_layers, cross_attention=True)
            pieces = []
            for start, stop in (
                (0, 5),
                (5, 7),
                *((place, place + 1) for place in range(7, TARGET)),
            ):
                of_decoder = {} if mask is None else {"decoder_attention_mask": mask[:, :stop]}
                out = ours(
                    decoder_input_ids=ids[:, start:stop],
                    encoder_outputs=(states,),
                    past_key_values=past,
                    use_cache=True,
                    **of_encoder,
                    **of_decoder,
                )
                past = out.past_key_values
                pieces.append(out.logits)
        parity.assert_close(torch.cat(pieces, 1)[valid], whole[valid], "logits with a cache")
        assert past[0].cross.length == SOURCE and past.length == TARGET


def test_ways_to_say_the_same(tmp_path: pathlib.Path) -> None:
    ours, _ = pair("1.0", tmp_path)
    inputs, valid = inputs_of("right")
    length, decoder_length = (
        inputs["attention_mask"].sum(1),
        inputs["decoder_attention_mask"].sum(1),
    )
    ids, decoder_ids = inputs["input_ids"], inputs["decoder_input_ids"]
    with torch.no_grad():
        want = ours(**inputs).logits[valid]
        positional = ours(ids.int(), length, decoder_ids.int(), decoder_length)
        parity.assert_close(positional.logits[valid], want, "lengths, by position")
        embedded = {
            name.replace("_ids", "s_embeds"): ours.input_embedding(inputs[name])
            for name in ("input_ids", "decoder_input_ids")
        }
        masks = {
            name: inputs[name].float() for name in ("attention_mask", "decoder_attention_mask")
        }
        parity.assert_close(
            ours(**embedded, **masks).logits[valid], want, "embeddings and masks of numbers"
        )
        no_masks = ours(input_ids=ids, decoder_input_ids=decoder_ids)
        assert no_masks.logits.isfinite().all()
        plain = ours(**inputs, return_dict=False)
        assert (
            len(plain) == 9
            and torch.equal(plain[3], ours(**inputs).logits)
            and plain[4:] == (None,) * 5
        )
        assert ours(**inputs, output_logits=False).logits is None


def test_the_last_bucket_learns(tmp_path: pathlib.Path) -> None:
    ours, _ = pair("1.0", tmp_path)
    inputs, _ = inputs_of("none")
    ours(**inputs).logits.square().sum().backward()
    for name in ("enc", "dec"):
        assert getattr(ours, f"position_bias_{name}").relative_attention_bias.grad[-1].any()


def test_files_of_model_center_are_a_hundredth(tmp_path: pathlib.Path) -> None:
    """Their T5 1.0, made for fp16, needs `scale`; other than by rounding and eps it computes the
    same.
    """
    ours, model = pair("1.0", tmp_path, layer_norm_epsilon=1e-12)
    weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for name in weights:
        small = name == "input_embedding.weight" or "attention_out" in name
        weights[name] /= 100 if small else 10 if "ffn.ffn" in name else 1
    config = copy.deepcopy(ours.config)
    config.scale, config.scale_logits = True, False
    (tmp_path / "config.json").write_text(
        json.dumps(
            {name: value for name, value in config.to_dict().items() if name != "scale_logits"}
        )
    )
    torch.save(weights, tmp_path / "pytorch_model.pt")
    scaled = T5.from_pretrained(tmp_path)
    inputs, _ = inputs_of("right")
    with torch.no_grad():
        parity.assert_close(scaled.eval()(**inputs).logits, model(**inputs).logits, "logits", 1e-4)
    with pytest.raises(ConfigError, match="a hundredth"):
        scaled.save_pretrained(tmp_path / "out")


def test_surface(tmp_path: pathlib.Path) -> None:
    ours, _ = pair("1.1", tmp_path)
    inputs, valid = inputs_of("right")
    parity.assert_same_parameters(copy.deepcopy(ours), ours)
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(dtype, ours, inputs, valid)
    with pytest.warns(UserWarning) as told:
        classifier = T5.from_pretrained(tmp_path / "theirs", cls_head=3, dtype="float32")
    assert any("does not have cls_projection.weight" in str(one.message) for one in told)
    assert classifier(**inputs).logits.shape == (2, TARGET, 3)


def test_errors(tmp_path: pathlib.Path) -> None:
    ours, _ = pair("1.0", tmp_path)
    ids = parity.token_ids(2, 5)
    with pytest.raises(InputError, match="either input_ids or inputs_embeds: got neither"):
        ours(decoder_input_ids=ids)
    with pytest.raises(
        InputError, match="either decoder_input_ids or decoder_inputs_embeds: got neither"
    ):
        ours(input_ids=ids)
    with pytest.raises(InputError, match="expected 5 keys"):
        ours(input_ids=ids, attention_mask=torch.ones(2, 4), decoder_input_ids=ids)
    with pytest.raises(ConfigError, match="scale and scale_logits"):
        T5Config(**SMALL, scale=True, scale_logits=True)
    with pytest.raises(ConfigError, match="umt5"):
        T5Config.from_dict({**SIZES, "model_type": "umt5"})
    with pytest.raises(ConfigError, match="att_bias is True"):
        T5Config(**SMALL, att_bias=True).to_hugging_face()
    with pytest.raises(ConfigError, match="'d_modell'"):
        T5Config.from_dict({"d_modell": 3})
