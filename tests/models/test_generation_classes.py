"""ModelCenter's generation classes and helpers: the behaviour of `generate(list of texts, ...)` of
each family.
"""

import functools
from typing import Any

import pytest
import torch
from tests.data_sets.common import tokenizer as stored
from tests.models import small

from model_center.errors import ConfigError, InputError
from model_center.generation import causal, cpm1, cpm2, glm, llama, t5
from model_center.generation.engine import generate
from model_center.generation.generation_utils import (
    BeamHypotheses,
    apply_repetition_penalty,
    pad,
    top_k_top_p_filtering,
)

SIZES: dict[str, Any] = {"dim_model": 32, "num_heads": 4, "dim_ff": 48}
# the small tokenizer's
SPANS = {"mask_tok_id": 267, "sop_tok_id": 265, "eop_tok_id": 266}
FAMILIES: dict[str, tuple[Any, ...]] = {
    "llama": ("Llama", llama, {}),
    "gpt2": ("GPT2", causal, {}),
    "cpm1": ("CPM1", cpm1, {}),
    "glm": ("GLM", glm, SPANS),
    "t5": ("T5", t5, {}),
    "cpm2": ("CPM2", cpm2, {}),
}
TEXTS = ["hello world", "a", "the cat"]


@functools.cache
def made(name):
    """A random model and its tokenizer."""
    (family, _, more), tokenizer = FAMILIES[name], stored(name)
    size = max(tokenizer.get_vocab().values()) + 1
    return small.model(family, std=0.3, vocab_size=size, **SIZES, **more), tokenizer


def classes(name):
    """Beam search and drawing of a family."""
    family, module, _ = FAMILIES[name]
    family = "Causal" if name == "gpt2" else family
    beams, drawing = (getattr(module, family + kind) for kind in ("BeamSearch", "RandomSampling"))
    assert issubclass(beams, getattr(module, f"{family}Generation"))
    return beams(*made(name)), drawing(*made(name))


class Recorder:
    """A writer that keeps how many tokens it is asked for."""

    def __init__(self):
        self.asked = []

    def tokens(self, texts, **options):
        self.asked.append(options["max_new_tokens"])
        return []


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_to_texts(name):
    """New tokens only, as many in both classes but for one more in the beam searches of LLaMA and
    T5, as in ModelCenter; a batch is each text alone; unknown arguments are errors.
    """
    more = 1 if name in ("llama", "t5") else 0
    made(name)[0].train()
    beams, drawing = classes(name)
    assert not beams.model.training
    found = beams.generate(TEXTS, max_length=8)
    assert len(found) == 3 and any(found)
    assert found == [beams.generate([text], max_length=8)[0] for text in TEXTS]
    greedy = drawing.generate(TEXTS, max_length=8 + more, top_k=1)
    assert beams.generate(TEXTS, beam_size=1, max_length=8) == greedy
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(drawing.generate(TEXTS, max_length=8, top_p=0.0, temperature=1.5))
    assert drawn[0] == drawn[1] != drawn[2]
    recorder = Recorder()
    penalty = {"repetition_penalty": 3.0, "repetition_window": 2}
    for one, likeliest in ((beams, {}), (drawing, {"top_k": 1})):
        plain = one.generate(TEXTS, max_length=20, **likeliest)
        assert one.generate(TEXTS, max_length=20, **likeliest, **penalty) != plain
        with pytest.raises(TypeError, match="max_lenght"):
            one.generate(TEXTS, max_lenght=3)
        with pytest.raises(ConfigError, match="max_new_tokens is 0"):
            one.generate(TEXTS, max_length=0)
        assert one.generate(TEXTS, max_length=20, **likeliest) == plain
        one.writer = recorder
        one.generate(TEXTS, max_length=7)
    assert recorder.asked == [7 + more, 7]


def test_the_default_number_of_tokens_ends_with_the_positions():
    tokenizer = made("gpt2")[1]
    size = max(tokenizer.get_vocab().values()) + 1
    model = small.model("GPT2", std=0.3, vocab_size=size, **SIZES, position_size=24)
    room = 24 - len(tokenizer.encode(TEXTS[0]))
    for kind in (causal.CausalBeamSearch, causal.CausalRandomSampling):
        writer, found = kind(model, tokenizer), []
        for limit in ({}, {"max_length": room}):
            torch.manual_seed(3)
            found += writer.generate(TEXTS[:1], **limit)
        assert found[0] == found[1]
        with pytest.raises(ConfigError, match=f"ask for at most {room} new tokens"):
            writer.generate(TEXTS[:1], max_length=room + 1)


