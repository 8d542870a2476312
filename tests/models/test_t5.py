"""T5 1.0, T5 v1.1 and mT5 against transformers."""

import copy
import json

import pytest
import torch
import transformers
from tests.models import parity
from tests.models.parity import (
    SIDES,
    assert_close,
    assert_same_logits,
    padding_mask,
    refuse,
    token_ids,
    valid_of,
)
from tests.models.versions import IS_4, since_5

from model_center.errors import ConfigError
from model_center.model import T5, T5Config

SIZES = parity.values(
    "vocab_size=64 d_model=32 d_kv=10 num_heads=3 d_ff=48 num_layers=2 num_decoder_layers=3 "
    "relative_attention_num_buckets=8 relative_attention_max_distance=12 decoder_start_token_id=0"
)
UNTIED = SIZES | {"tie_word_embeddings": False}
SOURCE, TARGET = 14, 12
STD = 0.12  # of weights: scores, which nothing scales, make differences of rounding large beyond


def pair(version, folder, **options):
    """Our model of the weights of a random one of theirs, and that one; those with a head of their
    own get one, which transformers 5 ties at first.
    """
    kind = "MT5" if version == "mt5" else "T5"
    sizes = SIZES if version == "1.0" else UNTIED | {"feed_forward_proj": "gated-gelu"}
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    model = parity.theirs(getattr(transformers, f"{kind}ForConditionalGeneration"), config, STD)
    if version != "1.0":
        head = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)) * 0.2
        model.lm_head.weight = torch.nn.Parameter(head)
        if not IS_4:
            model.all_tied_weights_keys.pop("lm_head.weight")
    return parity.loaded(T5, model, folder / "theirs"), model


def inputs_of(side):
    """Both sequences with padding on this side, and which tokens of the decoder are valid."""
    decoder = padding_mask(2, TARGET, side, 3)
    decoder_ids = token_ids(2, TARGET, seed=5)
    inputs = {
        "input_ids": token_ids(2, SOURCE),
        "attention_mask": padding_mask(2, SOURCE, side),
        "decoder_input_ids": decoder_ids,
        "decoder_attention_mask": decoder,
    }
    return inputs, valid_of(decoder, decoder_ids)


@pytest.mark.parametrize("version", ["1.0", "1.1", pytest.param("mt5", marks=pytest.mark.long)])
def test_as_in_transformers(version, tmp_path):
    """Scores, gradients, files, a head for classes; all buckets of positions learn."""
    act = {"dense_act_fn": "silu"} if version == "1.0" else {}  # counts more than feed_forward_proj
    ours, model = pair(version, tmp_path, **act)
    for side in SIDES:
        assert_same_logits(ours, model, *inputs_of(side))
    inputs, valid = inputs_of({"1.0": "left", "1.1": "right"}.get(version, "none"))
    parity.assert_same_gradients(ours, model, inputs, valid, tmp_path)
    for name in ("enc", "dec"):
        assert getattr(ours, f"position_bias_{name}").relative_attention_bias.grad[-1].any()
    parity.assert_class_head(T5, tmp_path / "theirs", inputs, "cls_projection")
    parity.assert_same_parameters(copy.deepcopy(ours), ours)
    if version == "mt5":  # it is saved as it came
        ours.save_pretrained(tmp_path / "saved")
        back = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").eval()
        assert back.config.model_type == "mt5"
        assert_same_logits(ours, back, inputs, valid)
    else:
        parity.assert_saved_alike(ours, model, inputs, valid, tmp_path)
    if version == "1.1":
        for dtype in (torch.bfloat16, torch.float16):
            parity.assert_trains_in(dtype, ours, inputs, valid)


@pytest.mark.parametrize("side", ["left", pytest.param("none", marks=pytest.mark.long)])
def test_hidden_states_and_attentions(side, tmp_path):
    ours, model = pair("1.1", tmp_path)
    inputs, valid = inputs_of(side)
    encoder = valid_of(inputs["attention_mask"], inputs["input_ids"])
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        plain, found, expected = ours(**inputs), ours(**inputs, **wanted), model(**inputs, **wanted)
        only = ours(**inputs, output_decoder_hidden_states=True, output_decoder_attentions=True)
    assert_close(found.logits[valid], plain.logits[valid], "logits, with extras requested")
    for name, tokens in (
        ("encoder_last_hidden_state", encoder),
        ("encoder_hidden_states", encoder),
        ("decoder_hidden_states", valid),
        ("encoder_attentions", encoder),
        ("decoder_attentions", valid),
        ("cross_attentions", valid),
    ):
        of_both = [x if isinstance(x, tuple) else (x,) for x in (found[name], expected[name])]
        last = 2 if "attentions" in name else 1  # the dim of queries
        for one, other in zip(*of_both, strict=True):
            one_of, other_of = (x.transpose(1, last)[tokens] for x in (one, other))
            assert_close(one_of, other_of, name)
    assert only.encoder_hidden_states is None and only.encoder_attentions is None
    for name in ("decoder_hidden_states", "decoder_attentions", "cross_attentions"):
        assert_close(only[name][1], found[name][1], "the decoder's alone")
        assert len(only[name]) == len(found[name]) and name not in plain


