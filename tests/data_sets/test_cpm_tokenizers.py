"""The tokenizers of CPM-1, CPM-2 and GLM: ids worked out by hand from the vocabulary, and what
batches look like.
"""

import pickle

import pytest
import torch
from tests.data_sets.common import DATA, FOLDERS, refused, tokenizer

from model_center.errors import IdentifierError
from model_center.tokenizer import CPM1Tokenizer, CPM2Tokenizer, GLMTokenizer
from model_center.tokenizer.word_pieces import longest_pieces, read_vocabulary

# ids 0 to 5 are special, 6 to 15 are words
SPECIAL, BLANKS = ["<unk>", "<s>", "<eod>", "<pad>"], ["</_>", "</n>"]
WORDS = "今天 天 气 好 a abc b A ! 学校"
GLM = FOLDERS / "glm" / "vocab.model"


def cpm1(folder, more="", **options):
    """A tokenizer over `WORDS` and `more`."""
    write(folder, *SPECIAL, *BLANKS, *WORDS.split(), *more.split())
    return CPM1Tokenizer(folder / "vocab.txt", **options)


def cpm2(folder, num_sentinels=3, **options):
    """A tokenizer over `WORDS`, with CPM-2's tokens for blanks and three sentinels, ids 16 to
    18.
    """
    write(folder, *SPECIAL, "\u2582", "\u2583", *WORDS.split(), "<s_0>", "<s_1>", "<s_2>")
    return CPM2Tokenizer.from_pretrained(folder, max_sentinels=num_sentinels, **options)


def write(folder, *words):
    text = "".join(f"{word}\n" for word in words)
    (folder / "vocab.txt").write_text(text, "utf-8")


# A text, its ids, and what they decode to where that is something else.
ENCODED = [
    ("今天天气", "6 7 8"),  # the longest piece first, whatever the words
    ("学校好", "15 9"),
    ("今天 好\n好", "6 4 9 5 9"),
    ("好</_>好</n>", "9 4 9 5", "好 好\n"),  # the tokens for blanks may be written out
    ("  \n\n", "4 4 5 5"),
    ("abcab", "11 10 12"),
    ("好猫好", "9 0 9", "好<unk>好"),
    ("x猫y", "0 0 0", "<unk><unk><unk>"),
    ("a" * 200, "10 " * 200),
    ("a" * 201, "0", "<unk>"),
    ("<eod>", "0 0 0 0 0", "<unk>" * 5),  # a text cannot end a document
    ("ＡＢ！", "0 0 0", "<unk><unk><unk>"),
    ("", ""),
]


@pytest.mark.parametrize("row", ENCODED, ids=lambda row: row[0][:9])
def test_cpm1_encodes_and_decodes(tmp_path, row):
    """Ids as the vocabulary's lines say, no special tokens added; decoding gives the blanks
    back.
    """
    reader, (text, *_), ids = cpm1(tmp_path), row, [*map(int, row[1].split())]
    assert reader.encode(text) == ids
    assert reader.decode(ids) == (row[2:] or (text,))[0]
    assert reader.convert_tokens_to_ids(reader.tokenize(text)) == ids


def test_full_width_characters_are_folded_when_asked(tmp_path):
    """ "Ａ！" are A and !; the wide blank becomes a visible one, which CPM-1's vocabulary does not
    have.
    """
    folding = cpm1(tmp_path, q2b=True)
    # letter by letter: words are looked for before
    assert folding.encode("Ａ！ａｂ") == [13, 14, 10, 12]
    assert folding.encode("好\u3000好") == [9, 0, 9]
    assert cpm2(tmp_path, q2b=True).encode("好\u3000好") == [9, 4, 9]


def test_cpm1_names_and_sizes(tmp_path):
    """Two private tokens follow the vocabulary: `len` counts them, `vocab_size` does not, and they
    decode to blanks.
    """
    reader = cpm1(tmp_path, max_len=9)
    assert (reader.vocab_size, len(reader), reader.model_max_length) == (16, 18, 9)
    assert (reader.unk_id, reader.eod_id, reader.pad_id) == (0, 2, 3)
    assert (reader.unk_token_id, reader.eos_token_id, reader.pad_token_id) == (0, 2, 3)
    either = [[6, 7], torch.tensor([6, 7])]
    for ids in either:
        assert reader.convert_ids_to_tokens(ids) == ["今天", "天"]
    assert reader.convert_tokens_to_ids(["天", "猫"]) == [7, 0]
    assert reader.check("今天") and not reader.check("猫")
    assert reader.decode([6, -1, 9, -100]) == "今天好"
    assert reader.decode(torch.tensor([16, 6, 17])) == " 今天\n"
    assert reader.decode([9, 4, 9, 2], skip_special_tokens=True) == "好 好"
    assert reader.decode([9, 2]) == "好<eod>"
    with refused("no token with id 18"):
        reader.decode([18])


@pytest.mark.parametrize("make", [cpm1, cpm2])
def test_cpm_survives_saving_and_pickling(tmp_path, make):
    """A saved tokenizer encodes as before, with its options; so does a pickled one."""
    folder = tmp_path / "second"
    reader, text = make(tmp_path, q2b=True), "今天 Ａ\n学校猫"
    ids = reader.encode(text)
    reader.save_pretrained(folder)
    loaded = type(reader).from_pretrained(folder)
    assert (folder / "vocab.txt").read_bytes() == (tmp_path / "vocab.txt").read_bytes()
    assert ids == loaded.encode(text) == pickle.loads(pickle.dumps(reader)).encode(text)
    assert (len(loaded), loaded.q2b) == (len(reader), True)
    assert loaded.decode(ids, skip_special_tokens=True) == "今天 A\n学校"


