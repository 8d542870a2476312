"""`python -m model_center preprocess`: against transformers and plain Python; text that is
broken.
"""

import gzip
import itertools
import json
import re
from pathlib import Path

import pytest
from tests.data_sets.common import DATA, FOLDERS, tokenizer

from model_center.__main__ import main
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.preprocess import documents
from model_center.tools import preprocess_cpm1_lm

GPT2 = str(FOLDERS / "gpt2")
ENGLISH = DATA / "corpus" / "english.txt"
Said = pytest.CaptureFixture[str]


def preprocess(source, out, more="", reader=GPT2):
    """Run the command in this process; the sequences that it wrote."""
    assert run(source, out, more, reader) == 0
    return [row.tolist() for row in opened(out)]


def run(source, out, more="", reader=GPT2):
    words = f"preprocess --input {source} --output {out} --tokenizer {reader} {more}"
    return main(words.split())


def opened(out):
    return MMapIndexedDataset(str(out))


def expected(*lines, end=False):
    """What transformers makes of each."""
    reader = tokenizer("gpt2")
    return [reader.encode(line) + [reader.eos_token_id] * end for line in lines]


def test_text(tmp_path, capsys):
    """A document per line, ended; the folder of the output is made; a summary on stderr. Long ones
    are split into pieces that join to the document.
    """
    want, out = expected(*ENGLISH.read_text().splitlines(), end=True), tmp_path / "new" / "out"
    assert preprocess(ENGLISH, out, "--append-eod") == want
    assert opened(out).doc_idx.tolist() == list(range(len(want) + 1))
    assert str(opened(out).dtype) == "uint16"
    count = sum(map(len, want))
    told = f"{len(want)} documents, {len(want)} sequences, {count:,} tokens"
    assert told in capsys.readouterr().err
    got = preprocess(ENGLISH, tmp_path / "out", "--append-eod --split-length 16")
    pieces = [[ids[start : start + 16] for start in range(0, len(ids), 16)] for ids in want]
    assert got == list(itertools.chain(*pieces))
    ends = [0, *itertools.accumulate(map(len, pieces))]
    assert opened(tmp_path / "out").doc_idx.tolist() == ends


