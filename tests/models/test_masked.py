"""BERT, RoBERTa and Longformer against their counterparts in transformers."""

import copy

import pytest
import torch
from tests.models import parity
from tests.models.parity import (
    assert_close,
    assert_same_logits,
    logits_of,
    refuse,
    scored,
    token_ids,
)
from tests.models.versions import IS_4, since_5
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from model_center.errors import ConfigError, WeightsError
from model_center.layer.cache import KeyValueCache
from model_center.model import Bert, BertConfig, Longformer, LongformerConfig, Roberta

LENGTH, WINDOW = 19, 6  # no multiple of the window
EVERY = torch.ones(2, LENGTH, dtype=torch.bool)
SIZES = (
    "vocab_size=64 hidden_size=32 num_attention_heads=4 intermediate_size=48 num_hidden_layers=2 "
    "max_position_embeddings=40 type_vocab_size=2"
)
UNTIED = "tie_word_embeddings=False hidden_act=relu layer_norm_eps=1e-3"
FAMILIES = {
    "Bert": f"{SIZES} pad_token_id=0",
    "Roberta": f"{SIZES} pad_token_id=1 layer_norm_eps=1e-5",
    "Longformer": f"{SIZES} pad_token_id=1 layer_norm_eps=1e-5 attention_window={WINDOW}",
}
VARIANTS = [
    *FAMILIES,
    pytest.param(f"Bert {UNTIED}", marks=since_5),  # where the head has two biases
    pytest.param(f"Roberta {UNTIED}", marks=[since_5, pytest.mark.long]),
]
OURS = parity.values(
    "vocab_size=64 dim_model=32 num_heads=4 dim_head=8 dim_ff=48 num_layers=1 half=False"
)
# parts of theirs that the language model's loss does not reach, or that are not used
WITHOUT = {"Bert": ("cls.seq_relationship", "bert.pooler")}
SECOND_BIAS = {"Bert": "cls.predictions.bias", "Roberta": "lm_head.bias"}


def pair(variant, folder):
    """Our model of the weights of a random one of theirs, and that one."""
    name, _, special = variant.partition(" ")
    head = "ForPreTraining" if name == "Bert" else "ForMaskedLM"
    return parity.pair(f"{name}{head} {FAMILIES[name]} {special}", folder)