def rows_of(name, prompts, **options):
    """What the engine makes of prompts padded on the left, at most nine tokens, one at least."""
    model, tokenizer = made(name)
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
    options = {"max_new_tokens": 9, "min_new_tokens": 1} | options
    rows = generate(model, ids, mask, **options).rows()
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


def texts_of(name, texts, **options):
    found = classes(name)[0].generate(texts, **{"max_length": 9, "beam_size": 1} | options)
    return [text.strip() for text in found]


def test_each_family_is_the_engine_with_these_options():
    """The end is forbidden at first; LLaMA's penalty is for generated tokens, scores are divided by
    length; CPM-1 begins with token 1 and sees the whole text; GLM writes a span for the mask of
    [CLS], the text with its [MASK] or one at the end, until [E], without other special tokens.
    """
    tokenizer = made("llama")[1]
    options = {"repetition_penalty": 1.5}
    found = texts_of("llama", TEXTS, beam_size=3, **options)
    options |= {"max_new_tokens": 10, "eos_token_id": 2, "num_beams": 3, "penalize_prompt": False}
    options["normalize_last"] = True
    assert found == rows_of("llama", [tokenizer.encode(text) for text in TEXTS], **options)
    _, tokenizer = made("cpm1")
    ids = [1, *tokenizer.encode("the cat")]
    context = {"context": torch.ones(1, len(ids), dtype=torch.long)}
    found = rows_of("cpm1", [ids], eos_token_id=tokenizer.eod_id, inputs=context)
    assert texts_of("cpm1", ["the cat"]) == found
    assert found != rows_of("cpm1", [ids], eos_token_id=tokenizer.eod_id)
    tokenizer = made("glm")[1]
    cls, mask, eop = map(tokenizer.convert_tokens_to_ids, ("[CLS]", "[MASK]", "[E]"))
    forbidden = [0, *range(259, eop), *range(eop + 1, 268)]
    for text, more in (("好小", [mask]), ("好[MASK]小", [])):
        ids = [cls, *tokenizer.encode(text), *more]
        assert ids.count(mask) == 1
        found = rows_of("glm", [ids], eos_token_id=eop, forbidden_tokens=forbidden)
        assert texts_of("glm", [text]) == found and all(found)


@pytest.mark.parametrize("name", ["t5", "cpm2"])
def test_the_gap_of_a_text_is_filled(name):
    """The gap is where the first sentinel is, or at the end; the second one or the end token ends;
    others are not generated. Sentinels are found by name: their ids do not follow one another in
    the order of T5's list of special tokens.
    """
    model, tokenizer = made(name)
    pattern = "<extra_id_{}>" if name == "t5" else "<s_{}>"
    vocabulary = tokenizer.get_vocab()
    names = [pattern.format(number) for number in range(200)]
    first, second, *others = (vocabulary[name] for name in names if name in vocabulary)
    assert len(others) >= 98
    end, start = tokenizer.eos_token_id, [tokenizer.pad_token_id] if name == "t5" else []
    with_gap = f"the {pattern.format(0)} cat" if name == "t5" else "the cat"
    for text in ("hello world", with_gap):
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids = ids if first in ids else [*ids, first]
        assert ids.count(first) == 1
        ids, out = [*ids, end] if name == "t5" else ids, [*start, first]
        row = []
        while len(row) < 10 + (name == "t5") and not {second, end} & {*row}:
            given = {
                "input_ids": torch.tensor([ids]),
                "decoder_input_ids": torch.tensor([out + row]),
            }
            with torch.no_grad():
                logits = model(**given).logits[0, -1]
            logits[[first, *others, *([] if row else [second, end])]] = -torch.inf
            row.append(int(logits.argmax()))
        plain = [token for token in row if token != second]
        expected = tokenizer.decode(plain, skip_special_tokens=True).strip()
        assert texts_of(name, [text], max_length=10) == [expected]
    with pytest.raises(ConfigError, match="no sentinels 0 and 1"):
        t5.T5BeamSearch(model, made("gpt2")[1]).generate(["a"])


def test_beams_whose_scores_are_normalized_last():
    """The penalty and forbidden tokens change the model's scores; their softmax gives a beam's."""
    model, tokenizer = made("llama")
    prompt, forbidden = tokenizer.encode("hello world"), list(range(400))
    live = [(0.0, [])]
    for _ in range(4):
        found = []
        for total, row in live:
            with torch.no_grad():
                scores = model(input_ids=torch.tensor([prompt + row])).logits[0, -1]
            for token in {*row}:
                scores[token] *= 1.5 if scores[token] < 0 else 1 / 1.5
            scores[forbidden] = -torch.inf
            log_probs = (total + scores.log_softmax(-1)).tolist()
            found += [(log_prob, [*row, token]) for token, log_prob in enumerate(log_probs)]
        live = sorted(found, reverse=True)[:3]
    options: dict[str, Any] = {"penalize_prompt": False, "forbidden_tokens": forbidden}
    options |= {"num_beams": 3, "repetition_penalty": 1.5, "max_new_tokens": 4}
    beams = [
        generate(model, torch.tensor([prompt]), normalize_last=is_last, **options).rows()[0]
        for is_last in (True, False)
    ]
    assert beams[0] == live[0][1] != beams[1]


