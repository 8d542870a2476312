"""From texts to texts: stop strings, pieces of text, chat templates, with small tokenizers of every
kind.
"""

import functools
from typing import Any

import pytest
import torch
from tests.data_sets.common import tokenizer as tokenizer_of
from tests.models import small

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

TOKENIZERS = ["gpt2", "llama", "t5", "cpm1", "glm"]
TEXTS = ["hello world", "the cat", "好"]


@functools.cache
def generator_of(name):
    """A random model with a vocabulary for this tokenizer, and both as a generator, which writes
    plain text without end.
    """
    tokenizer, family = tokenizer_of(name), "T5" if name == "t5" else "GPT2"
    more: dict[str, Any] = {"num_encoder_layers": 2} if name == "t5" else {"position_size": 120}
    more |= {"vocab_size": max(tokenizer.get_vocab().values()) + 5, "dim_model": 32, "num_heads": 4}
    model = small.model(family, std=0.3, dim_ff=48, **more)
    # bytes, <unused 260>
    strange = [token for name, token in tokenizer.get_vocab().items() if name.startswith("<")]
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": ()}
    options["forbidden_tokens"] = [*tokenizer.all_special_ids, *strange]
    return TextGenerator(model, tokenizer, **options)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_make_up_their_text(name):
    """Joined, they are what the tokenizer decodes, after a first token; characters of several
    tokens have their bytes.
    """
    tokenizer = tokenizer_of(name)
    found = texts_of_tokens(tokenizer, 2000).later
    special = set(tokenizer.all_special_ids)
    names = {token: text for text, token in tokenizer.get_vocab().items() if token not in special}
    assert all(found[token] == b"" for token in range(2000) if token not in names)
    # Of single bytes ("<0xE4>") the decoder makes one U+FFFD each unless all in a row are
    # characters.
    known = torch.tensor(
        [token for token, text in names.items() if not text.startswith(("<0x", "<unused "))]
    )
    plain = [token for token in known.tolist() if found[token].decode(errors="ignore").isalpha()]
    drawn = torch.Generator().manual_seed(0)
    for _ in range(100):
        first = plain[int(torch.randint(len(plain), (), generator=drawn))]
        ids = known[torch.randint(len(known), (6,), generator=drawn)].tolist()
        text = tokenizer.decode([first, *ids])[len(tokenizer.decode([first])) :]
        joined = b"".join(found[token] for token in ids).decode(errors="replace")
        assert joined.replace("\ufffd", "") == text.replace("\ufffd", ""), ids
    if name in ("gpt2", "llama"):
        ids = tokenizer.encode("hello 你好 ß", add_special_tokens=False)
        assert b"".join(found[token] for token in ids).decode().strip() == "hello 你好 ß"


@pytest.mark.parametrize("patterns", ["abab", "aab ab bb", "a", "abcab bca cc abca", "aaa aab"])
def test_the_automaton_finds_what_a_search_finds(patterns):
    """In random texts cut into random tokens, at the same token; an `a` that begins a first token
    is dropped, as tokenizers drop a blank.
    """
    drawn = torch.Generator().manual_seed(0)
    tokens = ["", *["a", "b", "c", "ab", "ba", "aa", "abc", "cab", "bcc"]]
    firsts = [token.removeprefix("a") for token in tokens]
    bytes_of = TokenTexts(*(tuple(t.encode() for t in texts) for texts in (firsts, tokens)))
    stop = StopStrings(patterns.split(), bytes_of, torch.device("cpu"))
    rows = torch.randint(len(tokens), (60, 12), generator=drawn)
    prefix = torch.tensor([[0, 3], [1, 0]]).repeat(30, 1)
    mask = torch.tensor([[True, False], [True, True]]).repeat(30, 1)
    states, num_found = stop.first(prefix, mask), 0
    assert states.tolist() == [0, 1] * 30 and stop.first(prefix, None).tolist() == [1] * 60
    for step in range(12):
        states = stop.next(states, rows[:, step])
        expected = []
        for number, row in enumerate(rows[:, : step + 1].tolist()):
            text = "".join(tokens[token] for token in row)
            begun = next((token for token in row if token), 0)  # the first that has text
            if number % 2 == 0:
                text = firsts[begun] + text[len(tokens[begun]) :]
            expected.append(any(pattern in text for pattern in patterns.split()))
        assert stop.found(states).tolist() == expected
        num_found += sum(expected)
    assert 0 < num_found < 60 * 12
    assert byte_automaton([]).tolist() == [[0] * 256, [1] * 256]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_and_pieces(name):
    """Strings end rows where their text has them, across tokens, greedily and by beams: the text
    before them, the tokens with the one that completes them. Pieces make up the text; a text does
    not depend on those beside it.
    """
    writer = generator_of(name)
    plain = writer(TEXTS)
    assert all(len(text) > 8 for text in plain) and writer([]) == []
    assert plain == [writer([text])[0] for text in TEXTS]
    stops = [plain[0][3:6], plain[1][2:5]]
    expected = [
        min((text[: text.find(stop)] for stop in stops if stop in text), key=len, default=text)
        for text in plain
    ]
    assert writer(TEXTS, stop_strings=stops) == expected != plain
    beams = writer(TEXTS, num_beams=3, stop_strings=stops)
    assert not any(stop in text for stop in stops for text in beams)
    ids, tokenizer = torch.tensor([writer.encode(TEXTS[0])]), writer.tokenizer
    options = {"config": writer.config, "tokenizer": tokenizer}
    (row,) = generate(writer.model, ids, stop_strings=stops[0], **options).rows()
    (whole,) = generate(writer.model, ids, **options).rows()
    assert row == whole[: len(row)] and len(row) < 20
    context = [] if name == "t5" else ids[0, -4:].tolist()
    assert stops[0] in Detokenizer(tokenizer, context).add(*row)
    assert stops[0] not in Detokenizer(tokenizer, context).add(*row[:-1])
    drawn = {"do_sample": True, "seed": 1, "temperature": 2.0}
    for search in ({}, drawn, {"stop_strings": stops}):
        pieces = list(writer.stream_batch(TEXTS, **search))
        joined = ["".join(piece for row, piece in pieces if row == place) for place in range(3)]
        assert joined == writer(TEXTS, **search)
        assert all(piece for _, piece in pieces)
        assert len(pieces) > 6 or "stop_strings" in search
    assert "".join(writer.stream(TEXTS[0], stop_strings=stops)) == expected[0]


