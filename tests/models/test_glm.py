"""GLM against a plain reference: positions found token by token, explicit softmax."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from tests.models import parity, reference
from tests.models.parity import (
    SIDES,
    assert_close,
    padding_mask,
    refuse,
    refuse_configurations,
    token_ids,
    valid_of,
)

from model_center.errors import ConfigError, InputError
from model_center.generation.engine import generate
from model_center.model import GLM, GLMConfig
from model_center.model.registry import model_class

VOCAB, DIM, HEADS, FF, POSITIONS, LENGTH = 64, 16, 2, 24, 20, 14
START, MASK = 60, 62
# as a config.json of ModelCenter has it
CONFIG = parity.values(
    f"vocab_size={VOCAB} dim_model={DIM} num_heads={HEADS} dim_head={DIM // HEADS} dim_ff={FF} "
    f"num_layers=2 position_size={POSITIONS} sop_tok_id={START} eop_tok_id=61 mask_tok_id={MASK} "
    "dropout_p=0.0 half=False"
)


def made(folder):
    """The model of a folder that is written by hand, and the weights in it."""
    shapes = {
        f"{name}_embedding.weight": (rows, DIM)
        for name, rows in (("input", VOCAB), ("position", POSITIONS), ("block_position", POSITIONS))
    }
    for layer in range(2):
        shapes |= reference.layer_shapes(f"encoder.layers.{layer}.", DIM, DIM, FF, "biased")
    shapes |= reference.tensors_of({"encoder.output_layernorm": (DIM,)}, biased=True)
    weights = reference.write_files(folder, shapes, CONFIG, 0.2)
    return GLM.from_pretrained(folder).eval(), weights


def places_of(ids, sep, valid):
    """Positions and block positions of one row, by walking along it."""
    counted, count = [], 0
    for is_valid in valid:
        count += is_valid
        counted.append(max(count - 1, 0))
    blanks = [counted[place] for place in range(sep) if ids[place] == MASK]
    places, inner, span, begin = [], [], -1, sep
    for place, token in enumerate(ids):
        if place < sep:
            places.append(counted[place])
            inner.append(0)
            continue
        if token == START:
            span, begin = span + 1, place
        places.append(blanks[max(span, 0)] if blanks else counted[max(sep - 1, 0)])
        inner.append(place - begin + 1)
    return places, inner


def expected_scores(weights, ids, sep=None, mask=None):
    """Scores (batch, seq, vocab) of the model."""
    rows = ids.tolist()
    ends = sep or [row.index(START) if START in row else len(row) for row in rows]
    valid = valid_of(mask, ids)
    found = [
        places_of(row, end, there.tolist())
        for row, end, there in zip(rows, ends, valid, strict=True)
    ]
    x = weights["input_embedding.weight"][ids]
    for name, number in (("position", 0), ("block_position", 1)):
        x = x + weights[f"{name}_embedding.weight"][torch.tensor([row[number] for row in found])]
    length = ids.shape[1]
    seen = torch.ones(length, length).tril().bool() | (
        torch.arange(length) < torch.tensor(ends)[:, None, None]
    )
    out = reference.Reference(weights, HEADS).stack(x, "encoder", seen & valid[:, None])
    return out @ weights["input_embedding.weight"].T


def two_spans():
    """Two rows: two spans for two blanks, and one span for one of two."""
    ids = token_ids(2, LENGTH, high=50)
    ids[0, [2, 5]], ids[0, [8, 11]] = MASK, START
    ids[1, [0, 4]], ids[1, 6] = MASK, START
    return ids


@pytest.mark.parametrize("side", SIDES)
def test_values_and_gradients(side, tmp_path):
    """Scores and hidden states too; with spans, without any, without blanks."""
    model, weights = made(tmp_path)
    ids, mask = two_spans(), padding_mask(2, LENGTH, side, 2)
    valid = valid_of(mask, ids)
    scores, expected = model(ids, attention_mask=mask), expected_scores(weights, ids, mask=mask)
    reference.assert_same_answers(model, weights, scores, expected, valid)
    assert weights["block_position_embedding.weight"].grad[3].any()
    wanted = {"output_hidden_states": True, "output_attentions": True, "return_dict": True}
    with torch.no_grad():
        out = model(ids, attention_mask=mask, **wanted)
        assert_close(out.logits[valid], scores[valid])
        assert out.hidden_states[-1] is out.last_hidden_state and len(out.hidden_states) == 3
        assert_close(out.attentions[1].sum(-1), torch.ones(2, HEADS, LENGTH))
        assert not out.attentions[0][0, :, 8, 9:].any() and out.attentions[0][1, :, 3, 5].all()
        ids = token_ids(2, 9, high=50)
        assert_close(model(ids), expected_scores(weights, ids), "all is context")
        ids[:, 5] = START
        assert_close(model(ids), expected_scores(weights, ids), "no blanks")


def test_given_positions(tmp_path):
    """Those found are those of the paper's figure 2: each span is at its blank. Given ones replace
    them, and `sep` moves the border of the context; lengths and embeddings say the same.
    """
    model, weights = made(tmp_path)
    ids = torch.tensor([[4, 5, MASK, 7, MASK, START, 6, START, 8, 9]])
    places, inner = model.places(ids, None, model.context_length(ids))
    assert places.tolist() == [[0, 1, 2, 3, 4, 2, 2, 4, 4, 4]]
    assert inner.tolist() == [[0, 0, 0, 0, 0, 1, 2, 1, 2, 3]]
    ids = two_spans()
    sep = model.context_length(ids)
    assert sep.tolist() == [8, 6]
    with torch.no_grad():
        expected = model(ids)
        places, inner = model.places(ids, None, sep)
        assert torch.equal(model(ids, places, inner, sep), expected)
        assert torch.equal(model(ids.int(), places), expected)
        assert torch.equal(model(ids, block_position_ids=inner), expected)
        moved = model(ids, sep=torch.tensor([6, 6]))
        assert_close(moved, expected_scores(weights, ids, [6, 6]))
        assert not torch.allclose(model(ids, places.flip(1), inner), expected)
        assert not torch.allclose(model(ids, places, inner.flip(1)), expected)
        mask = torch.arange(LENGTH) < torch.tensor([[12], [14]])
        expected = model(ids, attention_mask=mask)
        assert_close(model(ids, length=mask.sum(1))[mask], expected[mask])
        given = {"inputs_embeds": model.input_embedding(ids), "attention_mask": mask}
        places, inner = model.places(ids, mask, sep)
        assert_close(model(None, places, inner, sep, **given), expected)
        pairs = torch.ones(2, LENGTH, LENGTH).tril()
        alone = model(ids, places, inner, torch.zeros_like(sep))
        assert_close(model(ids, places, inner, attention_mask=pairs), alone)


@pytest.mark.parametrize("side", SIDES[:2])
def test_a_cache_gives_what_one_pass_gives(side, tmp_path):
    """The context and the first start token, then some tokens, then one by one, a new span among
    them.
    """
    model, _ = made(tmp_path)
    ids = two_spans()
    ids[1, [8, 11]], ids[1, 6] = START, 3
    mask = padding_mask(2, LENGTH, side, 2)
    valid, sep = valid_of(mask, ids), model.context_length(ids)
    places, inner = model.places(ids, mask, sep)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask)
        of_all = {"position_ids": places, "block_position_ids": inner, "attention_mask": mask}
        for given in ({}, {"sep": sep}):
            more = {"return_dict": True, **given}
            pieced = parity.in_pieces(model, ids, (0, 9, 11, 12, 13, 14), of_all, **more)
            assert_close(pieced[valid], whole[valid])


THEIRS = """
word_embeddings.weight input_embedding.weight
transformer.position_embeddings.weight position_embedding.weight
transformer.block_position_embeddings.weight block_position_embedding.weight
transformer.final_layernorm.KIND encoder.output_layernorm.KIND
transformer.layers.L.attention.dense.KIND encoder.layers.L.self_att.self_attention.attention_out.KIND
transformer.layers.L.input_layernorm.KIND encoder.layers.L.self_att.layernorm_before_attention.KIND
transformer.layers.L.post_attention_layernorm.KIND encoder.layers.L.ffn.layernorm_before_ffn.KIND
transformer.layers.L.mlp.dense_h_to_4h.KIND encoder.layers.L.ffn.ffn.w_in.w.KIND
transformer.layers.L.mlp.dense_4h_to_h.KIND encoder.layers.L.ffn.ffn.w_out.KIND
transformer.layers.L.attention.query_key_value.KIND encoder.layers.L.self_att.self_attention.project_KIND
"""


def published(ours, prefix):
    """Tensors under the names of THUDM's repositories, where query, key and value are one."""
    out = {}
    for kind in ("weight", "bias"):
        for layer in ("0", "1"):
            words = THEIRS.replace("KIND", kind).replace(".L.", f".{layer}.").split()
            for theirs, own in zip(words[::2], words[1::2], strict=True):
                head, packed, end = own.partition("project_")
                names = [f"{head}{packed}{x}.{end}" for x in "qkv"] if packed else [own]
                out[prefix + theirs] = torch.cat([ours[name] for name in names])
    return out


