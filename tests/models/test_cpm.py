"""CPM-1, CPM-2 and CPM-3 against a plain reference: context, spans, segments, prompts, relative
positions, and files of ModelCenter.
"""

import copy
from typing import Any

import pytest
import torch
from tests.models import parity, reference
from tests.models.parity import assert_close, in_pieces, refuse
from tests.models.test_layers_positions import buckets

from model_center import model as models
from model_center.errors import ConfigError
from model_center.model import CPM3, CPM3Config

VOCAB, DIM, HEADS, HEAD, WIDE, BUCKETS, FAR, LENGTH, PROMPT, SEGMENTS = (
    50,
    24,
    3,
    5,
    20,
    8,
    13,
    10,
    3,
    4,
)
SIZES: dict[str, Any] = parity.values(
    f"vocab_size={VOCAB} dim_model={DIM} num_heads={HEADS} dim_head={HEAD} dim_ff={WIDE} "
    f"position_bias_num_buckets={BUCKETS} position_bias_max_distance={FAR} half=False"
)
PROMPTS = {"prompt_types": 2, "prompt_length": PROMPT, "segment_types": SEGMENTS}
DEPTHS: dict[str, dict[str, Any]] = {
    "CPM1": {"num_layers": 2},
    "CPM2": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "CPM3": {"num_layers": 2, **PROMPTS},
}
SCALED = "length_scale=True attn_scale=True tied=True"  # as the large models
UNSCALED = "length_scale=False attn_scale=False tied=False"

TYPES = torch.tensor([[0] * 3 + [2] * 3 + [1] * 4, [0] * 3 + [3] * 5 + [2] * 2])
MASK = torch.tensor([[1] * 10, [1] * 7 + [0] * 3])
CONTEXT = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0, 0, 0, 0]])
SPAN = torch.tensor([[0] * 6 + [1] * 4, [2] * 10])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [5, 3, 0, 17, 2, 2, 30, 1, 0, 9]])
CASES = {
    "plain": {},
    "length": {"length": MASK.sum(1)},
    "left padding": {"attention_mask": MASK.flip(1)},
    "context": {"context": CONTEXT.bool(), "length": MASK.sum(1)},
    "span": {"span": SPAN},
    "segments": {"token_type_ids": TYPES, "context": CONTEXT},
    "all": {
        "token_type_ids": TYPES,
        "context": CONTEXT,
        "span": SPAN,
        "attention_mask": MASK,
        "position_ids": POSITIONS,
    },
}
EVERY = torch.ones(2, LENGTH).bool()


def made(folder, name, special=""):
    """The model of a folder that is written by hand, and the weights in it."""
    shapes: reference.Shapes = {"input_embedding.weight": (VOCAB, DIM)}
    stacks = ("encoder", "decoder") if name == "CPM2" else ("encoder",)
    for kind in stacks:
        for layer in range(2):
            shapes |= reference.layer_shapes(
                f"{kind}.layers.{layer}.", DIM, HEADS * HEAD, WIDE, kind
            )
        shapes[f"{kind}.output_layernorm.weight"] = (DIM,)
        ending = f"_{kind[:3]}" if name == "CPM2" else ""
        rows = SEGMENTS**2 * (name == "CPM3") + BUCKETS
        shapes[f"position_bias{ending}.relative_attention_bias"] = (rows, HEADS)
    if name == "CPM3":
        shapes["prompt_embedding.weight"] = (2 * PROMPT, DIM)
    options = parity.values(special)
    if not options.get("tied", name == "CPM3"):
        shapes["output_projection.weight"] = (VOCAB, DIM)
    # What is divided by its length is drawn so much larger.
    std = 0.9 if options.get("length_scale", name == "CPM3") else 0.15
    config = {**SIZES, **DEPTHS[name], **options}
    weights = reference.write_files(folder, shapes, config, std)
    return vars(models)[name].from_pretrained(folder).eval(), weights


def ids_of(length=LENGTH, seed=1):
    """The second and the first prompt of CPM-3, and texts behind them."""
    ids = parity.token_ids(2, length, high=VOCAB, seed=seed)
    ids[:, :PROMPT] = torch.tensor([[3, 4, 5], [0, 1, 2]])
    return ids


