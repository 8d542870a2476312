"""ModelCenter's generation classes and helpers: the behaviour of `generate(list of texts, ...)` of
each family.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from tests.models import parity

from model_center.errors import ConfigError, InputError
from model_center.generation.causal import CausalBeamSearch, CausalRandomSampling
from model_center.generation.cpm1 import CPM1BeamSearch, CPM1RandomSampling
from model_center.generation.cpm2 import CPM2BeamSearch, CPM2RandomSampling
from model_center.generation.engine import generate
from model_center.generation.generation_utils import (
    BeamHypotheses,
    apply_repetition_penalty,
    pad,
    top_k_top_p_filtering,
)
from model_center.generation.glm import GLMBeamSearch, GLMRandomSampling
from model_center.generation.llama import LlamaBeamSearch, LlamaGeneration, LlamaRandomSampling
from model_center.generation.t5 import T5BeamSearch, T5Generation, T5RandomSampling
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.cpm2 import CPM2, CPM2Config
from model_center.model.glm import GLM, GLMConfig
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.t5 import T5, T5Config
from model_center.tokenizer.cpm1 import CPM1Tokenizer
from model_center.tokenizer.cpm2 import CPM2Tokenizer
from model_center.tokenizer.glm import GLMTokenizer
from model_center.tokenizer.hugging_face import GPT2Tokenizer, LlamaTokenizer, T5Tokenizer

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "tokenizers"
SIZES: dict[str, Any] = {
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "dtype": "float32",
}
LAYERS: dict[str, Any] = {"num_layers": 2}
BOTH: dict[str, Any] = {"num_encoder_layers": 2, "num_decoder_layers": 2}
# the small tokenizer's
GLM_SIZES: dict[str, Any] = LAYERS | {"mask_tok_id": 267, "sop_tok_id": 265, "eop_tok_id": 266}
FAMILIES: dict[str, tuple[Any, ...]] = {
    "llama": (Llama, LlamaConfig, LAYERS, LlamaTokenizer, LlamaBeamSearch, LlamaRandomSampling),
    "gpt2": (GPT2, GPT2Config, LAYERS, GPT2Tokenizer, CausalBeamSearch, CausalRandomSampling),
    "cpm1": (CPM1, CPM1Config, LAYERS, CPM1Tokenizer, CPM1BeamSearch, CPM1RandomSampling),
    "glm": (GLM, GLMConfig, GLM_SIZES, GLMTokenizer, GLMBeamSearch, GLMRandomSampling),
    "t5": (T5, T5Config, BOTH, T5Tokenizer, T5BeamSearch, T5RandomSampling),
    "cpm2": (CPM2, CPM2Config, BOTH, CPM2Tokenizer, CPM2BeamSearch, CPM2RandomSampling),
}
TEXTS = ["hello world", "a", "the cat"]


@functools.cache
def made(name: str) -> tuple[Any, Any]:
    """A random model and its tokenizer."""
    model_class, config, sizes, tokenizer_class, *_ = FAMILIES[name]
    tokenizer = tokenizer_class.from_pretrained(FOLDER / name)
    torch.manual_seed(0)
    size = max(tokenizer.get_vocab().values()) + 1
    return parity.randomized(
        model_class(config(vocab_size=size, **SIZES, **sizes)), std=0.3
    ), tokenizer


def classes(name: str) -> list[Any]:
    return [kind(*made(name)) for kind in FAMILIES[name][4:]]


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_to_texts(name: str) -> None:
    """New tokens only, as many in both classes; a batch is each text alone; unknown
    arguments are errors.
    """
    beams, sampling = classes(name)
    found = beams.generate(TEXTS, max_length=8)
    assert len(found) == 3 and all(isinstance(text, str) for text in found) and any(found)
    assert found == [beams.generate([text], max_length=8)[0] for text in TEXTS]
    more = 1 if name == "llama" else 0  # as in ModelCenter
    assert beams.generate(TEXTS, beam_size=1, max_length=8) == sampling.generate(
        TEXTS, max_length=8 + more, top_k=1
    )
    torch.manual_seed(3)
    drawn = sampling.generate(TEXTS, max_length=8, top_p=1.0, temperature=1.5)
    torch.manual_seed(3)
    assert sampling.generate(TEXTS, max_length=8, top_p=1.0, temperature=1.5) == drawn != found
    for one in (beams, sampling):
        assert one.generate(
            TEXTS, max_length=6, repetition_penalty=3.0, repetition_window=2
        ) != one.generate(TEXTS, max_length=6)
        with pytest.raises(TypeError, match="max_lenght"):
            one.generate(TEXTS, max_lenght=3)
        with pytest.raises(ConfigError, match="max_new_tokens is 0"):
            one.generate(TEXTS, max_length=0)


def test_llama_is_the_engine_with_these_options() -> None:
    """The end is forbidden at first, the penalty is for generated tokens, scores are divided by
    length.
    """
    model, tokenizer = made("llama")
    assert (
        isinstance(LlamaBeamSearch(model.train(), tokenizer), LlamaGeneration)
        and not model.training
    )
    ids = [tokenizer.encode(text) for text in TEXTS]
    length = max(map(len, ids))
    padded = torch.tensor([[0] * (length - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in ids])
    options: dict[str, Any] = {
        "max_new_tokens": 10,  # one more than max_length, as in ModelCenter
        "eos_token_id": 2,
        "min_new_tokens": 1,
        "num_beams": 3,
    }
    options |= {"repetition_penalty": 1.5, "penalize_prompt": False, "length_penalty": 1.0}
    rows = generate(model, padded, mask, **options).rows()
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    found = LlamaBeamSearch(model, tokenizer).generate(TEXTS, max_length=9, repetition_penalty=1.5)
    assert [text.strip() for text in found] == [text.strip() for text in expected]


class Recorder:
    """A writer that keeps how many tokens it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, texts: list[str], **options: Any) -> list[str]:
        self.asked.append(options["max_new_tokens"])
        return texts


