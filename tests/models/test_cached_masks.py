"""The cache with masks of all pairs, which describe the whole sequence or the new queries alone,
and with gradients.
"""

import pytest
import torch
from tests.models import parity, small
from tests.models.test_model_center_calls import IDS

from model_center.errors import InputError

NAMES = ["Bert", "GPT2", "Llama", "CPM1", "CPM3", "T5", "CPM2"]
PARTS = ((0, 4), (4, 5), (5, 6), (6, 8))
GROUPED = {"num_heads_kv": 1}


def caller(name):
    """A call of a model with tokens of the decoder from one place to another."""
    model = small.model(name, **(GROUPED if name == "Llama" else {}))
    start = "decoder_" if name in ("T5", "CPM2") else ""

    def call(begin, end, past=None, mask=None):
        given = {"input_ids": IDS, f"{start}input_ids": IDS[:, begin:end]}
        given |= {} if mask is None else {f"{start}attention_mask": mask}
        return model(**given, use_cache=True, past_key_values=past)

    return call


@pytest.mark.parametrize("name", NAMES)
def test_in_parts_as_at_once(name):
    """Causal, but one row has a token that only it sees itself."""
    call, seen = caller(name), torch.ones(2, 8, 8).tril()
    seen[1, 3:, 2] = 0
    with torch.no_grad():
        whole = call(0, 8, mask=seen).logits
        for of_new in (False, True):
            found, past = [], None
            for begin, end in PARTS:
                out = call(begin, end, past, seen[:, begin if of_new else 0 : end, :end])
                past = out.past_key_values
                found.append(out.logits)
            parity.assert_close(torch.cat(found, 1), whole, "in parts")
        causal = call(0, 8, mask=torch.ones(2, 8, 8).tril()).logits
    assert torch.equal(causal[0], whole[0]) and not torch.equal(causal[1], whole[1])


def test_a_mask_of_pairs_of_the_encoder_is_none_of_the_decoder():
    model, pairs, part = small.model("T5"), torch.ones(2, 8, 8).tril(), IDS[:, :3]
    with pytest.raises(
        InputError, match=r"shape \(2, 8, 8\): expected \(batch, keys\).*encode\(\)"
    ):
        model(IDS, decoder_input_ids=part, attention_mask=pairs)
    states = model.encode(IDS, attention_mask=pairs).last_hidden_state
    short = model.encode(IDS[:, :5], attention_mask=pairs[:, :5, :5]).last_hidden_state
    parity.assert_close(states[:, :5], short, "what the mask hides is not seen")
    given = {"encoder_outputs": states, "decoder_input_ids": part}
    found = model(**given, attention_mask=torch.ones(2, 3, 8)).logits
    parity.assert_close(found, model(**given).logits)


@pytest.mark.parametrize("trained", ["project_q", "project_k", "project_v", "prompt"])
def test_gradients_through_a_cache_that_grows(trained):
    """Of one weight of the first layer, or of a prompt, alone: what is behind it in the cache may
    be without gradient.
    """
    model = small.model("Llama", **GROUPED).requires_grad_(False)
    leaf = prompt = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    if trained != "prompt":
        leaf = getattr(model.encoder.layers[0].self_att.self_attention, trained).weight
    leaf.requires_grad_()
    out = model(inputs_embeds=prompt, use_cache=True)
    found = [out.logits]
    for begin, end in PARTS:
        out = model(IDS[:, begin:end], use_cache=True, past_key_values=out.past_key_values)
        found.append(out.logits)
    joined = torch.cat(found, 1)
    whole = model(inputs_embeds=torch.cat([prompt, model.input_embedding(IDS)], 1)).logits
    parity.assert_close(joined, whole, "scores")
    (grad,), (expected,) = (torch.autograd.grad(x.square().mean(), leaf) for x in (joined, whole))
    assert expected.abs().max() > 1e-3
    parity.assert_close(grad, expected, "gradient")


def assert_unchanged(pairs, copies):
    for pair, copy in zip(pairs, copies, strict=True):
        assert all(map(torch.equal, pair, copy))


@pytest.mark.parametrize("name", NAMES)
def test_calls_change_no_cache(name):
    """Two calls with one cache give the same, also when it is a tuple, or an item of it is
    replaced.
    """
    call = caller(name)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            past = call(0, 4).past_key_values
            assert isinstance(past, list) and {type(pair) for pair in past} == {tuple}
            kept = [(keys.clone(), values.clone()) for keys, values in past]
            one, other = call(4, 6, past), call(4, 6, tuple(past))
            call(4, 5, one.past_key_values)
            assert torch.equal(one.logits, other.logits)
            past[1] = (past[1][0].clone(), past[1][1].clone())
            assert torch.equal(call(4, 6, [list(pair) for pair in past]).logits, one.logits)
            past[0] = (past[0][0] + 1, past[0][1] - 1)
            assert not torch.equal(call(4, 6, past).logits, one.logits)
            if name != "Bert":  # whose first tokens see the last
                parity.assert_close(one.logits, call(0, 6).logits[:, 4:])
        assert_unchanged(past[1:], kept[1:])
        assert one.past_key_values[0][0].shape[2] == 6
        assert torch.equal(one.past_key_values[1][1], other.past_key_values[1][1])


def test_caches_that_are_none():
    model, ones = small.model("GPT2"), torch.ones(3, 2, 4, 8)
    expected = model(IDS).logits
    pair, other = (ones[:2, :, :3],) * 2, (ones[:2],) * 2
    for past, match in (
        ([pair], "1 layers: expected 2"),
        ([pair] * 3, "3 layers: expected 2"),
        ([pair[:1]] * 2, "for layer 0: expected keys and values"),
        ([(pair[0], other[0])] * 2, "for layer 0: expected keys and values"),
        ([(ones[0],) * 2] * 2, r"\(2, 4, 8\).* for layer 0"),
        ([pair, other], r"layers of \[3, 4\] tokens"),
        ([(ones[:2, :1],) * 2] * 2, "holds 1 heads of 8 channels: the layer has 2 of 8"),
        ([(ones[:2, ..., :4],) * 2] * 2, "holds 2 heads of 4 channels: the layer has 2 of 8"),
        ([(ones,) * 2] * 2, "holds 3 rows: expected as many .* got 2"),
    ):
        with pytest.raises(InputError, match=match):
            model(IDS, use_cache=True, past_key_values=past)
    assert torch.equal(model(IDS).logits, expected)


def test_what_was_given_as_a_cache_does_not_change():
    """Nor do keys that autograd keeps, when a program goes back to them and on without
    gradients.
    """
    model = small.model("Llama", **GROUPED)
    first = model(IDS[:, :5], use_cache=True)
    pairs = [(keys.detach(), values.detach()) for keys, values in first.past_key_values]
    copies = [(keys.clone(), values.clone()) for keys, values in pairs]
    second = model(IDS[:, 5:6], use_cache=True, past_key_values=pairs)
    for past in (first.past_key_values, second.past_key_values):
        with torch.no_grad():
            earlier = [(keys[:, :, :4], values[:, :, :4]) for keys, values in past]
            model(IDS[:, 7:], use_cache=True, past_key_values=earlier)
    second.logits.sum().backward()
    first.logits.sum().backward()
    assert_unchanged(pairs, copies)
