"""Greedy and beam search against `generate` of transformers with the same weights, token for
token.
"""

import functools
import pathlib
import tempfile
from typing import Any

import pytest
import torch
from tests.models import parity
from tests.models.versions import since_5

from model_center.generation.engine import generate
from model_center.model.registry import model_class

VOCAB = 48
SIZES = f"vocab_size={VOCAB} bos_token_id=1 eos_token_id=None"
LAYERS = f"{SIZES} hidden_size=32 num_attention_heads=4 num_hidden_layers=2"
GROUPED = f"{LAYERS} num_key_value_heads=2 intermediate_size=48"
GPT = f"{SIZES} n_embd=32 n_head=4 n_layer=2"
T5 = (
    f"T5ForConditionalGeneration vocab_size={VOCAB} d_model=32 d_kv=8 num_heads=4 d_ff=48 "
    "num_layers=2 eos_token_id=None decoder_start_token_id=0"
)
FAMILIES = {
    "gpt2": f"GPT2LMHeadModel {GPT} n_positions=64",
    "gptj": f"GPTJForCausalLM {GPT} rotary_dim=4 tie_word_embeddings=False",
    "opt": f"OPTForCausalLM {LAYERS} ffn_dim=48 word_embed_proj_dim=32 pad_token_id=0 "
    "max_position_embeddings=64",
    "llama": f"LlamaForCausalLM {GROUPED}",
    "mistral": f"MistralForCausalLM {GROUPED} sliding_window=6",
    "qwen3": f"Qwen3ForCausalLM {GROUPED} head_dim=8",
    "t5": T5,
    "t5-v1.1": f"{T5} feed_forward_proj=gated-gelu tie_word_embeddings=False",
}
SEARCHES: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"repetition_penalty": 1.7},
    {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
    {"repetition_penalty": 0.8, "min_new_tokens": 9},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.0},
    {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.5, "num_return_sequences": 2},
    {"num_beams": 2, "early_stopping": "never", "length_penalty": 0.0},
    {
        "num_beams": 5,
        "num_return_sequences": 3,
        "repetition_penalty": 2.0,
        "min_new_tokens": 6,
        "early_stopping": True,
    },
]
EVERY = [0, 1, 2, 3, 4]


@functools.cache
def pair(family):
    """Our model and theirs with the same weights, large enough that texts vary."""
    model = parity.their_model(FAMILIES[family], std=0.4)
    # else the last token is repeated by heads that are tied to the embedding, or one by a bias
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.2)
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.mul_(0.1)
    with tempfile.TemporaryDirectory() as folder:
        kind = model_class(model.config.to_dict())
        return parity.loaded(kind, model, pathlib.Path(folder)), model


def prompts(family):
    """Five prompts of 7, 4, 1, 6, 7 tokens, padded on the side of the family, and their mask."""
    ids = parity.token_ids(5, 7, high=VOCAB)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 3, 6, 1, 0)):
        columns = slice(7 - missing, 7) if family.startswith("t5") else slice(missing)
        ids[row, columns] = mask[row, columns] = 0
    return ids, mask


def both(family, rows, **options):
    """What we generate for some of the prompts, and what transformers does."""
    ours, theirs = pair(family)
    ids, mask = (part[rows] for part in prompts(family))
    options = {"max_new_tokens": 15, "pad_token_id": 2} | options
    suppressed = (
        {"suppress_tokens": options["forbidden_tokens"]} if "forbidden_tokens" in options else {}
    )
    found = generate(ours, ids, mask, return_scores=True, **options)
    extra = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    given = {
        name: value for name, value in options.items() if name not in ("forbidden_tokens", "inputs")
    }
    given |= suppressed | extra | options.get("inputs", {})
    return found, theirs.generate(ids, attention_mask=mask, **given)


def assert_same_tokens(family, rows, **options):
    found, expected = both(family, rows, **options)
    assert torch.equal(found.sequences, expected.sequences), (rows, options)
    return found


# Each search with one family, each family with one or two; all of them in the long suite.
DRAWN = [place % 8 + 8 * place for place in range(9)]