def test_special_tokens_are_written_out():
    """As ModelCenter's, but for the token that ends a text."""
    model, tokenizer = made("t5")
    _, second, *_ = classes("t5")[0].writer.sentinels
    drawing = t5.T5RandomSampling(model, tokenizer)
    torch.manual_seed(0)
    texts = drawing.generate(["hello world"] * 64, max_length=30, top_p=0.0, temperature=9.0)
    assert any("<pad>" in text or "<unk>" in text for text in texts)
    ends = (tokenizer.decode([end]) for end in (second, tokenizer.eos_token_id))
    assert not any(end in text for end in ends for text in texts)
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 9.0, "max_new_tokens": 30}
    assert drawing.writer(["hello world"] * 64, **options) != texts


def test_pad_and_top_k_top_p_filtering():
    items = [{"ids": torch.tensor([[1, 2, 3]])}, {"ids": torch.tensor([[4]])}]
    assert str(pad(items, "ids").tolist()) == "[[1, 2, 3], [0, 0, 4]]"
    found = pad(items, "ids", padding_value=9, padding_side="right")
    assert str(found.tolist()) == "[[1, 2, 3], [4, 9, 9]]"
    with pytest.raises(InputError, match="expected 'left' or 'right'"):
        pad(items, "ids", padding_side="top")
    with pytest.raises(InputError, match=r"item 1 has ids of shape \(1,\)"):
        pad([items[0], {"ids": torch.tensor([4])}], "ids")
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.26, 0.35, 0.24, 0.15]]).log()
    for options, kept in (
        ({"top_k": 2}, "[[0, 1, 0, 1], [1, 1, 0, 0]]"),
        ({"top_p": 0.6}, "[[0, 1, 0, 1], [1, 1, 0, 0]]"),
        ({"top_k": 1, "top_p": 0.9}, "[[0, 1, 0, 0], [0, 1, 0, 0]]"),
        ({}, "[[1, 1, 1, 1], [1, 1, 1, 1]]"),
    ):
        found = top_k_top_p_filtering(logits, **options, filter_value=-9.0)
        assert str((found != -9).long().tolist()) == kept
        assert torch.equal(found.where(found != -9, logits), logits)
    assert top_k_top_p_filtering(logits, top_k=1).isinf().sum() == 6


def test_apply_repetition_penalty():
    tokens, plain = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 0]]), [2.0, -2.0, 4.0, -4.0, 1.0]
    changed = [1.0, -4.0, 2.0, -8.0, 0.5]
    for options, counted in (
        ({}, "0123 03"),
        ({"start_idx": 1, "end_idx": 2}, "12 03"),
        ({"start_idx": 1, "end_idx": 2, "window_size": 1}, "2 0"),
        ({"window_size": 2}, "23 0"),
    ):
        logits = torch.tensor([plain] * 2)
        apply_repetition_penalty(logits, 1, 2, tokens, 2.0, **options)
        assert logits.tolist() == [
            [(changed if str(token) in row else plain)[token] for token in range(5)]
            for row in counted.split()
        ]
    with pytest.raises(InputError, match="expected at least 1"):
        apply_repetition_penalty(logits, 1, 2, tokens, 0.5)
    with pytest.raises(InputError, match=r"batch_size \* num_beams = 4"):
        apply_repetition_penalty(logits, 2, 2, tokens, 2.0)


def test_beam_hypotheses():
    """The best of those added, by log-probability over a power of the length."""
    beams = BeamHypotheses(2, max_len=9, length_penalty=1.0, early_stopping=False)
    assert not beams.is_done(-1.0, 3) and len(beams) == 0
    for length, score in ((4, -8.0), (2, -2.0), (5, -15.0), (3, -4.5)):
        beams.add(torch.arange(length), score)
    assert str(beams.hyp) == "[(-1.0, tensor([0, 1])), (-1.5, tensor([0, 1, 2]))]"
    assert beams.worst_score == -1.5 and len(beams) == 2
    assert not beams.is_done(-4.0, 4) and beams.is_done(-6.0, 4)
    eager = BeamHypotheses(1, max_len=9, length_penalty=1.0, early_stopping=True)
    eager.add(torch.arange(2), -50.0)
    assert eager.is_done(-0.1, 4)