def expected_scores(model, weights, case):
    """Of CPM-1 and CPM-3."""
    config, table = model.config, weights["position_bias.relative_attention_bias"]
    plain = reference.Reference(weights, HEADS, config.length_scale, config.attn_scale)
    mask, context, span = (case.get(name) for name in ("attention_mask", "context", "span"))
    mask = MASK if "length" in case else mask
    positions = case.get("position_ids", torch.arange(LENGTH).expand(2, -1))
    types = case.get("token_type_ids", torch.zeros(2, LENGTH, dtype=torch.long))

    rows = buckets(positions[:, None] - positions[:, :, None], BUCKETS, FAR)
    if isinstance(model, CPM3):
        one, other = types[:, :, None], types[:, None]
        is_near = (one == other) & torch.tensor(config.absolute_inner_segment)
        rows = rows.where(is_near, BUCKETS + one * SEGMENTS + other)
    tables, size = [weights["input_embedding.weight"]], 0
    if isinstance(model, CPM3):
        tables, size = [weights["prompt_embedding.weight"], *tables], PROMPT
    ids = ids_of()
    parts = [ids[:, :size], ids[:, size:]] if size else [ids]
    x = torch.cat([rows_of[part] for rows_of, part in zip(tables, parts, strict=True)], 1)
    x = x / DIM**0.5 if config.length_scale else x
    bias = table[rows].permute(0, 3, 1, 2)
    seen = reference.prefix_seen(LENGTH, mask, context, span)
    out = plain.stack(x, "encoder", seen, bias)
    return plain.linear(out, "input_embedding" if config.tied else "output_projection")


def valid_of(case):
    return MASK.bool() if "length" in case else case.get("attention_mask", EVERY).bool()


@pytest.mark.parametrize(
    ("name", "special", "cases"),
    [
        ("CPM1", "", "plain|context|span|all"),
        ("CPM1", SCALED, "length|left padding|all"),
        ("CPM3", "", "plain|segments|all"),
        ("CPM3", UNSCALED, "context|all"),
        ("CPM3", "absolute_inner_segment=False", "left padding|segments"),
    ],
)
def test_values_and_gradients(name, special, cases, tmp_path):
    model, weights = made(tmp_path, name, special)
    for case in (CASES[word] for word in cases.split("|")):
        for weight in weights.values():
            weight.grad = None
        scores = model(ids_of().int(), **case).logits
        expected = expected_scores(model, weights, case)
        reference.assert_same_answers(model, weights, scores, expected, valid_of(case))


@pytest.mark.parametrize("special", ["", SCALED, "length_scale=True"])
def test_values_and_gradients_of_cpm2(special, tmp_path):
    """Its embedding is not scaled, and neither is a head that is the embedding."""
    model, weights = made(tmp_path, "CPM2", special)
    config, target = model.config, 6
    plain = reference.Reference(weights, HEADS, config.length_scale, config.attn_scale)
    ids, decoder_ids = ids_of().int(), ids_of(target, 5).int()
    length, decoder_length = MASK.sum(1), torch.tensor([4, 6])

    def bias(name, size):
        places = torch.arange(size)
        rows = buckets(places - places[:, None], BUCKETS, FAR, both=name == "enc")
        table = weights[f"position_bias_{name}.relative_attention_bias"]
        return table[rows].permute(2, 0, 1)[None]

    embedding, seen = weights["input_embedding.weight"], MASK.bool()[:, None]
    states = plain.stack(
        embedding[ids.long()], "encoder", seen.expand(-1, LENGTH, -1), bias("enc", LENGTH)
    )
    out = plain.stack(
        embedding[decoder_ids.long()],
        "decoder",
        reference.prefix_seen(target),
        bias("dec", target),
        states,
        seen.expand(-1, target, -1),
    )
    expected = out @ embedding.T if config.tied else plain.linear(out, "output_projection")
    scores = model(ids, length, decoder_ids, decoder_length).logits
    valid = torch.arange(target) < decoder_length[:, None]
    reference.assert_same_answers(model, weights, scores, expected, valid)
    with torch.no_grad():
        states = model.encode(ids, length=length).last_hidden_state
    name, given = "decoder_input_ids", {"length": length, "encoder_outputs": states}
    pieced = in_pieces(model, decoder_ids, (0, 3, 5, 6), {}, name=name, **given)
    assert_close(pieced[valid], scores[valid], "with a cache")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("CPM1", case) for case in ("left padding", "context", "span")),
        ("CPM1", "plain"),
        ("CPM3", "plain"),
        ("CPM3", "all"),
    ],
)
def test_cache(name, case, tmp_path):
    """Generated tokens are preceded by a whole context: it is in the first piece."""
    model, _ = made(tmp_path, name)
    given, valid = dict(CASES[case]), valid_of(CASES[case])
    given.pop("length", None)
    if "context" in given:
        given["context"] = given["context"] * (torch.arange(LENGTH) < 5)
    with torch.no_grad():
        whole = model(ids_of(), **given).logits
    pieced = in_pieces(model, ids_of(), (0, 5, 7, 8, 9, 10), given)
    assert_close(pieced[valid], whole[valid], "with a cache")