def test_how_many_tokens_a_text_has() -> None:
    """At most as many as `max_length` says, in LLaMA's beam search one more, as in ModelCenter."""
    for name, more in (("llama", 1), ("gpt2", 0)):
        recorder = Recorder()
        for generator in classes(name):
            generator.writer = recorder
            generator.generate(TEXTS, max_length=7)
        assert recorder.asked == [7 + more, 7], name


def decoded_by(
    model: Any, ids: list[int], start: list[int], ends: list[int], forbidden: list[int]
) -> list[int]:
    """Greedy search over whole passes, the ends of the sequence cut off."""
    out = list(start)
    for step in range(10):
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([out])
            ).logits[0, -1]
        logits[forbidden] = -torch.inf
        if step == 0:
            logits[ends] = -torch.inf
        out.append(int(logits.argmax()))
        if out[-1] in ends:
            break
    return out[len(start) :]


@pytest.mark.parametrize("name", ["t5", "cpm2"])
def test_the_gap_of_a_text_is_filled(name: str) -> None:
    """The gap is where the first sentinel is, or at the end; the second one or the end token ends;
    others are not generated.

    The sentinels' ids do not follow one another in the order of T5's list of special tokens.
    """
    model, tokenizer = made(name)
    pattern = "<extra_id_{}>" if name == "t5" else "<s_{}>"
    vocabulary = tokenizer.get_vocab()
    names = [pattern.format(number) for number in range(200)]
    sentinels = [vocabulary[name] for name in names if name in vocabulary]
    assert len(sentinels) >= 100
    beams = FAMILIES[name][4](model, tokenizer)
    end, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with_gap = f"the {pattern.format(0)} cat" if name == "t5" else "the cat"
    for text in ("hello world", with_gap):
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids = ids if sentinels[0] in ids else [*ids, sentinels[0]]
        if name == "t5":
            assert ids.count(sentinels[0]) == 1
        ids, start = (
            ([*ids, end], [pad_id, sentinels[0]]) if name == "t5" else (ids, [sentinels[0]])
        )
        row = decoded_by(model, ids, start, [sentinels[1], end], [sentinels[0], *sentinels[2:]])
        expected = tokenizer.decode(
            [token for token in row if token not in sentinels], skip_special_tokens=True
        )
        assert beams.generate([text], beam_size=1, max_length=10)[0].strip() == expected.strip()


def test_sentinels_are_found_by_name() -> None:
    """Whatever the order of the tokenizer's special tokens is; a tokenizer without any is told."""
    model, tokenizer = made("t5")
    writer: Any = T5Generation(model, tokenizer).writer
    assert writer.sentinels[:3] == tokenizer.convert_tokens_to_ids(
        ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    )
    gpt2 = made("gpt2")[1]
    with pytest.raises(ConfigError, match="no sentinels 0 and 1"):
        T5BeamSearch(model, gpt2).generate(["a"])


def test_cpm1_sees_the_whole_text() -> None:
    """It begins with token 1 and is the context of what follows."""
    model, tokenizer = made("cpm1")
    ids = torch.tensor([[1, *tokenizer.encode("the cat")]])
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "min_new_tokens": 1,
        "eos_token_id": tokenizer.eod_id,
    }
    out = generate(model, ids, inputs={"context": torch.ones_like(ids)}, **options)
    text = tokenizer.decode(out.rows()[0], skip_special_tokens=True)
    assert CPM1BeamSearch(model, tokenizer).generate(["the cat"], beam_size=1, max_length=9) == [
        text
    ]
    causal = generate(model, ids, **options)
    assert causal.rows() != out.rows()


