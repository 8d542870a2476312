"""Greedy and beam search against `generate` of transformers with the same weights, token for
token.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
from typing import Any

import pytest
import torch
import transformers
from tests.models import parity
from tests.models.versions import since_5

from model_center.generation.engine import generate
from model_center.model.gpt2 import GPT2
from model_center.model.gptj import GPTj
from model_center.model.llama import Llama
from model_center.model.mistral import Mistral
from model_center.model.opt import OPT
from model_center.model.qwen3 import Qwen3
from model_center.model.t5 import T5

VOCAB = 48
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None}
LLAMA = SIZES | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 48,
    "num_layers": 2,
    "eos_token_id": None,
}
T5_SIZES |= {"decoder_start_token_id": 0}
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "gpt2": (
        GPT2,
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(**SIZES, n_embd=32, n_head=4, n_layer=2, n_positions=64),
    ),
    "gptj": (
        GPTj,
        transformers.GPTJForCausalLM,
        transformers.GPTJConfig(
            **SIZES, n_embd=32, n_head=4, n_layer=2, rotary_dim=4, tie_word_embeddings=False
        ),
    ),
    "opt": (
        OPT,
        transformers.OPTForCausalLM,
        transformers.OPTConfig(
            **SIZES,
            hidden_size=32,
            num_attention_heads=4,
            ffn_dim=48,
            num_hidden_layers=2,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            pad_token_id=0,
        ),
    ),
    "llama": (Llama, transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)),
    "mistral": (
        Mistral,
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**LLAMA, sliding_window=6),
    ),
    "qwen3": (Qwen3, transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**LLAMA, head_dim=8)),
    "t5": (T5, transformers.T5ForConditionalGeneration, transformers.T5Config(**T5_SIZES)),
    "t5-v1.1": (
        T5,
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(
            **T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        ),
    ),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition penalty": {"repetition_penalty": 1.7},
    "greedy, repetition reward, late end": {"repetition_penalty": 0.8, "min_new_tokens": 9},
    "beams": {"num_beams": 3},
    "beams, short ones preferred": {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
    "beams, all returned": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.0},
    "beams, never stopped early": {
        "num_beams": 3,
        "early_stopping": "never",
        "length_penalty": 0.5,
        "num_return_sequences": 2,
    },
    "beams, never, no length": {"num_beams": 2, "early_stopping": "never", "length_penalty": 0.0},
    "beams, all": {
        "num_beams": 5,
        "num_return_sequences": 3,
        "repetition_penalty": 2.0,
        "min_new_tokens": 6,
        "early_stopping": True,
    },
}


@functools.cache
def pair(family: str) -> tuple[Any, Any]:
    """Our model and theirs with the same weights, large enough that texts vary."""
    ours, theirs, config = FAMILIES[family]
    model = parity.theirs(theirs, config, std=0.4)
    # else the last token is repeated by heads that are tied to the embedding, or one by a bias
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.2)
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.mul_(0.1)
    with tempfile.TemporaryDirectory() as folder:
        return parity.loaded(ours, model, pathlib.Path(folder)), model


def prompts(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Five prompts of 7, 4, 1, 6, 7 tokens, padded on this side, and their mask."""
    ids = parity.token_ids(5, 7, high=VOCAB)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 3, 6, 1, 0)):
        columns = slice(missing) if side == "left" else slice(7 - missing, 7)
        ids[row, columns], mask[row, columns] = 0, 0
    return ids, mask


def both(family: str, rows: list[int], **options: Any) -> tuple[Any, Any]:
    """What we generate for some of the prompts, and what transformers does."""
    ours, theirs = pair(family)
    ids, mask = prompts("right" if family.startswith("t5") else "left")
    options = {"max_new_tokens": 15, "pad_token_id": 2} | options
    found = generate(ours, ids[rows], mask[rows], return_scores=True, **options)
    extra = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    return found, theirs.generate(ids[rows], attention_mask=mask[rows], **extra, **options)


def ends(family: str, search: str) -> list[list[int] | None]:
    """No end token, one, three: some that come up."""
    tokens = both(family, [0, 1, 2, 3, 4], **SEARCHES[search])[0].new_tokens
    return [None, [int(tokens[0, 10])], [int(tokens[0, 5]), int(tokens[1, 10]), int(tokens[3, 12])]]