@pytest.mark.parametrize("prefix", ["", "glm."])
def test_files(prefix, tmp_path):
    """Our folders; those of THUDM, with tanh GELU, with and without a prefix."""
    model, weights = made(tmp_path / "made")
    parity.assert_own_format(model, tmp_path)
    with pytest.raises(ConfigError, match=r"format='model_center'"):
        model.save_pretrained(tmp_path / "hf")
    words = (
        f"GLM model_type=glm hidden_size={DIM} num_attention_heads={HEADS} num_layers=2 "
        f"vocab_size={VOCAB} max_sequence_length={POSITIONS - 1} block_position_encoding=True "
        "relative_encoding=False spell_length=None output_dropout_prob=0.0"
    )
    content = parity.values(words.removeprefix("GLM "))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(content))
    wide = {name: value.detach().float() for name, value in weights.items()}
    for name in [name for name in wide if ".ffn.ffn.w_" in name]:
        shape = [4 * DIM if size == FF else size for size in wide[name].shape]
        wide[name] = torch.randn(shape)
    save_file(published(wide, prefix), tmp_path / "theirs" / "model.safetensors")
    read = GLM.from_pretrained(tmp_path / "theirs", dtype="float32")
    assert model_class(content) is GLM and read.config.dropout_p == 0.0
    assert (read.config.ffn_activate_fn, read.config.position_size) == ("gelu_new", POSITIONS)
    for name, param in read.named_parameters():
        assert torch.equal(param, wide[name]), name
    lines = [
        f"{words} {change} | another GLM"
        for change in ("block_position_encoding=False", "relative_encoding=True", "spell_length=3")
    ]
    refuse_configurations("\n".join(lines))