def inputs_of(variant, side, length=LENGTH, *, chosen=True):
    """Two sequences with token types, padded on this side ("unmasked": without a mask that says
    so); of Longformer with different numbers of `chosen` global tokens. And which are valid.
    """
    place = side.replace("unmasked", "right")
    ids, mask = token_ids(2, length), parity.padding_mask(2, length, place)
    valid = parity.valid_of(mask, ids)
    ids = ids.masked_fill(~valid, 0 if variant.startswith("Bert") else 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    if variant == "Longformer" and chosen:
        inputs["global_attention_mask"] = torch.zeros_like(ids)
        # with padding on the left the first of them is padding, and so none
        inputs["global_attention_mask"][0, [0, 7]] = 1
        inputs["global_attention_mask"][1, [2, 3, length - 1]] = 1
    if side == "unmasked":
        del inputs["attention_mask"]
    return inputs, torch.ones_like(valid) if side == "unmasked" else valid


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_in_transformers(variant, tmp_path):
    """Scores, hidden states, attentions, gradients, files, half precision, a head for classes."""
    ours, model = pair(variant, tmp_path)
    name, _, special = variant.partition(" ")
    second = (SECOND_BIAS[name],) if special else ()
    without = (*WITHOUT.get(name, ()), *second)
    for side in (*parity.SIDES, "unmasked"):
        inputs, valid = inputs_of(variant, side)
        assert_same_logits(ours, model, inputs, valid)
        if side in {"left", "unmasked"}:
            parity.assert_same_gradients(ours, model, inputs, valid, tmp_path, without=without)
        elif name != "Longformer":
            parity.assert_same_extras(ours, model, inputs, valid)
    inputs, valid = inputs_of(variant, "left")
    parity.assert_saved_alike(ours, model, inputs, valid, tmp_path, without=(*without[:1], *second))
    parity.assert_class_head(type(ours), tmp_path / "theirs", inputs, "cls_projection")
    for dtype in (torch.bfloat16, torch.float16):
        parity.assert_trains_in(dtype, ours, inputs, valid)
    assert torch.equal(
        logits_of(scored(copy.deepcopy(ours), inputs)), logits_of(scored(ours, inputs))
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_ways_to_say_the_same(name, tmp_path):
    """What is left out is valid, of type 0, no global token; RoBERTa and Longformer count
    positions from the padding on; lengths are masks, and so are numbers.
    """
    ours, model = pair(name, tmp_path)
    ids = token_ids(2, LENGTH)
    embeds = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(3))
    backwards = {"position_ids": torch.arange(LENGTH).flip(0)[None]}
    for given in ({"input_ids": ids}, {"inputs_embeds": embeds}):
        assert_same_logits(ours, model, given, EVERY)
        assert_same_logits(ours, model, given | backwards, EVERY)
    length = torch.tensor([11, LENGTH])
    mask = torch.arange(LENGTH) < length[:, None]
    with torch.no_grad():
        want = logits_of(scored(ours, {"input_ids": ids, "attention_mask": mask}))
        others = [
            {"input_ids": ids, "length": length},
            {"input_ids": ids.int(), "attention_mask": mask.half()},
        ]
        if name != "Longformer":
            others.append({"input_ids": ids, "attention_mask": mask[:, None].expand(-1, 19, -1)})
        for given in others:
            found = logits_of(scored(ours, given))
            assert_close(found[mask], want[mask], str(given.keys()))
        if name != "Bert":
            padded = torch.cat([torch.full((2, 5), 1), ids], 1)
            inputs = {"input_ids": padded, "attention_mask": padded != 1}
            found = logits_of(scored(ours, inputs))[:, 5:]
            plain = logits_of(scored(ours, {"input_ids": ids}))
            assert_close(found, plain, "left padding")


def test_pooler(tmp_path):
    """Its output, and the gradients of its parameters and of what is below."""
    ours, model = pair("Bert", tmp_path)
    inputs, _ = inputs_of("Bert", "right")
    out = ours(**inputs, output_pooler_output=True).pooler_output
    expected = model.bert(**inputs).pooler_output
    assert_close(out, expected)
    embeddings = model.bert.embeddings.word_embeddings.weight
    for one, leaves in (
        (out, [ours.pooler.dense.weight, ours.input_embedding.weight]),
        (expected, [model.bert.pooler.dense.weight, embeddings]),
    ):
        one.sin().sum().backward(inputs=leaves)
    assert_close(ours.pooler.dense.weight.grad, model.bert.pooler.dense.weight.grad)
    assert_close(ours.input_embedding.weight.grad, embeddings.grad)
    plain = ours(**inputs)
    assert "pooler_output" not in plain and len(plain.to_tuple()) == len(plain.keys()) == 2
    # as the program of ModelCenter's README reads it, without asking
    torch.testing.assert_close(plain.pooler_output, out, rtol=0, atol=0)
    assert plain.pooler_output is plain.pooler_output
    fields = ours(**inputs, output_pooler_output=True, return_dict=False)
    assert [None if x is None else x.shape[1] for x in fields] == [19, 32, None, 19, None, None]
    assert ours(**inputs, return_dict=False)[1] is None
    assert list(ours(**inputs, output_logits=False)) == ["last_hidden_state"]


@pytest.mark.parametrize(
    ("name", "side"),
    [("Bert", "none"), ("Bert", "left"), ("Roberta", "left"), ("Roberta", "right")],
)
def test_cache_with_a_mask_of_pairs(name, side, tmp_path):
    """With a causal mask of pairs, tokens may come one after another; positions of a last one
    follow from the mask of all.
    """
    ours, _ = pair(name, tmp_path)
    inputs, valid = inputs_of(name, side)
    ids, types = inputs["input_ids"], inputs["token_type_ids"]
    pairs = torch.ones(LENGTH, LENGTH).tril() * valid[:, None, :]
    positions = valid.cumsum(1) * valid + 1 if name == "Roberta" else torch.arange(LENGTH)[None]
    of_all = {"attention_mask": pairs, "token_type_ids": types, "position_ids": positions}
    with torch.no_grad():
        whole = ours(ids, attention_mask=pairs, token_type_ids=types).logits
        first = ours(ids[:, :7], attention_mask=pairs[:, :7, :7], token_type_ids=types[:, :7])
        past = KeyValueCache(2)
        pieced = parity.in_pieces(ours, ids, (0, 7, 8, 18), of_all, past=past)
        given = {"attention_mask": inputs["attention_mask"], "token_type_ids": types}
        last = ours(ids[:, 18:], past_key_values=past, **given).logits
    assert_close(first.logits[valid[:, :7]], pieced[:, :7][valid[:, :7]])
    keep = valid & valid[:, -1:]
    assert_close(torch.cat([pieced, last], 1)[keep], whole[keep])


def test_untied_as_transformers_4_writes_it(tmp_path):
    """The bias under one name, that of the head."""
    ours, model = pair("Bert tie_word_embeddings=False", tmp_path)
    head = model.cls.predictions
    with torch.no_grad():
        head.decoder.bias.copy_(head.bias)
    state = {
        name: x.clone() for name, x in model.state_dict().items() if "decoder.bias" not in name
    }
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "theirs" / "pytorch_model.bin")
    ours = Bert.from_pretrained(tmp_path / "theirs", dtype="float32").eval()
    assert_same_logits(ours, model, *inputs_of("Bert", "left"))
    assert IS_4 or head.bias is not head.decoder.bias