def test_half_characters_and_beginnings_of_stops_wait():
    tokenizer = tokenizer_of("gpt2")
    reader = Detokenizer(tokenizer)
    pieces = [reader.add(token) for token in tokenizer.encode("a 你 b")]
    assert "".join(pieces) == "a 你 b" and "" in pieces and "\ufffd" not in "".join(pieces)
    for given, expected, rest in (
        ("a w|o|r|k wor|l", "a |||work |", "worl"),
        ("a wor|ld, and|more", "a ||", ""),
    ):
        reader = Detokenizer(tokenizer, stops=["world", "wor!"])
        found = [reader.add(*tokenizer.encode(text)) for text in given.split("|")]
        assert found == expected.split("|")
        assert reader.rest() == rest and reader.rest() == ""


def test_the_context_of_new_tokens():
    """It is four tokens, of which the first may be the middle of a character: new characters are
    read all the same; the blank before the first word is kept, and that of what follows a token
    without text.
    """
    llama, t5 = tokenizer_of("llama"), tokenizer_of("t5")
    vocab = llama.get_vocab()
    for prompt in ("你好", "é好", "a你", "好😀"):
        before, after = (
            [vocab[f"<0x{byte:02X}>"] for byte in text.encode()] for text in (prompt, "世界")
        )
        reader = Detokenizer(llama, before[-4:])
        assert [reader.add(token) for token in after] == ["", "", "世", "", "", "界"]
    ids = llama.encode("hello world")
    for place in range(2, len(ids)):
        known = llama.decode(ids[:place], skip_special_tokens=True)
        assert known + Detokenizer(llama, ids[:place]).add(*ids[place:]) == "hello world"
    ids = t5.convert_tokens_to_ids(
        ["▁h", "ell", "▁", "o", "<unk>", "▁w", "</s>", "<unk>", "▁", "or", "▁w"]
    )
    reader, expected = Detokenizer(t5), t5.decode(ids, skip_special_tokens=True)
    assert expected.count(" ") > 3 and Detokenizer(t5).add(*ids) == expected
    assert "".join([*map(reader.add, ids), reader.rest()]) == expected


def test_texts_end_with_the_tokenizers_end_token():
    """Unless told otherwise; other ends and several results are possible."""
    plain = generator_of("gpt2")
    writer = TextGenerator(plain.model, plain.tokenizer, max_new_tokens=20)
    (endless,), config = plain(["hello"]), writer.with_defaults(writer.config)
    for name in ("eos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(plain.tokenizer, name)
    ids = torch.tensor([writer.encode("hello")])
    third = int(generate(plain.model, ids, config=plain.config).new_tokens[0, 3])
    ended = plain(["hello"], eos_token_id=third)[0]
    assert endless.startswith(ended) and len(ended) < len(endless)
    assert len(writer(["hello", "a"], num_beams=3, num_return_sequences=3)) == 6


def test_conversations_go_through_the_chat_template():
    writer, tokenizer = generator_of("llama"), tokenizer_of("llama")
    one = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    (row,) = generate(
        writer.model, torch.tensor([ids]), config=writer.with_defaults(writer.config)
    ).rows()
    found = writer.chat([one, [*one, {"role": "assistant", "content": "a"}, *one]])
    assert len(found) == 2 and found[0] == Detokenizer(tokenizer, ids[-4:]).add(*row)
    assert "".join(writer.stream_chat(one)) == found[0]
    with pytest.raises(InputError, match="no chat template"):
        generator_of("gpt2").chat([one])
    for bad in (["hello"], [[{"user": "hello"}]]):
        with pytest.raises(InputError, match="lists of messages"):
            writer.chat(bad)


def test_what_is_no_list_of_texts_is_told():
    writer, texts = generator_of("gpt2"), ["a"]
    for bad, message in (
        ("hello", "texts is a str: expected a list of str"),
        ([3], "texts holds int: expected a list of str"),
        (["a", ""], "text 1 has no tokens"),
    ):
        with pytest.raises(InputError, match=message):
            writer(bad)
    with pytest.raises(ConfigError, match="nearest: 'max_new_tokens'"):
        writer(texts, max_new_token=3)
    with pytest.raises(ConfigError, match="nearest: 'num_beams'"):
        TextGenerator(writer.model, writer.tokenizer, num_beam=3)
    with pytest.raises(ConfigError, match="beams are not streamed"):
        writer.stream("a", num_beams=2)