@pytest.mark.parametrize(
    "search",
    [
        # 4 punishes the token of padding as well
        pytest.param(name, marks=[since_5] if "repetition_penalty" in options else [])
        for name, options in SEARCHES.items()
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_scores_are_those_of_transformers(family: str, search: str) -> None:
    """Padded batches and single prompts; sequences, padding after their ends, scores of sequences
    and of tokens.
    """
    theirs, seen = pair(family)[1], set()
    for eos in ends(family, search):
        for rows in ([0, 1, 2, 3, 4], [2]) if eos else ([0, 1, 2, 3, 4],):
            found, expected = both(family, rows, eos_token_id=eos, **SEARCHES[search])
            what = f"{search}, ends {eos}, prompts {rows}"
            assert torch.equal(found.sequences, expected.sequences), what
            seen.add(str(found.rows()))
            is_beam = "num_beams" in SEARCHES[search]
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
                found.token_scores[places] / largest,
                transitions[places] / largest,
                f"{what}: scores of tokens",
            )
            assert not found.token_scores[~places].any(), what
            scores = (
                expected.sequences_scores if is_beam else transitions.masked_fill(~places, 0).sum(1)
            )
            largest = max(largest, scores.abs().max().item())
            parity.assert_close(found.scores / largest, scores / largest, f"{what}: scores")
    assert len(seen) > 2, "ends made no difference: they were not tried"


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_when_beams_stop_makes_a_difference(family: str) -> None:
    """Each way of stopping is that of transformers where the ways differ: with likely ends and a
    preference for long sequences.
    """
    results: dict[Any, list[str]] = {True: [], False: [], "never": []}
    tokens = both(family, [0, 1, 2, 3, 4])[0].new_tokens
    for place in range(2, 10):
        for stopping, seen in results.items():
            search = {"num_beams": 2, "length_penalty": 3.0, "early_stopping": stopping}
            found, expected = both(
                family, [0, 1, 2, 3, 4], eos_token_id=tokens[:, place].unique().tolist(), **search
            )
            assert torch.equal(found.sequences, expected.sequences), (place, stopping)
            seen.append(str(found.rows()))
    assert results[True] != results[False] != results["never"] != results[True]


def test_many_ends_leave_enough_beams() -> None:
    """Where most of the likeliest tokens are ends, candidates further down go on."""
    for ends in (list(range(16)), list(range(0, 48, 2)), list(range(40))):
        for search in (
            {"num_beams": 3},
            {"num_beams": 4, "num_return_sequences": 4, "min_new_tokens": 2},
        ):
            found, expected = both("llama", [0, 1, 2, 3, 4], eos_token_id=ends, **search)
            assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_limits_and_forbidden_tokens_are_those_of_transformers(family: str) -> None:
    """`max_length` counts the prompt's tokens (of the decoder); tokens can be forbidden; one new
    token is a limit, too.
    """
    searches: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3})
    for search in searches:
        for limit in ({"max_length": 12, "max_new_tokens": None}, {"max_new_tokens": 1}):
            found, expected = both(family, [0, 1, 2], eos_token_id=3, **limit, **search)
            assert torch.equal(found.sequences, expected.sequences)
        plain, _ = both(family, [0, 1, 2], **search)
        forbidden = plain.new_tokens[:, 0].tolist()
        ours, theirs = pair(family)
        ids, mask = prompts("right" if family == "t5" else "left")
        found = generate(ours, ids, mask, max_new_tokens=9, forbidden_tokens=forbidden, **search)
        expected = theirs.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=9,
            suppress_tokens=forbidden,
            do_sample=False,
            pad_token_id=2,
            **search,
        )
        assert torch.equal(found.sequences, expected)
        assert not torch.isin(found.new_tokens, torch.tensor(forbidden)).any()


def test_a_decoder_may_begin_with_several_tokens() -> None:
    """`decoder_input_ids` in place of the one start token."""
    ours, theirs = pair("t5")
    ids, mask = prompts("right")
    starts = parity.token_ids(5, 3, high=VOCAB, seed=4)
    starts[:, 0] = 0  # transformers would put it in front
    for search in ({}, {"num_beams": 3, "num_return_sequences": 2}, {"repetition_penalty": 1.9}):
        found = generate(
            ours,
            ids,
            mask,
            inputs={"decoder_input_ids": starts},
            max_new_tokens=8,
            eos_token_id=3,
            pad_token_id=2,
            **search,
        )
        expected = theirs.generate(
            ids,
            attention_mask=mask,
            decoder_input_ids=starts,
            max_new_tokens=8,
            eos_token_id=3,
            pad_token_id=2,
            do_sample=False,
            **search,
        )
        assert torch.equal(found.sequences, expected)
        assert found.prefix_length == 3


def test_padding_is_recognised_where_no_mask_says_it() -> None:
    """As in transformers: by `pad_token_id`, if it is given and does not end sequences."""
    ours, theirs = pair("gpt2")
    ids, mask = prompts("left")
    with_mask = generate(ours, ids, mask, max_new_tokens=8, pad_token_id=0)
    found = generate(ours, ids, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(found.sequences, with_mask.sequences)
    assert torch.equal(
        found.sequences, theirs.generate(ids, max_new_tokens=8, pad_token_id=0, do_sample=False)
    )
    unmasked = generate(ours, ids, max_new_tokens=8, pad_token_id=0, eos_token_id=0)
    assert torch.equal(
        unmasked.sequences,
        generate(ours, ids, torch.ones_like(ids), max_new_tokens=8, eos_token_id=0).sequences,
    )