@pytest.mark.parametrize("name", ["Roberta", "Longformer"])
def test_a_model_without_head(name, tmp_path):
    """Files of the class without head have no prefix; the pooler is there."""
    ours, model = parity.pair(f"{name}Model {FAMILIES[name]}", tmp_path)
    inputs, valid = inputs_of(name, "right")
    with torch.no_grad():
        out, expected = ours(**inputs, output_pooler_output=True), model(**inputs)
    hidden = expected.last_hidden_state[:, :LENGTH]
    assert_close(out.last_hidden_state[valid], hidden[valid])
    assert_close(out.pooler_output, expected.pooler_output)


def all_pairs(local, of_global, chosen):
    """Probabilities (batch, heads, seq, seq) from those of the global keys and the window, and from
    those of global queries; `chosen` are the global tokens, bool (batch, seq).
    """
    batch, heads, length = local.shape[:3]
    dense = torch.zeros(batch, heads, length, length)
    most = int(chosen.sum(1).max())
    for row in range(batch):
        places = chosen[row].nonzero()[:, 0].tolist()
        for query in range(length):
            for number, key in enumerate(places):
                dense[row, :, query, key] += local[row, :, query, number]
            for number in range(WINDOW + 1):
                key = query + number - WINDOW // 2
                if 0 <= key < length:
                    dense[row, :, query, key] += local[row, :, query, most + number]
        for number, place in enumerate(places):
            assert of_global is not None
            dense[row, :, place] = of_global[row, :, :length, number]
    return dense


@pytest.mark.long
@pytest.mark.parametrize(("side", "chosen"), [("left", True), ("right", False), ("none", True)])
def test_windows_of_longformer(side, chosen, tmp_path):
    """Texts of any length, those that are shorter than the window too; hidden states, and
    attentions of all pairs of tokens, into which theirs are put.
    """
    ours, model = pair("Longformer", tmp_path)
    for length in (19, 8, 3 * WINDOW):
        inputs, _ = inputs_of("Longformer", side, length, chosen=chosen)
        assert_same_logits(ours, model, inputs, EVERY[:, :length])
    for length in (1, 2, 4):
        inputs, _ = inputs_of("Longformer", "none", length, chosen=False)
        assert_same_logits(ours, model, inputs, EVERY[:, :length])
    inputs, valid = inputs_of("Longformer", side, chosen=chosen)
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        plain, found = ours(**inputs, return_logits=True), ours(**inputs, **wanted)
        expected = model(**inputs, **wanted)
        scores = ours(**inputs, **wanted, output_logits=True).logits
    assert_close(scores[valid], plain[valid])
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert_close(one[valid], other[valid])
    tokens = inputs.get("global_attention_mask", torch.zeros(2, LENGTH)).bool() & valid
    for layer, probabilities in enumerate(found.attentions):
        of_global = expected.global_attentions[layer] if chosen else None
        dense = all_pairs(expected.attentions[layer], of_global, tokens)
        assert_close(probabilities.transpose(1, 2)[valid], dense.transpose(1, 2)[valid])


