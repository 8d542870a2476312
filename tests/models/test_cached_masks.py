"""The cache with masks of all pairs, which describe the whole sequence or the new queries alone,
and with gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import parity

from model_center.errors import InputError
from model_center.model.base import BaseModel
from model_center.model.bert import Bert, BertConfig
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.cpm2 import CPM2, CPM2Config
from model_center.model.cpm3 import CPM3, CPM3Config
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.t5 import T5, T5Config

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "dim_model": 16,
    "num_heads": 2,
    "dim_head": 8,
    "dim_ff": 20,
    "half": False,
}
LAYERS = SIZES | {"num_layers": 2}
DEPTHS = SIZES | {"num_encoder_layers": 1, "num_decoder_layers": 2}
MODELS: list[tuple[type[BaseModel], Any]] = [
    (Bert, BertConfig(**LAYERS, position_size=9)),
    (GPT2, GPT2Config(**LAYERS, position_size=9)),
    (Llama, LlamaConfig(**LAYERS, num_heads_kv=1)),
    (CPM1, CPM1Config(**LAYERS)),
    (
        CPM3,
        CPM3Config(
            **LAYERS, prompt_types=2, prompt_length=2, segment_types=3, position_bias_num_buckets=8
        ),
    ),
    (T5, T5Config(**DEPTHS)),
    (CPM2, CPM2Config(**DEPTHS)),
]
IDS = parity.token_ids(2, 8)
IDS[:, :2] = torch.tensor([2, 3])  # the prompt of CPM-3
PARTS = ((0, 4), (4, 5), (5, 8))


@pytest.mark.parametrize("of_new", [False, True])
@pytest.mark.parametrize(
    ("kind", "config"), MODELS, ids=lambda value: getattr(value, "__name__", "")
)
def test_in_parts_as_at_once(kind: type[BaseModel], config: Any, of_new: bool) -> None:
    """Causal, but one row has a token that only it sees itself."""
    model = parity.randomized(kind(config))
    seen = torch.ones(2, 8, 8).tril()
    seen[1, 3:, 2] = 0
    start = "decoder_" if hasattr(config, "num_decoder_layers") else ""
    inputs: dict[str, Any] = {"input_ids": IDS} if start else {}

    def logits(begin: int, end: int, past: Any) -> Any:
        mask = seen[:, begin if of_new else 0 : end, :end]
        arguments = inputs | {
            f"{start}input_ids": IDS[:, begin:end],
            f"{start}attention_mask": mask,
        }
        return model(**arguments, use_cache=True, past_key_values=past)

    with torch.no_grad():
        whole, found, past = logits(0, 8, None).logits, [], None
        for begin, end in PARTS:
            out = logits(begin, end, past)
            past = out.past_key_values
            found.append(out.logits)
    parity.assert_close(torch.cat(found, 1), whole, "in parts")
    with torch.no_grad():
        causal = model(
            **inputs
            | {f"{start}input_ids": IDS, f"{start}attention_mask": torch.ones(2, 8, 8).tril()}
        ).logits
    assert torch.equal(causal[0], whole[0]) and not torch.equal(causal[1], whole[1])


def test_a_mask_of_pairs_of_the_encoder_is_none_of_the_decoder() -> None:
    model = parity.randomized(T5(T5Config(**DEPTHS)))
    pairs = torch.ones(2, 8, 8).tril()
    with pytest.raises(
        InputError, match=r"shape \(2, 8, 8\): expected \(batch, keys\).*encode\(\)"
    ):
        model(IDS, decoder_input_ids=IDS[:, :3], attention_mask=pairs)
    with torch.no_grad():
        states = model.encode(IDS, attention_mask=pairs).last_hidden_state
        short = model.encode(IDS[:, :5], attention_mask=pairs[:, :5, :5]).last_hidden_state
        parity.assert_close(states[:, :5], short, "what the mask hides is not seen")
        out = model(
            encoder_outputs=states, decoder_input_ids=IDS[:, :3], attention_mask=torch.ones(2, 3, 8)
        )
        parity.assert_close(
            out.logits, model(encoder_outputs=states, decoder_input_ids=IDS[:, :3]).logits
        )


@pytest.mark.parametrize("trained", ["project_q", "project_k", "project_v", "prompt"])
def test_gradients_through_a_cache_that_grows(trained: str) -> None:
    """Of one weight of the first layer, or of a prompt, alone: what is behind it in the cache may
    be without gradient.
    """
    model = parity.randomized(Llama(LlamaConfig(**LAYERS, num_heads_kv=1))).requires_grad_(False)
    prompt = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    if trained == "prompt":
        leaf = prompt.requires_grad_()
    else:
        leaf = getattr(
            model.encoder.layers[0].self_att.self_attention, trained
        ).weight.requires_grad_()
    out = model(inputs_embeds=prompt, use_cache=True)
    found = [out.logits]
    for begin, end in (*PARTS[:2], (5, 6), (6, 8)):
        out = model(IDS[:, begin:end], use_cache=True, past_key_values=out.past_key_values)
        found.append(out.logits)
    whole = model(inputs_embeds=torch.cat([prompt, model.input_embedding(IDS)], 1)).logits
    parity.assert_close(torch.cat(found, 1), whole, "scores")
    (grad,), (expected,) = (
        torch.autograd.grad(scores.square().mean(), leaf) for scores in (torch.cat(found, 1), whole)
    )
    assert expected.abs().max() > 1e-3
    parity.assert_close(grad, expected, "gradient")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("kind", "config"), MODELS, ids=lambda value: getattr(value, "__name__", "")
)
def test_calls_change_no_cache(kind: type[BaseModel], config: Any, grad: bool) -> None:
    """Two calls with one cache give the same, also when it is a tuple, or an item of it is
    replaced.
    """
    model = parity.randomized(kind(config))
    start = "decoder_" if hasattr(config, "num_decoder_layers") else ""
    inputs = {"input_ids": IDS} if start else {}

    def run(begin: int, end: int, past: Any) -> Any:
        given = {**inputs, f"{start}input_ids": IDS[:, begin:end]}
        return model(**given, use_cache=True, past_key_values=past)

    with torch.set_grad_enabled(grad):
        whole = run(0, 6, None).logits[:, 4:]
        past = run(0, 4, None).past_key_values
        assert isinstance(past, list) and [type(pair) for pair in past] == [tuple] * len(past)
        kept = [(keys.clone(), values.clone()) for keys, values in past]
        one = run(4, 6, past)
        other = run(4, 6, tuple(past))
        run(4, 5, one.past_key_values)
        assert torch.equal(one.logits, other.logits)
        past[1] = (past[1][0].clone(), past[1][1].clone())
        assert torch.equal(run(4, 6, [list(pair) for pair in past]).logits, one.logits)
        past[0] = (past[0][0] + 1, past[0][1] - 1)
        assert not torch.equal(run(4, 6, past).logits, one.logits)
    if kind is not Bert:  # whose first tokens see the last
        parity.assert_close(one.logits, whole)
    for pair, copy in zip(past[1:], kept[1:], strict=True):
        assert torch.equal(pair[0], copy[0]) and torch.equal(pair[1], copy[1])
    assert one.past_key_values[0][0].shape[2] == 6
    assert torch.equal(one.past_key_values[1][1], other.past_key_values[1][1])


@pytest.mark.parametrize(
    ("past", "match"),
    [
        ([(torch.ones(2, 2, 3, 8),) * 2], r"1 layers: expected 2"),
        ([(torch.ones(2, 2, 3, 8),) * 2] * 3, r"3 layers: expected 2"),
        ([(torch.ones(2, 2, 3, 8),)] * 2, r"for layer 0: expected keys and values"),
        ([(torch.ones(2, 3, 8),) * 2] * 2, r"\(2, 3, 8\).* for layer 0"),
        ([(torch.ones(2, 2, n, 8),) * 2 for n in (3, 4)], r"layers of \[3, 4\] tokens"),
        ([(torch.ones(2, 1, 3, 8),) * 2] * 2, r"holds 1 heads of 8 channels: the layer has 2 of 8"),
        ([(torch.ones(3, 2, 3, 8),) * 2] * 2, r"holds 3 rows: expected as many .* got 2"),
    ],
)
def test_caches_that_are_none(past: Any, match: str) -> None:
    model = parity.randomized(GPT2(GPT2Config(**LAYERS, position_size=12)))
    with pytest.raises(InputError, match=match):
        model(IDS, use_cache=True, past_key_values=past)


def test_what_was_given_as_a_cache_does_not_change() -> None:
    """Nor do keys that autograd keeps, when a program goes back to them and on without
    gradients.
    """
    model = parity.randomized(Llama(LlamaConfig(**LAYERS, num_heads_kv=1)))
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
    for pair, copy in zip(pairs, copies, strict=True):
        assert torch.equal(pair[0], copy[0]) and torch.equal(pair[1], copy[1])