def test_glm_writes_a_span_for_the_mask() -> None:
    """[CLS], the text with its [MASK] or one at the end, [S]; until [E]; no other special token."""
    model, tokenizer = made("glm")
    cls, mask, sop, eop = (
        tokenizer.convert_tokens_to_ids(name) for name in ("[CLS]", "[MASK]", "[S]", "[E]")
    )
    for text, ids in (
        ("好小", [*tokenizer.encode("好小"), mask]),
        ("好[MASK]小", tokenizer.encode("好[MASK]小")),
    ):
        prompt = torch.tensor([[cls, *ids, sop]])
        assert prompt[0].tolist().count(mask) == 1
        forbidden = [token for token in range(259, 268) if token != eop] + [0]
        out = generate(
            model,
            prompt,
            max_new_tokens=9,
            min_new_tokens=1,
            eos_token_id=eop,
            forbidden_tokens=forbidden,
        )
        expected = tokenizer.decode([token for token in out.rows()[0] if token != eop])
        found = GLMBeamSearch(model, tokenizer).generate([text], beam_size=1, max_length=9)[0]
        assert found.strip() == expected.strip() and found


def test_pad() -> None:
    items = [{"ids": torch.tensor([[1, 2, 3]])}, {"ids": torch.tensor([[4]])}]
    assert pad(items, "ids").tolist() == [[1, 2, 3], [0, 0, 4]]
    assert pad(items, "ids", padding_value=9, padding_side="right").tolist() == [
        [1, 2, 3],
        [4, 9, 9],
    ]
    with pytest.raises(InputError, match="expected 'left' or 'right'"):
        pad(items, "ids", padding_side="top")
    with pytest.raises(InputError, match="item 1 has ids of shape \\(1,\\)"):
        pad([items[0], {"ids": torch.tensor([4])}], "ids")


def test_top_k_top_p_filtering() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.35, 0.25, 0.15]]).log()
    assert top_k_top_p_filtering(logits, top_k=2).isfinite().tolist() == [
        [False, True, False, True],
        [True, True, True, False],
    ]
    assert top_k_top_p_filtering(logits, top_p=0.6).isfinite().sum(1).tolist() == [2, 2]
    assert torch.equal(top_k_top_p_filtering(logits), logits)
    assert (top_k_top_p_filtering(logits, top_k=1, filter_value=-9.0) == -9.0).sum() == 6


def test_apply_repetition_penalty() -> None:
    tokens = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 0]])
    for options, counted in (
        ({}, [{0, 1, 2, 3}, {0, 3}]),
        ({"start_idx": 1, "end_idx": 2}, [{1, 2}, {0, 3}]),
        ({"start_idx": 1, "end_idx": 2, "window_size": 1}, [{2}, {0}]),
        ({"window_size": 2}, [{2, 3}, {0}]),
    ):
        logits = torch.tensor([[2.0, -2.0, 4.0, -4.0, 1.0]] * 2)
        apply_repetition_penalty(logits, 1, 2, tokens, 2.0, **options)
        plain = [2.0, -2.0, 4.0, -4.0, 1.0]
        changed = [1.0, -4.0, 2.0, -8.0, 0.5]
        assert logits.tolist() == [
            [(changed if token in row else plain)[token] for token in range(5)] for row in counted
        ]
    with pytest.raises(InputError, match="expected at least 1"):
        apply_repetition_penalty(logits, 1, 2, tokens, 0.5)
    with pytest.raises(InputError, match="batch_size \\* num_beams = 4"):
        apply_repetition_penalty(logits, 2, 2, tokens, 2.0)


def test_beam_hypotheses() -> None:
    """The best of those added, by log-probability over a power of the length."""
    beams = BeamHypotheses(2, max_len=9, length_penalty=1.0, early_stopping=False)
    assert not beams.is_done(-1.0, 3) and len(beams) == 0
    for length, score in ((4, -8.0), (2, -2.0), (5, -15.0), (3, -4.5)):
        beams.add(torch.arange(length), score)
    assert [(score, len(ids)) for score, ids in beams.hyp] == [(-1.0, 2), (-1.5, 3)]
    assert beams.worst_score == -1.5 and len(beams) == 2
    assert not beams.is_done(-4.0, 4) and beams.is_done(-6.0, 4)
    eager = BeamHypotheses(1, max_len=9, length_penalty=1.0, early_stopping=True)
    eager.add(torch.arange(2), -50.0)
    assert eager.is_done(-0.1, 4)