@pytest.mark.parametrize(
    ("family", "search"),
    [
        pytest.param(
            family,
            search,
            marks=[
                # 4 punishes the token of padding as well
                *([since_5] if "repetition_penalty" in search else []),
                *([] if number in DRAWN else [pytest.mark.long]),
            ],
        )
        for number, (search, family) in enumerate(
            (search, family) for search in SEARCHES for family in FAMILIES
        )
    ],
)
def test_tokens_and_scores_are_those_of_transformers(family, search):
    """Padded batches and single prompts; sequences, padding after their ends, scores of sequences
    and of tokens.
    """
    theirs, seen = pair(family)[1], set()
    options: dict[str, Any] = {"max_new_tokens": 15, **search}
    tokens = generate(pair(family)[0], *prompts(family), **options).new_tokens
    # no end token, one, three: some that come up
    three = [int(tokens[0, 5]), int(tokens[1, 10]), int(tokens[3, 12])]
    for eos, rows in ((None, EVERY), (three[1:2], EVERY), (three, [0, 1, 2, 3]), (three, [2])):
        found, expected = both(family, rows, eos_token_id=eos, **search)
        what = f"{search}, ends {eos}, prompts {rows}"
        assert torch.equal(found.sequences, expected.sequences), what
        seen.add(str(found.rows()))
        is_beam = "num_beams" in search
        transitions = theirs.compute_transition_scores(
            expected.sequences,
            expected.scores,
            expected.get("beam_indices"),
            normalize_logits=not is_beam,
        )
        places = torch.arange(found.new_tokens.shape[1]) < found.lengths[:, None]
        # A score is a difference of logits, rounded as the largest of them are; sums divided by
        # 1 / length are larger still.
        every = torch.stack(expected.scores)
        largest = max(1.0, every[every.isfinite()].abs().max().item())
        parity.assert_close(
            found.token_scores[places] / largest, transitions[places] / largest, what
        )
        assert not found.token_scores[~places].any(), what
        scores = (
            expected.sequences_scores if is_beam else transitions.masked_fill(~places, 0).sum(1)
        )
        largest = max(largest, scores.abs().max().item())
        parity.assert_close(found.scores / largest, scores / largest, what)
    assert len(seen) > 2, "ends made no difference: they were not tried"


def test_when_beams_stop_makes_a_difference():
    """Each way of stopping is that of transformers where the ways differ: with likely ends and a
    preference for long sequences; where most of the likeliest tokens are ends, candidates further
    down go on.
    """
    results = {True: [], False: [], "never": []}
    tokens = both("llama", EVERY)[0].new_tokens
    for place in range(2, 10, 2):
        eos = tokens[:, place].unique().tolist()
        for stopping, seen in results.items():
            search = {"num_beams": 2, "length_penalty": 3.0, "early_stopping": stopping}
            seen.append(str(assert_same_tokens("llama", EVERY, eos_token_id=eos, **search).rows()))
    assert results[True] != results[False] != results["never"] != results[True]
    search = {"num_beams": 4, "num_return_sequences": 4, "min_new_tokens": 2}
    for ends in (range(16), range(0, 48, 2), range(40)):
        assert_same_tokens("llama", EVERY, eos_token_id=list(ends), **search)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_limits_and_forbidden_tokens_are_those_of_transformers(family):
    """`max_length` counts the prompt's tokens (of the decoder, which may begin with several);
    tokens can be forbidden; one new token is a limit, too.
    """
    for search in ({}, {"num_beams": 3}):
        for limit in ({"max_length": 12, "max_new_tokens": None}, {"max_new_tokens": 1}):
            assert_same_tokens(family, EVERY, eos_token_id=3, **limit, **search)
        forbidden = both(family, EVERY, **search)[0].new_tokens[:, 0].tolist()
        found = assert_same_tokens(family, EVERY, forbidden_tokens=forbidden, **search)
        assert not torch.isin(found.new_tokens, torch.tensor(forbidden)).any()
    if family == "t5":
        starts = parity.token_ids(5, 3, high=VOCAB, seed=4)
        starts[:, 0] = 0  # transformers would put it in front
        more = {"num_beams": 3, "num_return_sequences": 2}
        for other in ({}, more, {"repetition_penalty": 1.9}):
            given = {"inputs": {"decoder_input_ids": starts}, "eos_token_id": 3}
            assert assert_same_tokens(family, EVERY, **given, **other).prefix_length == 3


def test_padding_is_recognised_where_no_mask_says_it():
    """As in transformers: by `pad_token_id`, if it is given and does not end sequences."""
    ours, theirs = pair("gpt2")
    ids, mask = prompts("gpt2")
    expected = theirs.generate(ids, max_new_tokens=8, pad_token_id=0, do_sample=False)
    for given in (mask, None):
        found = generate(ours, ids, given, max_new_tokens=8, pad_token_id=0)
        assert torch.equal(found.sequences, expected)
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": 0}
    unmasked = generate(ours, ids, pad_token_id=0, **options)
    masked = generate(ours, ids, torch.ones_like(ids), **options)
    assert torch.equal(unmasked.sequences, masked.sequences)