@pytest.mark.parametrize("name", ["CPM1", "CPM2", "CPM3"])
def test_surface(name, tmp_path):
    """Files, copies, outputs, half precision, embeddings, masks of pairs, arguments by position, a
    head for classes.
    """
    model, _ = made(tmp_path / "folder", name)
    parity.assert_same_parameters(copy.deepcopy(model), model)
    parity.assert_own_format(model, tmp_path)
    with pytest.raises(ConfigError, match="no counterpart in Hugging Face"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ids = ids_of()
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "CPM2" else {})
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(dtype, model, inputs, EVERY)
    of_classes = type(model)(type(model.config)(**SIZES, **DEPTHS[name], cls_head=4)).eval()
    out = of_classes(**inputs)
    assert_close(out.logits, of_classes.cls_projection(out.last_hidden_state))
    assert out.logits.shape == (2, LENGTH, 4)
    if name != "CPM2":
        given = {"length": MASK.sum(1), "position_ids": POSITIONS, "context": CONTEXT, "span": SPAN}
        by_place = model(ids, given["length"], None, None, POSITIONS, CONTEXT, SPAN).logits
        assert torch.equal(by_place, model(ids, **given).logits)
        out = model(ids, output_hidden_states=True, output_attentions=True)
        assert out.hidden_states[-1] is out.last_hidden_state and len(out.hidden_states) == 3
        assert_close(torch.stack(out.attentions).sum(-1), torch.ones(2, 2, HEADS, LENGTH))
        embeds = model.input_embedding(ids)
        if name == "CPM3":
            prompt = model.prompt_embedding(ids[:, :PROMPT])
            embeds = torch.cat([prompt, embeds[:, PROMPT:]], 1)
        assert_close(model(inputs_embeds=embeds).logits, out.logits, "embeddings")
        pairs = torch.ones(2, LENGTH, LENGTH).tril()
        assert_close(model(ids, attention_mask=pairs).logits, out.logits, "pairs")


def test_all_buckets_learn(tmp_path):
    model, _ = made(tmp_path, "CPM1")
    model(ids_of(30), context=torch.ones(2, 30)).logits.square().sum().backward()
    table = model.position_bias.relative_attention_bias.grad
    # that row is for keys 0 tokens after the query
    assert table.any(-1).tolist() == [row != BUCKETS // 2 for row in range(BUCKETS)]


def test_a_configuration_file(tmp_path):
    """The class knows its configuration, with the catalogue's defaults."""
    CPM3Config(**SIZES, **DEPTHS["CPM3"]).to_json_file(tmp_path / "config.json")
    model = CPM3.from_json_file(tmp_path / "config.json", dropout_p=0.25)
    assert model.config.tied and model.config.length_scale and model.config.attn_scale
    assert model.config.dropout_p == 0.25
    assert model(ids_of()).logits.shape == (2, LENGTH, VOCAB)


def test_what_is_refused(tmp_path):
    one, two, three = (made(tmp_path / name, name)[0] for name in DEPTHS)
    ids, wrong = ids_of(), torch.ones(2, 3)
    past = one(ids, use_cache=True).past_key_values
    for name in ("position_ids", "context", "span"):
        refuse(one, f"{name} has shape .2, 3.: .*batch, 10.", ids, **{name: wrong})
    refuse(one, "span has shape .10,.: expected", ids, span=torch.ones(10))
    match = "position_ids has shape .2, 1.: expected .batch, 11."
    refuse(one, match, ids[:, :1], past_key_values=past, position_ids=wrong[:, :1])
    refuse(two, "decoder_input_ids or decoder_inputs_embeds: got neither", ids)
    refuse(two, "rows got ids", ids + 100, decoder_input_ids=ids)
    refuse(three, "expected 3 ids of the prompt first", ids[:, :2])
    refuse(three, "6 rows got ids", ids + 6)
    match = "segments of 4 rows got ids from 0 to 7"
    refuse(three, match, ids, token_type_ids=TYPES * 7 // 3)
    refuse(three, "token_type_ids has shape", ids, token_type_ids=TYPES[:, :4])
    assert three(ids[:, :PROMPT]).logits.shape == (2, PROMPT, VOCAB)
    parity.refuse_configurations("""
CPM1 position_size=3 | 'position_size'
CPM2 scale=True | 'scale'
CPM3 max_exact_rate=0.5 | max_exact_rate=0.5
CPM3 max_distance_rate=0.5 | max_distance_rate=0.5
""")
