"""From texts to texts: stop strings, pieces of text, chat templates, with small tokenizers of every
kind.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from tests.models import parity

from model_center.errors import ConfigError, InputError
from model_center.generation.detokenizer import Detokenizer
from model_center.generation.engine import generate
from model_center.generation.stopping import (
    StopStrings,
    TokenTexts,
    byte_automaton,
    texts_of_tokens,
)
from model_center.generation.text import TextGenerator
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.t5 import T5, T5Config
from model_center.tokenizer.cpm1 import CPM1Tokenizer
from model_center.tokenizer.glm import GLMTokenizer
from model_center.tokenizer.hugging_face import GPT2Tokenizer, LlamaTokenizer, T5Tokenizer

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "tokenizers"
TOKENIZERS: dict[str, Any] = {
    "gpt2": GPT2Tokenizer,
    "llama": LlamaTokenizer,
    "t5": T5Tokenizer,
    "cpm1": CPM1Tokenizer,
    "glm": GLMTokenizer,
}
SIZES: dict[str, Any] = {
    "dim_model": 32,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "dtype": "float32",
}


@functools.cache
def tokenizer_of(name: str) -> Any:
    return TOKENIZERS[name].from_pretrained(FOLDER / name)


@functools.cache
def generator_of(name: str) -> TextGenerator:
    """A random model with a vocabulary for this tokenizer, and both as a generator, which writes
    plain text without end.
    """
    torch.manual_seed(0)
    tokenizer = tokenizer_of(name)
    size = max(tokenizer.get_vocab().values()) + 5
    model: Any
    if name == "t5":
        model = T5(T5Config(vocab_size=size, num_encoder_layers=2, num_decoder_layers=2, **SIZES))
    else:
        model = GPT2(GPT2Config(vocab_size=size, num_layers=2, position_size=120, **SIZES))
    # bytes, <unused 260>
    strange = [token for name, token in tokenizer.get_vocab().items() if name.startswith("<")]
    forbidden = [*tokenizer.all_special_ids, *strange]
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "eos_token_id": (),
        "forbidden_tokens": forbidden,
    }
    return TextGenerator(parity.randomized(model, std=0.3), tokenizer, **options)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_make_up_their_text(name: str) -> None:
    """Joined, they are what the tokenizer decodes, after a first token."""
    tokenizer = tokenizer_of(name)
    found = texts_of_tokens(tokenizer, 2000).later
    special = set(tokenizer.all_special_ids)
    vocabulary = {
        token: name for name, token in tokenizer.get_vocab().items() if token not in special
    }
    assert all(found[token] == b"" for token in range(2000) if token not in vocabulary)
    # Of single bytes ("<0xE4>") the decoder makes one U+FFFD each unless all in a row are
    # characters.
    known = torch.tensor(
        [token for token, name in vocabulary.items() if not name.startswith(("<0x", "<unused "))]
    )
    plain = [token for token in known.tolist() if found[token].decode(errors="ignore").isalpha()]
    drawn = torch.Generator().manual_seed(0)
    for _ in range(200):
        first = plain[int(torch.randint(len(plain), (), generator=drawn))]
        ids = known[torch.randint(len(known), (6,), generator=drawn)].tolist()
        text = tokenizer.decode([first, *ids])[len(tokenizer.decode([first])) :]
        joined = b"".join(found[token] for token in ids).decode(errors="replace")
        assert joined.replace("\ufffd", "") == text.replace("\ufffd", ""), ids


def test_characters_of_several_tokens_have_their_bytes() -> None:
    for name in ("gpt2", "llama"):
        tokenizer = tokenizer_of(name)
        ids = tokenizer.encode("hello 你好 ß", add_special_tokens=False)
        assert "\ufffd" in tokenizer.decode([ids[-6]]) or len(ids) > 8
        assert (
            b"".join(texts_of_tokens(tokenizer, len(tokenizer)).later[token] for token in ids)
            .decode()
            .strip()
            == "hello 你好 ß"
        )


@pytest.mark.parametrize(
    "patterns",
    [
        ["abab"],
        ["aab", "ab", "bb"],
        ["a"],
        ["abcab", "bca", "cc", "abca"],
        ["aaa", "aab"],
        ["abca", "bc"],
    ],
)
def test_the_automaton_finds_what_a_search_finds(patterns: list[str]) -> None:
    """In random texts cut into random tokens, at the same token; an `a` that begins a first token
    is dropped, as tokenizers drop a blank.
    """
    drawn = torch.Generator().manual_seed(0)
    tokens = ["", "a", "b", "c", "ab", "ba", "aa", "abc", "cab", "bcc"]
    firsts = [token.removeprefix("a") for token in tokens]
    bytes_of = TokenTexts(*(tuple(t.encode() for t in texts) for texts in (firsts, tokens)))
    stop = StopStrings(patterns, bytes_of, torch.device("cpu"))
    rows = torch.randint(len(tokens), (60, 12), generator=drawn)
    prefix = torch.tensor([[0, 3], [1, 0]]).repeat(30, 1)
    mask = torch.tensor([[True, False], [True, True]]).repeat(30, 1)
    states = stop.first(prefix, mask)
    assert states.tolist() == [0, 1] * 30
    assert stop.first(prefix, None).tolist() == [1] * 60

    def text_of(row: list[int], has_text: bool) -> str:
        start = next((place for place, token in enumerate(row) if tokens[token]), None)
        return "".join(
            (firsts if place == start and not has_text else tokens)[token]
            for place, token in enumerate(row)
        )

    num_found = 0
    for step in range(12):
        states = stop.next(states, rows[:, step])
        texts = [
            text_of(row[: step + 1], bool(number % 2)) for number, row in enumerate(rows.tolist())
        ]
        expected = [any(pattern in text for pattern in patterns) for text in texts]
        assert stop.found(states).tolist() == expected
        num_found += sum(expected)
    assert 0 < num_found < 60 * 12


def test_no_patterns_are_never_found() -> None:
    assert byte_automaton([]).tolist() == [[0] * 256, [1] * 256]


@pytest.mark.parametrize("name", ["gpt2", "llama", "cpm1", "t5"])
def test_stop_strings_end_rows_where_their_text_has_them(name: str) -> None:
    """Across tokens, greedily and by beams; the text ends before them, the tokens with the one that
    completes them.
    """
    writer = generator_of(name)
    texts = ["hello world", "the cat", "he"]
    plain = writer(texts)
    assert all(len(text) > 8 for text in plain)
    stops = [plain[0][3:6], plain[1][2:7]]
    expected = [
        min((text[: text.find(stop)] for stop in stops if stop in text), key=len, default=text)
        for text in plain
    ]
    assert writer(texts, stop_strings=stops) == expected != plain
    beams = writer(texts, num_beams=3, stop_strings=stops)
    assert not any(stop in text for stop in stops for text in beams)
    ids = torch.tensor([writer.encode(texts[0])])
    plainly: dict[str, Any] = {
        "max_new_tokens": 20,
        "forbidden_tokens": writer.config.forbidden_tokens,
    }
    out = generate(writer.model, ids, stop_strings=stops[0], tokenizer=writer.tokenizer, **plainly)
    (row,) = out.rows()
    whole = generate(writer.model, ids, **plainly).rows()[0]
    assert row == whole[: len(row)] and len(row) < 20
    context = [] if name == "t5" else ids[0, -4:].tolist()
    assert stops[0] in Detokenizer(writer.tokenizer, context).add(*row)
    assert stops[0] not in Detokenizer(writer.tokenizer, context).add(*row[:-1])


@pytest.mark.parametrize("name", ["gpt2", "llama", "cpm1", "t5", "glm"])
def test_pieces_make_up_the_text(name: str) -> None:
    """Of one text and of several; no piece has half a character, none has the beginning of what
    stops it.
    """
    writer = generator_of(name)
    texts = ["hello world", "好", "the"]
    for options in ({}, {"do_sample": True, "seed": 1, "temperature": 2.0}):
        whole = writer(texts, **options)
        pieces = list(writer.stream_batch(texts, **options))
        assert [
            "".join(piece for row, piece in pieces if row == place) for place in range(3)
        ] == whole
        assert len(pieces) > 6 and all(piece for _, piece in pieces)
    stop = writer(texts[:1])[0][4:8]
    assert (
        "".join(writer.stream(texts[0], stop_strings=stop))
        == writer(texts[:1], stop_strings=[stop])[0]
    )


def test_half_characters_and_beginnings_of_stops_wait() -> None:
    tokenizer = tokenizer_of("gpt2")
    reader = Detokenizer(tokenizer)
    pieces = [reader.add(token) for token in tokenizer.encode("a 你 b")]
    assert (
        "".join(pieces) == "a 你 b"
        and "" in pieces
        and not any("\ufffd" in piece for piece in pieces)
    )
    reader = Detokenizer(tokenizer, stops=["world", "wor!"])
    assert [reader.add(*tokenizer.encode(text)) for text in ("a w", "o", "r", "k wor", "l")] == [
        "a ",
        "",
        "",
        "work ",
        "",
    ]
    assert reader.rest() == "worl" and reader.rest() == ""
    reader = Detokenizer(tokenizer, stops=["world", "wor!"])
    assert [reader.add(*tokenizer.encode(text)) for text in ("a wor", "ld, and", "more")] == [
        "a ",
        "",
        "",
    ]
    assert reader.rest() == ""


@pytest.mark.parametrize("prompt", ["你好", "é好", "a你", "好😀"])
def test_half_a_character_in_the_context_hides_nothing(prompt: str) -> None:
    """The context is four tokens, of which the first may be the middle of a character: new
    characters are read all the same.
    """
    vocab = tokenizer_of("llama").get_vocab()
    before, after = (
        [vocab[f"<0x{byte:02X}>"] for byte in text.encode()] for text in (prompt, "世界")
    )
    reader = Detokenizer(tokenizer_of("llama"), before[-4:])
    assert [reader.add(token) for token in after] == ["", "", "世", "", "", "界"]


def test_what_follows_a_token_without_text_keeps_its_blank() -> None:
    """A blank alone, and special tokens, which are left out; read one by one as all at once."""
    tokenizer = tokenizer_of("t5")
    ids = tokenizer.convert_tokens_to_ids(
        ["▁h", "ell", "▁", "o", "<unk>", "▁w", "</s>", "<unk>", "▁", "or", "▁w"]
    )
    reader = Detokenizer(tokenizer)
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert expected.count(" ") > 3
    assert (
        "".join([*map(reader.add, ids), reader.rest()])
        == Detokenizer(tokenizer).add(*ids)
        == expected
    )


def test_the_blank_before_the_first_word_is_kept() -> None:
    """A text and what follows it can be joined, though the tokenizer drops blanks in front."""
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode("hello world")
    for place in range(2, len(ids)):
        known = tokenizer.decode(ids[:place], skip_special_tokens=True)
        assert known + Detokenizer(tokenizer, ids[:place]).add(*ids[place:]) == "hello world"


def test_texts_end_with_the_tokenizers_end_token() -> None:
    """Unless told otherwise; other ends and several results are possible."""
    plain = generator_of("gpt2")
    writer = TextGenerator(plain.model, plain.tokenizer, max_new_tokens=20)
    eos = writer.tokenizer.eos_token_id
    ids = torch.tensor([writer.encode("hello")])
    with torch.no_grad():
        whole = generate(writer.model, ids, max_new_tokens=20).new_tokens[0]
        head = writer.model.get_parameter("input_embedding.weight")
        third = int(whole[3])
        head[[eos, third]] = head[[third, eos]]
    try:
        assert (
            1
            <= len(generate(writer.model, ids, eos_token_id=eos, max_new_tokens=20).rows()[0])
            < 20
        )
        ended, endless = writer(["hello"])[0], writer(["hello"], eos_token_id=())[0]
        assert endless.startswith(ended) and len(ended) < len(endless)
        assert len(writer(["hello", "a"], num_beams=3, num_return_sequences=3)) == 6
    finally:
        with torch.no_grad():
            head[[eos, third]] = head[[third, eos]]


def test_a_text_does_not_depend_on_those_beside_it() -> None:
    for name in ("gpt2", "t5"):
        writer = generator_of(name)
        texts = ["hello world, hello", "a", "the cat"]
        assert writer(texts) == [writer([text])[0] for text in texts]
        assert writer([]) == []


def test_conversations_go_through_the_chat_template() -> None:
    writer = generator_of("llama")
    conversation = [{"role": "user", "content": "hello"}]
    text = writer.tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    ids = writer.tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(writer.tokenizer.bos_token_id) == 1
    expected = generate(writer.model, torch.tensor([ids]), config=writer.settled(writer.config))
    found = writer.chat(
        [conversation, [*conversation, {"role": "assistant", "content": "a"}, *conversation]]
    )
    assert found[0] == Detokenizer(writer.tokenizer, ids[-4:]).add(*expected.rows()[0])
    assert len(found) == 2
    with pytest.raises(InputError, match="no chat template"):
        generator_of("gpt2").chat([conversation])
    with pytest.raises(InputError, match="lists of messages"):
        writer.chat(["hello"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="lists of messages"):
        writer.chat([[{"user": "hello"}]])


def test_what_is_no_list_of_texts_is_told() -> None:
    writer = generator_of("gpt2")
    with pytest.raises(InputError, match="texts is a str: expected a list of str"):
        writer("hello")
    with pytest.raises(InputError, match="texts holds int: expected a list of str"):
        writer([3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="text 1 has no tokens"):
        writer(["a", ""])
    with pytest.raises(ConfigError, match="nearest: 'max_new_tokens'"):
        writer(["a"], max_new_token=3)
    with pytest.raises(ConfigError, match="nearest: 'num_beams'"):
        TextGenerator(writer.model, writer.tokenizer, num_beam=3)
    with pytest.raises(ConfigError, match="beams are not streamed"):
        writer.stream("a", num_beams=2)
