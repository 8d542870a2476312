"""The tokenizers of CPM-1, CPM-2 and GLM: ids worked out by hand from the vocabulary, and what
batches look like.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from model_center.errors import DataError, IdentifierError
from model_center.tokenizer import CPM1Tokenizer, CPM2Tokenizer, GLMTokenizer
from model_center.tokenizer.word_pieces import longest_pieces, read_vocabulary

FOLDERS = pathlib.Path(__file__).parents[1] / "data" / "tokenizers"

# 0        1      2        3        4       5       6     7     8     9   10   11     12   13   14
# 15
WORDS = [
    "<unk>",
    "<s>",
    "<eod>",
    "<pad>",
    "</_>",
    "</n>",
    "今天",
    "天",
    "气",
    "好",
    "a",
    "abc",
    "b",
    "A",
    "!",
    "学校",
]


def cpm1(folder: pathlib.Path, words: list[str] = WORDS, **options: Any) -> CPM1Tokenizer:
    """A tokenizer over `words`."""
    file = folder / "vocab.txt"
    file.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return CPM1Tokenizer(file, **options)


def cpm2(folder: pathlib.Path, **options: Any) -> CPM2Tokenizer:
    """A tokenizer over `WORDS`, with CPM-2's tokens for blanks and three sentinels, ids 16 to
    18.
    """
    words = [{"</_>": "\u2582", "</n>": "\u2583"}.get(word, word) for word in WORDS] + [
        "<s_0>",
        "<s_1>",
        "<s_2>",
    ]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return CPM2Tokenizer.from_pretrained(folder, max_sentinels=3, **options)


@pytest.mark.parametrize(
    ("text", "ids", "back"),
    [
        ("今天天气", [6, 7, 8], "今天天气"),  # the longest piece first, whatever the words
        ("学校好", [15, 9], "学校好"),
        ("今天 好\n好", [6, 4, 9, 5, 9], "今天 好\n好"),
        ("好</_>好</n>", [9, 4, 9, 5], "好 好\n"),  # the tokens for blanks may be written out
        ("  \n\n", [4, 4, 5, 5], "  \n\n"),
        ("abcab", [11, 10, 12], "abcab"),
        ("好猫好", [9, 0, 9], "好<unk>好"),
        ("x猫y", [0, 0, 0], "<unk><unk><unk>"),
        ("a" * 200, [10] * 200, "a" * 200),
        ("a" * 201, [0], "<unk>"),
        ("<eod>", [0, 0, 0, 0, 0], "<unk>" * 5),  # a text cannot end a document
        ("ＡＢ！", [0, 0, 0], "<unk><unk><unk>"),
        ("", [], ""),
    ],
)
def test_cpm1_encodes_and_decodes(
    tmp_path: pathlib.Path, text: str, ids: list[int], back: str
) -> None:
    """Ids as the vocabulary's lines say, no special tokens added; decoding gives the blanks
    back.
    """
    tokenizer = cpm1(tmp_path)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == back
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids


def test_full_width_characters_are_folded_when_asked(tmp_path: pathlib.Path) -> None:
    """ "Ａ！" are A and !; the wide blank becomes a visible one, which this vocabulary does not
    have.
    """
    folding = cpm1(tmp_path, q2b=True)
    # letter by letter: words are looked for before
    assert folding.encode("Ａ！ａｂ") == [13, 14, 10, 12]
    assert folding.encode("好\u3000好") == [9, 0, 9]
    with_blank = cpm2(tmp_path, q2b=True)
    assert with_blank.encode("好\u3000好") == [9, 4, 9]


def test_cpm1_names_and_sizes(tmp_path: pathlib.Path) -> None:
    """Two private tokens follow the vocabulary: `len` counts them, `vocab_size` does not, and they
    decode to blanks.
    """
    tokenizer = cpm1(tmp_path, max_len=9)
    assert (tokenizer.vocab_size, len(tokenizer), tokenizer.model_max_length) == (16, 18, 9)
    assert (tokenizer.unk_id, tokenizer.eod_id, tokenizer.pad_id) == (0, 2, 3)
    assert (tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 2, 3)
    assert (
        tokenizer.convert_ids_to_tokens([6, 7])
        == tokenizer.convert_ids_to_tokens(torch.tensor([6, 7]))  # type: ignore[call-overload]
        == ["今天", "天"]
    )
    assert tokenizer.convert_tokens_to_ids(["天", "猫"]) == [7, 0]
    assert tokenizer.check("今天")
    assert not tokenizer.check("猫")
    assert tokenizer.decode([6, -1, 9, -100]) == "今天好"
    assert tokenizer.decode(torch.tensor([16, 6, 17])) == " 今天\n"
    assert tokenizer.decode([9, 4, 9, 2], skip_special_tokens=True) == "好 好"
    assert tokenizer.decode([9, 2]) == "好<eod>"
    with pytest.raises(DataError, match="no token with id 18"):
        tokenizer.decode([18])


def test_cpm1_makes_batches(tmp_path: pathlib.Path) -> None:
    """Pairs, padding, truncation and tensors, as with every tokenizer of transformers."""
    tokenizer = cpm1(tmp_path)
    batch = tokenizer(
        ["今天", "今天天气"],
        ["好", "好好好"],
        padding=True,
        truncation=True,
        max_length=5,
        return_tensors="pt",
    )
    assert batch["input_ids"].tolist() == [[6, 9, 3, 3, 3], [6, 7, 8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    padded = tokenizer.pad({"input_ids": [[9], [9, 9]]}, padding="max_length", max_length=3)
    assert padded["input_ids"] == [[9, 3, 3], [9, 9, 3]]
    assert tokenizer.batch_decode([[6, 4, 9], [9]]) == ["今天 好", "好"]
    assert isinstance(tokenizer, PreTrainedTokenizerBase)


@pytest.mark.parametrize("make", [cpm1, cpm2])
def test_cpm_survives_saving_and_pickling(tmp_path: pathlib.Path, make: Callable[..., Any]) -> None:
    """A saved tokenizer encodes as before, with its options; so does a pickled one."""
    (tmp_path / "first").mkdir()
    tokenizer = make(tmp_path / "first", q2b=True)
    text = "今天 Ａ\n学校猫"
    ids = tokenizer.encode(text)
    tokenizer.save_pretrained(tmp_path / "second")
    loaded = type(tokenizer).from_pretrained(tmp_path / "second")
    assert (tmp_path / "second" / "vocab.txt").read_bytes() == (
        tmp_path / "first" / "vocab.txt"
    ).read_bytes()
    assert ids == loaded.encode(text) == pickle.loads(pickle.dumps(tokenizer)).encode(text)
    assert (len(loaded), loaded.q2b) == (len(tokenizer), True)
    assert loaded.decode(ids, skip_special_tokens=True) == "今天 A\n学校"


def test_cpm2_has_sentinels_and_blanks_of_its_own(tmp_path: pathlib.Path) -> None:
    """Spaces are "▂", ends of lines "▃"; sentinels are numbered from 0."""
    tokenizer = cpm2(tmp_path)
    assert tokenizer.encode("今天 好\n") == [6, 4, 9, 5]
    assert tokenizer.tokenize("好 \n") == ["好", "\u2582", "\u2583"]
    assert tokenizer.encode("好\u2582") == [9, 4]
    assert tokenizer.decode([6, 4, 9, 5, -1]) == "今天 好\n"
    assert [tokenizer.get_sentinel_id(index) for index in range(tokenizer.get_sentinel_num())] == [
        16,
        17,
        18,
    ]
    assert (tokenizer.sod_id, tokenizer.eod_id, tokenizer.vocab_size, len(tokenizer)) == (
        1,
        2,
        19,
        21,
    )
    with pytest.raises(IndexError):
        tokenizer.get_sentinel_id(3)


@pytest.mark.parametrize("name", ["cpm1", "cpm2"])
def test_the_stored_vocabularies_know_the_chinese_corpus(name: str) -> None:
    """No unknown character, and the text comes back."""
    kinds: dict[str, type[CPM1Tokenizer | CPM2Tokenizer]] = {
        "cpm1": CPM1Tokenizer,
        "cpm2": CPM2Tokenizer,
    }
    tokenizer = kinds[name].from_pretrained(FOLDERS / name)
    text = "\n".join(
        (FOLDERS.parent / "corpus" / "chinese.txt").read_text(encoding="utf-8").splitlines()[:20]
    )
    ids = tokenizer.encode(text)
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_vocabulary_without_the_named_tokens_is_refused(tmp_path: pathlib.Path) -> None:
    """Not at the first text, but at construction."""
    with pytest.raises(DataError, match="has no </n>: name the vocabulary's own"):
        cpm1(tmp_path, ["<unk>", "<eod>", "<pad>", "</_>"])
    with pytest.raises(DataError, match="has no <s_3>"):
        cpm2(tmp_path)
        CPM2Tokenizer.from_pretrained(tmp_path, max_sentinels=4)


def test_a_token_may_stand_on_two_lines(tmp_path: pathlib.Path) -> None:
    """Ids are line numbers all the same; texts get the last one."""
    tokenizer = cpm1(tmp_path, [*WORDS, "天", "河"])
    assert tokenizer.encode("天河") == [16, 17]
    assert tokenizer.decode([7, 16, 17]) == "天天河"
    assert (tokenizer.vocab_size, len(tokenizer)) == (18, 20)


def test_tokens_can_be_added(tmp_path: pathlib.Path) -> None:
    """They get ids of their own, after all others, and are found in texts where that is allowed."""
    glm = GLMTokenizer(FOLDERS / "glm" / "vocab.model")
    for tokenizer in (cpm1(tmp_path, [*WORDS, "天", "河"], split_special_tokens=False), glm):
        before = len(tokenizer)
        assert tokenizer.add_tokens(["<new>"]) == 1
        assert len(tokenizer) == before + 1
        assert before in tokenizer.encode("今天<new>今天")
        assert "<new>" in tokenizer.decode([before])
    assert before == 50009


def test_missing_vocabularies_are_named(tmp_path: pathlib.Path) -> None:
    """A file that is not there, a folder without one, and a name that stands for nothing."""
    with pytest.raises(DataError, match=r"no vocabulary .*vocab\.txt"):
        CPM1Tokenizer(tmp_path / "vocab.txt")
    with pytest.raises(DataError, match=r"no vocabulary .*vocab\.model"):
        GLMTokenizer(tmp_path / "vocab.model")
    for tokenizer in (CPM1Tokenizer, CPM2Tokenizer, GLMTokenizer):
        with pytest.raises(DataError, match="holds no vocabulary for"):
            tokenizer.from_pretrained(tmp_path)
        with pytest.raises(IdentifierError, match="cpm1-large"):
            tokenizer.from_pretrained("cpm1-lrge")


def test_longest_pieces_go_on_after_what_is_unknown() -> None:
    """One unknown per character, then the longest piece again."""
    assert longest_pieces("xabcyab", {"a", "ab", "abc"}, "?") == ["?", "abc", "?", "ab"]
    assert longest_pieces("", {"a"}, "?") == []


def test_glm_has_its_special_tokens() -> None:
    """Published ids, decoded by name; pieces in between are text again."""
    tokenizer = GLMTokenizer(FOLDERS / "glm" / "vocab.model")
    assert tokenizer.decode([50002, 50006, 50007, 50008]) == "[CLS][S][E][MASK]"
    ids = tokenizer.encode("今天[MASK]天气很好")
    pieces = tokenizer.pieces
    assert ids == [*pieces.encode("今天"), 50008, *pieces.encode("天气很好")]
    assert tokenizer.decode(ids) == "今天[MASK]天气很好"
    # the text after it began with a blank piece
    assert tokenizer.decode(ids, skip_special_tokens=True) == "今天 天气很好"
    assert tokenizer.encode("小明是老师") == pieces.encode("小明是老师")
    assert tokenizer.tokenize("小明是老师") == pieces.encode("小明是老师", out_type=str)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (
        50006,
        50007,
        50008,
    )
    assert tokenizer.convert_token_to_id("[S]") == 50006
    assert tokenizer.convert_token_to_id("今天") == pieces.piece_to_id("今天")
    assert tokenizer.convert_id_to_token(50007) == "[E]"
    assert tokenizer.vocab_size == pieces.get_piece_size()
    with pytest.raises(DataError, match="no piece with id 40000"):
        tokenizer.decode([40000])


def test_glm_makes_batches_and_survives_saving(tmp_path: pathlib.Path) -> None:
    """The stored small vocabulary has its special tokens right after the pieces."""
    tokenizer = GLMTokenizer.from_pretrained(FOLDERS / "glm")
    assert tokenizer.mask_token_id == tokenizer.vocab_size + 8
    batch = tokenizer(["今天[MASK]", "今天天气很好"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist()[0][-1] == 0
    assert batch["input_ids"][0, -1] == tokenizer.pad_token_id == tokenizer.vocab_size
    tokenizer.save_pretrained(tmp_path)
    loaded = GLMTokenizer.from_pretrained(tmp_path)
    text = "今天[MASK]天气\n很好 猫"
    assert (
        tokenizer.encode(text)
        == loaded.encode(text)
        == pickle.loads(pickle.dumps(tokenizer)).encode(text)
    )
    with pytest.raises(DataError, match="pieces: expected at most"):
        GLMTokenizer(FOLDERS / "glm" / "vocab.model", first_special_id=10)


def test_a_vocabulary_that_is_no_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"<unk>\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"vocab\.txt: it is no text"):
        read_vocabulary(tmp_path / "vocab.txt")