@since_5  # which writes of its own accord whether they are
def test_who_is_tied(tmp_path):
    """As the files on the hub say it, and as transformers 5 writes it of the same models."""
    for content, tied in (
        (SIZES | {"model_type": "t5"}, True),
        (UNTIED | {"model_type": "t5"}, False),
        (UNTIED | {"model_type": "mt5"}, False),
        (transformers.T5Config(**SIZES).to_dict(), True),
        (transformers.T5Config(**UNTIED).to_dict(), False),
        (transformers.MT5Config(**SIZES).to_dict(), False),
    ):
        config = T5Config.from_dict(content)
        assert (config.tied, config.scale_logits) == (tied, tied), content
    config = T5Config.from_dict(
        {name: x for name, x in UNTIED.items() if "decoder_l" not in name} | {"model_type": "t5"}
    )
    assert config.num_decoder_layers == 2 and config.ffn_activate_fn == "relu"
    # their files have no head: it is one tensor with the embedding, whatever was requested
    for kind, folder in (("T5", tmp_path / "t5"), ("MT5", tmp_path / "mt5")):
        config = getattr(transformers, f"{kind}Config")(**UNTIED)
        model = parity.theirs(getattr(transformers, f"{kind}ForConditionalGeneration"), config, STD)
        ours = parity.loaded(T5, model, folder)
        assert ours.config.tied and not ours.config.scale_logits
        inputs, valid = inputs_of("none")
        assert_same_logits(ours, model, inputs, valid)
        parity.assert_same_gradients(ours, model, inputs, valid, folder)
        ours.save_pretrained(folder / "saved")
        back = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "saved").eval()
        assert_same_logits(ours, back, inputs, valid)
        assert T5Config.from_pretrained(folder / "saved").tied
    apart = T5.from_pretrained(tmp_path / "t5", tied=False, dtype="float32")
    assert torch.equal(apart.output_projection.weight, apart.input_embedding.weight)


def test_ways_to_say_the_same(tmp_path):
    """Lengths by position, embeddings, masks of numbers; outputs as a tuple, without scores."""
    ours, _ = pair("1.0", tmp_path)
    inputs, valid = inputs_of("right")
    length, decoder_length = (
        inputs[name].sum(1) for name in ("attention_mask", "decoder_attention_mask")
    )
    ids, decoder_ids = inputs["input_ids"], inputs["decoder_input_ids"]
    with torch.no_grad():
        want = ours(**inputs).logits
        by_place = ours(ids.int(), length, decoder_ids.int(), decoder_length)
        assert_close(by_place.logits[valid], want[valid], "lengths, by position")
        embedded = {
            "inputs_embeds": ours.input_embedding(ids),
            "decoder_inputs_embeds": ours.input_embedding(decoder_ids),
            "attention_mask": inputs["attention_mask"].float(),
            "decoder_attention_mask": inputs["decoder_attention_mask"].half(),
        }
        assert_close(ours(**embedded).logits[valid], want[valid], "embeddings")
        plain = ours(**inputs, return_dict=False)
        assert len(plain) == 9 and torch.equal(plain[3], want) and plain[4:] == (None,) * 5
        assert plain[2] is None and ours(**inputs, output_logits=False).logits is None


def test_files_of_model_center_are_a_hundredth(tmp_path):
    """Their T5 1.0, made for fp16, needs `scale`; other than by rounding and eps it computes the
    same.
    """
    ours, model = pair("1.0", tmp_path, layer_norm_epsilon=1e-12)
    weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for name in weights:
        small = name == "input_embedding.weight" or "attention_out" in name
        weights[name] /= 100 if small else 10 if "ffn.ffn" in name else 1
    content = ours.config.to_dict() | {"scale": True}
    del content["scale_logits"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    torch.save(weights, tmp_path / "pytorch_model.pt")
    scaled, (inputs, _) = T5.from_pretrained(tmp_path).eval(), inputs_of("right")
    with torch.no_grad():
        assert_close(scaled(**inputs).logits, model(**inputs).logits, "logits", 1e-4)
    with pytest.raises(ConfigError, match="a hundredth"):
        scaled.save_pretrained(tmp_path / "out")


def test_what_is_refused(tmp_path):
    ours, _ = pair("1.0", tmp_path)
    ids = token_ids(2, 5)
    match = "either {0}_ids or {0}s_embeds: got neither"
    refuse(ours, match.format("input"), decoder_input_ids=ids)
    refuse(ours, match.format("decoder_input"), ids)
    given = {"decoder_input_ids": ids, "attention_mask": torch.ones(2, 4)}
    refuse(ours, "expected 5 keys", ids, **given)
    parity.refuse_configurations("""
T5 scale=True scale_logits=True | scale and scale_logits
T5 model_type=umt5 | umt5
T5 d_modell=3 | 'd_modell'
""")
    for words, match in (("att_bias=True", "att_bias is"), ("tied=False proj_bias=True", "proj")):
        with pytest.raises(ConfigError, match=match):
            T5Config(**parity.values(words)).to_hugging_face()