def test_lines_of_every_kind(tmp_path):
    """JSON lines of several files in the order given, under any key; blank lines and empty texts are
    skipped; odd characters survive; the end of a line is no part of the document.
    """
    texts = ["one line\nand another", "naïve 漢字 🙂", "  ", "", "half a pair: \ud83d"]
    one, two, plain = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "a.txt"))
    one.write_text("\n".join(json.dumps({"id": 1, "body": text}) for text in texts) + "\n\n")
    two.write_text('\ufeff{"body": "last, without a line end"}')
    got = preprocess(f"{one} {two}", tmp_path / "out", "--key body --dtype int32")
    assert got == expected(*texts[:2], "half a pair: ?", "last, without a line end")
    assert str(opened(tmp_path / "out").dtype) == "int32"
    line = b'{"text": "one"}\n'
    for name in ("a.JSONL", "a.ndjson", "c.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
        assert preprocess(tmp_path / name, tmp_path / "named") == expected("one")
    plain.write_bytes(b"one\r\n\r\n \ntwo\n")
    assert preprocess(plain, tmp_path / "plain") == expected("one", "two")


@pytest.mark.long
def test_workers_keep_the_order(tmp_path, monkeypatch, capsys):
    """Byte for byte the same files; an error in one of them comes out as it is, the first in the
    file's order, and nothing is left.
    """
    monkeypatch.setattr(documents, "BATCH_BYTES", 2000)  # some twenty batches
    for workers in (1, 2):
        preprocess(ENGLISH, tmp_path / f"out{workers}", f"--workers {workers}")
    for ending in (".bin", ".idx"):
        one, two = (tmp_path / f"out{workers}{ending}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()
        one.unlink()
        two.unlink()
    monkeypatch.setattr(documents, "BATCH_BYTES", 100)
    lines = [f'{{"text": "line {n}"}}\n' if n not in {30, 40} else "[]\n" for n in range(1, 60)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(lines))
    assert run(source, tmp_path / "out", "--workers 2") == 1
    assert "a.jsonl:30 is a JSON list" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


# --- what CPM-1 was trained on


@pytest.fixture
def letters(tmp_path):
    """A vocabulary of single characters: id 0 to 5 as CPM-1's, then a, b, c, ..."""
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    words = "<unk>\n<s>\n<pad>\n</_>\n</n>\n<eod>\n" + "\n".join("abcdefgh")
    (folder / "vocab.txt").write_text(f"{words}\n")
    return str(folder)


SPACE, A, B = 3, 6, 7


def test_the_preset_of_cpm1(tmp_path, letters):
    """Worked out by hand: see the comment beside the preset. Given arguments go before it."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    odd = "a" * 16 + "<n>" + "Ω" * 9 + "b" * 16
    text.write_text("\n".join(["a" * 31, "b" * 32, odd, "a " * 265, "a " * 275]))
    long = [1] + [A, SPACE] * 275 + [5]
    assert (
        preprocess(text, out, "--preset cpm1", letters)
        == [
            [1] + [B] * 32 + [5],  # 31 ids are too few, 32 are enough
            [1] + [A] * 16 + [4] + [B] * 16 + [5],  # a line break, and nothing for what is unknown
            [1] + [A, SPACE] * 255 + [A],  # the last 20 of 532 ids are dropped
            long[:512],
            long[512:],
        ]
    )
    assert opened(out).doc_idx.tolist() == [0, 1, 2, 3, 5]
    assert str(opened(out).dtype) == "int32"
    text.write_text("a " * 35)
    preprocess(text, out, "--preset cpm1 --split-length 40", letters)
    assert opened(out).sizes.tolist() == [40, 32]


def test_the_program_of_model_center(tmp_path, letters):
    """Its flags, and its names of files; the same bytes as with the preset."""
    text = tmp_path / "part_3.txt"
    text.write_text("\n".join(["a " * 275, "b" * 40]))
    preprocess(text, tmp_path / "out", "--preset cpm1", letters)
    flags = f"--input {tmp_path}/part_ --uid 3 --tokenizer_path {letters}"
    made = f"{flags} --output_path {tmp_path}/new --workers 1 --log_interval 5"
    preprocess_cpm1_lm.main(made.split())
    for end in (".bin", ".idx"):
        found = tmp_path / "new" / f"cpm1_lm_document_context_3{end}"
        assert found.read_bytes() == Path(f"{tmp_path / 'out'}{end}").read_bytes()
    with pytest.raises(SystemExit):
        preprocess_cpm1_lm.get_args([*made.split(), "--dataset_impl", "lazy"])
    args = preprocess_cpm1_lm.get_args([*flags.split(), "--output_path", "x"])
    assert (args.output_prefix, args.workers, args.log_interval) == ("cpm1_lm", 64, 10000)


# --- what cannot work


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2 is not JSON"),
        (b'["a"]\n', r"a\.jsonl:1 is a JSON list"),
        (b'{"text": "a"}\n\n{"txt": "a"}\n', r"a\.jsonl:3 has only the keys 'txt'"),
        (b'{"text": 5}\n', r"a\.jsonl:1 has int under 'text'"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2 is not UTF-8"),
        (b"\n\n", "no document in .*: 2 lines"),
    ],
)
def test_broken_text_is_named(tmp_path, content, complaint, capsys):
    """With file and line, exit status 1, and nothing is left behind: not even the folder."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(content)
    assert run(source, tmp_path / "new" / "out") == 1
    assert re.match(f"error: .*{complaint}", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("source", "more", "complaint"),
    [
        ("nowhere.txt", "", "nowhere.txt is not a file"),
        ("nowhere.csv", "", "nowhere.csv is a table: give its texts as JSONL"),
        (ENGLISH, f"--tokenizer {DATA / 'corpus'}", "holds no tokenizer"),
        (ENGLISH, "--workers 0", "workers is 0"),
        (ENGLISH, "--split-length 0", "split-length is 0"),
        (ENGLISH, "--key text", "is for JSONL"),
        (ENGLISH, "--output folder/", "output folder/ is a folder"),
        (f"{ENGLISH} {DATA / 'corpus' / 'english.jsonl'}", "", "files of one kind"),
        (ENGLISH, f"--tokenizer {FOLDERS / 'bert'} --append-eod", "no end-of-document token"),
    ],
)
def test_arguments_that_cannot_work(tmp_path, source, more, complaint, capsys):
    """Each is said before anything is written."""
    assert run(source, tmp_path / "out", more) == 1
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path, capsys):
    """Each command has its arguments, and says its errors plainly."""
    for words, said in (
        (
            ["--help"],
            r"preprocess\s+tokenize text(.|\n)*convert\s+convert a folder of Hugging Face",
        ),
        (["preprocess", "--help"], "--split-length"),
        (["convert", "--help"], "--to"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert re.search(said, capsys.readouterr().out)
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