def test_cpm2_has_sentinels_and_blanks_of_its_own(tmp_path):
    """Spaces are "▂", ends of lines "▃"; sentinels are numbered from 0."""
    reader = cpm2(tmp_path)
    assert reader.encode("今天 好\n") == [6, 4, 9, 5]
    assert reader.tokenize("好 \n") == ["好", "\u2582", "\u2583"]
    assert reader.encode("好\u2582") == [9, 4]
    assert reader.decode([6, 4, 9, 5, -1]) == "今天 好\n"
    found = [reader.get_sentinel_id(index) for index in range(reader.get_sentinel_num())]
    assert found == [16, 17, 18]
    assert (reader.sod_id, reader.eod_id, reader.vocab_size, len(reader)) == (1, 2, 19, 21)
    with pytest.raises(IndexError):
        reader.get_sentinel_id(3)


def test_the_stored_vocabularies_know_the_chinese_corpus():
    """No unknown character, and the text comes back."""
    lines = (DATA / "corpus" / "chinese.txt").read_text("utf-8").splitlines()
    text = "\n".join(lines[:20])
    for name in ("cpm1", "cpm2"):
        ids = tokenizer(name).encode(text)
        assert tokenizer(name).unk_id not in ids
        assert tokenizer(name).decode(ids) == text


def test_vocabularies_that_will_not_do(tmp_path):
    """At construction: without the named tokens, not there, a folder without one, no text, and a
    name that stands for nothing.
    """
    for make in (CPM1Tokenizer, CPM2Tokenizer, GLMTokenizer):
        name = "vocab.model" if make is GLMTokenizer else "vocab.txt"
        with refused(rf"no vocabulary .*{name}"):
            make(tmp_path / name)
        with refused("holds no vocabulary for"):
            make.from_pretrained(tmp_path)
        with pytest.raises(IdentifierError, match="cpm1-large"):
            make.from_pretrained("cpm1-lrge")
    write(tmp_path, *SPECIAL, "</_>")
    with refused("has no </n>: name the vocabulary's own"):
        CPM1Tokenizer(tmp_path / "vocab.txt")
    with refused("has no <s_3>"):
        cpm2(tmp_path, 4)
    with refused("pieces: expected at most"):
        GLMTokenizer(GLM, first_special_id=10)
    (tmp_path / "vocab.txt").write_bytes(b"<unk>\n\xff\xfe\n")
    with refused(r"vocab\.txt: it is not text"):
        read_vocabulary(tmp_path / "vocab.txt")


def test_a_token_may_stand_on_two_lines(tmp_path):
    """Ids are line numbers all the same; texts get the last one. Tokens can be added: they get ids
    of their own, after all others, and are found in texts where that is allowed.
    """
    reader = cpm1(tmp_path, "天 河", split_special_tokens=False)
    assert reader.encode("天河") == [16, 17]
    assert reader.decode([7, 16, 17]) == "天天河"
    assert (reader.vocab_size, len(reader)) == (18, 20)
    for one, before in ((reader, 20), (GLMTokenizer(GLM), 50009)):
        assert one.add_tokens(["<new>"]) == 1
        assert len(one) == before + 1
        assert before in one.encode("今天<new>今天")
        assert "<new>" in one.decode([before])


def test_longest_pieces_go_on_after_what_is_unknown():
    """One unknown per character, then the longest piece again."""
    assert longest_pieces("xabcyab", {"a", "ab", "abc"}, "?") == ["?", "abc", "?", "ab"]
    assert longest_pieces("", {"a"}, "?") == []


def test_glm_has_its_special_tokens():
    """Published ids, decoded by name; pieces in between are text again."""
    reader = GLMTokenizer(GLM)
    pieces = reader.pieces
    assert reader.decode([50002, 50006, 50007, 50008]) == "[CLS][S][E][MASK]"
    ids = reader.encode("今天[MASK]天气很好")
    assert ids == [*pieces.encode("今天"), 50008, *pieces.encode("天气很好")]
    assert reader.decode(ids) == "今天[MASK]天气很好"
    # the text after it began with a blank piece
    assert reader.decode(ids, skip_special_tokens=True) == "今天 天气很好"
    assert reader.encode("小明是老师") == pieces.encode("小明是老师")
    assert reader.tokenize("小明是老师") == pieces.encode("小明是老师", out_type=str)
    found = reader.bos_token_id, reader.eos_token_id, reader.mask_token_id
    assert found == (50006, 50007, 50008)
    assert reader.convert_token_to_id("[S]") == 50006
    assert reader.convert_token_to_id("今天") == pieces.piece_to_id("今天")
    assert reader.convert_id_to_token(50007) == "[E]"
    assert reader.vocab_size == pieces.get_piece_size()
    with refused("no piece with id 40000"):
        reader.decode([40000])


def test_glm_makes_batches_and_survives_saving(tmp_path):
    """The stored small vocabulary has its special tokens right after the pieces."""
    reader = tokenizer("glm")
    assert reader.mask_token_id == reader.vocab_size + 8
    batch = reader(["今天[MASK]", "今天天气很好"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist()[0][-1] == 0
    assert batch["input_ids"][0, -1] == reader.pad_token_id == reader.vocab_size
    reader.save_pretrained(tmp_path)
    text = "今天[MASK]天气\n很好 猫"
    for other in (GLMTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(reader))):
        assert other.encode(text) == reader.encode(text)