def test_outputs_of_longformer(tmp_path):
    """No scores unless requested."""
    ours, _ = pair("Longformer", tmp_path)
    inputs, _ = inputs_of("Longformer", "right", chosen=False)
    assert list(ours(**inputs)) == ["last_hidden_state", "pooler_output"]
    assert list(ours(**inputs, output_pooler_output=False)) == ["last_hidden_state"]
    last, pooled, *others = ours(**inputs, return_dict=False)
    assert last.shape == (2, LENGTH, 32) and pooled.shape == (2, 32) and others == [None] * 4


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest of all tensors that operations make has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor) and made.untyped_storage().nbytes() > 0:
                self.numel = max(self.numel, made.numel())
        return out


@pytest.mark.long
def test_memory_grows_with_the_length_not_its_square():
    """Forward and backward with global tokens: twice the tokens, twice the largest tensor."""
    config = LongformerConfig(**OURS, dropout_p=0.0, attention_window=8, position_size=2060)
    model, largest = Longformer(config), []
    for length in (1024, 2048):
        ids = token_ids(1, length)
        chosen = torch.zeros_like(ids)
        chosen[:, :2] = 1
        with Largest() as watch:
            model(ids, global_attention_mask=chosen).last_hidden_state.sum().backward()
        largest.append(watch.numel)
    assert largest[1] == 2 * largest[0] < 2048 * 2048 / 4


def test_what_is_refused(tmp_path):
    bert, roberta, longformer = (pair(name, tmp_path / name)[0] for name in FAMILIES)
    ids = token_ids(2, 12)
    assert roberta(token_ids(1, 38)).logits.shape == (1, 38, 64)  # positions 2 to 39
    refuse(bert, "sequence has 41 tokens.*40", token_ids(1, 41))
    refuse(bert, "neither")
    refuse(bert, r"input_ids has shape \(12,\)", ids[0])
    refuse(bert, "expected 12 keys", ids, attention_mask=torch.ones(2, 11))
    refuse(bert, "from 3 to 64", torch.tensor([[3, 64]]))
    refuse(bert, "ids of torch.float32", ids.float())
    for model in (roberta, longformer):
        refuse(model, "39 tokens.*38 at most", token_ids(1, 39))
    for mask in ("global_attention_mask", "attention_mask"):
        refuse(longformer, f"^{mask} has shape", ids, **{mask: torch.ones(2, 12, 12)})
    for more in ("output_attentions", "output_hidden_states"):
        given = {"return_logits": True, more: True}
        refuse(longformer, "return_logits.*output_logits=True", ids, **given)
    parity.refuse_configurations(f"""
Bert dim_modl=3 | 'dim_modl' .nearest: 'dim_model'
Bert model_type=bert {SIZES} position_embedding_type=relative_key | 'absolute' are supported
Bert model_type=bert {SIZES} is_decoder=True | only encoders
Longformer window=4 | 'window'
Longformer model_type=longformer {SIZES} attention_window=[4,6] | is .4, 6.
""")
    with pytest.raises(ConfigError, match="attention_window is 5"):
        Longformer(LongformerConfig(**OURS, attention_window=5))
    with pytest.raises(ConfigError, match=r"got BertConfig: expected RobertaConfig"):
        Roberta(BertConfig(num_layers=1))
    with pytest.raises(ConfigError, match=r"dim_model is 32, there it is 24.*model_center"):
        Bert(BertConfig(**OURS | {"dim_head": 6})).save_pretrained(tmp_path / "odd")
    assert not (tmp_path / "odd").exists() and not bmt.is_initialized()
    with pytest.raises(WeightsError, match="vocab_size=64"):
        Bert.from_pretrained(tmp_path / "Bert" / "theirs", vocab_size=65)