def test_half_precision_generation_and_a_head_for_classes(tmp_path):
    """The head for classes is called `output_projection` in GLM."""
    model, _ = made(tmp_path)
    ids = two_spans()
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(dtype, model, {"input_ids": ids}, torch.ones_like(ids).bool())
    assert torch.equal(copy.deepcopy(model)(ids), model(ids))
    parity.assert_class_head(GLM, tmp_path, {"input_ids": ids}, "output_projection")
    of_classes = GLM(GLMConfig(**CONFIG, cls_head=3))
    for kind, given, inputs, match in (
        (of_classes, ids, {}, "classes"),
        (model, torch.tensor([[4, MASK, START], [4, MASK, 5]]), {}, "give it to all or none"),
        (model, ids, {"sep": torch.tensor([1])}, "does not take the inputs sep"),
    ):
        with pytest.raises(InputError, match=match):
            generate(kind, given, inputs=inputs, max_new_tokens=2)
    row = [7, 8, MASK, START]
    with torch.no_grad():
        for _ in range(6):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    found = generate(model, torch.tensor([row[:3]]), max_new_tokens=6, eos_token_id=())
    assert found.sequences.tolist() == [row]


def test_what_is_refused(tmp_path):
    model, _ = made(tmp_path)
    ids = two_spans()
    expected = model(ids)
    past = model(ids[:, :9], use_cache=True, return_dict=True).past_key_values
    refuse(model, "from 0 to 20", token_ids(1, 21, high=50))
    spans = torch.tensor([[4, MASK, 5, START, 6, START]])
    refuse(model, "row 0 has 2 spans and 1", spans)
    for name in ("use_cache", "output_attentions", "output_hidden_states", "output_logits"):
        refuse(model, "give return_dict=True", ids, **{name: name != "output_logits"})
    match = "position_ids and block_position_ids of all tokens"
    refuse(model, match, ids[:, 9:], past_key_values=past)
    refuse(model, match, inputs_embeds=torch.zeros(2, 3, DIM))
    refuse(model, "expected 14 keys", ids, attention_mask=torch.ones(2, 13))
    assert torch.equal(model(ids), expected)
    refuse_configurations("GLM sop_token_id=3 | 'sop_token_id' .nearest: 'sop_tok_id'")
