"""`python -m model_center preprocess`: against transformers and plain Python; text that is
broken.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.runner import ROOT
from transformers import AutoTokenizer

from model_center.__main__ import main
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.preprocess import documents
from model_center.tools import preprocess_cpm1_lm

DATA = ROOT / "tests" / "data"
GPT2 = str(DATA / "tokenizers" / "gpt2")
ENGLISH = DATA / "corpus" / "english.txt"


def preprocess(out: Path, *arguments: object) -> MMapIndexedDataset:
    """Run the command in this process and open what it wrote."""
    assert main(["preprocess", "--output", str(out), *map(str, arguments)]) == 0
    return MMapIndexedDataset(str(out))


def lists(dataset: Any) -> list[list[int]]:
    """All sequences. Python iterates by `__getitem__`, which torch does not declare."""
    return [row.tolist() for row in dataset]


def expected(lines: list[str], end: bool = True) -> list[list[int]]:
    """What transformers makes of each."""
    tokenizer = AutoTokenizer.from_pretrained(GPT2)
    return [tokenizer.encode(line) + [tokenizer.eos_token_id] * end for line in lines]


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A document per line, ended; the folder of the output is made; a summary on stderr."""
    got = preprocess(
        tmp_path / "new" / "out", "--input", ENGLISH, "--tokenizer", GPT2, "--append-eod"
    )
    want = expected(ENGLISH.read_text().splitlines())
    assert lists(got) == want
    assert got.doc_idx.tolist() == list(range(len(want) + 1))
    assert str(got.dtype) == "uint16"
    assert f"{len(want)} documents, {len(want)} sequences" in capsys.readouterr().err


def test_json_lines_in_several_files(tmp_path: Path) -> None:
    """In the order given, under any key; blank lines and empty texts are skipped; odd characters
    survive.
    """
    texts = ["one line\nand another", "naïve 漢字 🙂", "  ", "", "half a pair: \ud83d"]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"id": 1, "body": text}) for text in texts) + "\n\n"
    )
    (tmp_path / "b.jsonl").write_text('\ufeff{"body": "last, without a line end"}')
    got = preprocess(
        tmp_path / "out",
        "--input",
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        "--tokenizer",
        GPT2,
        "--key",
        "body",
        "--dtype",
        "int32",
    )
    assert lists(got) == expected(
        [*texts[:2], "half a pair: ?", "last, without a line end"], end=False
    )
    assert str(got.dtype) == "int32"


def test_windows_lines_and_empty_ones(tmp_path: Path) -> None:
    """The end of a line is no part of the document."""
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\n \ntwo\n")
    assert lists(
        preprocess(tmp_path / "out", "--input", tmp_path / "a.txt", "--tokenizer", GPT2)
    ) == expected(["one", "two"], end=False)


def test_long_documents_are_split(tmp_path: Path) -> None:
    """Into pieces that join to the document."""
    got = preprocess(
        tmp_path / "out",
        "--input",
        ENGLISH,
        "--tokenizer",
        GPT2,
        "--append-eod",
        "--split-length",
        16,
    )
    want = expected(ENGLISH.read_text().splitlines())
    assert lists(got) == [
        ids[start : start + 16] for ids in want for start in range(0, len(ids), 16)
    ]
    assert len(got.doc_idx) == len(want) + 1
    start, stop = got.doc_idx[3:5]
    assert [number for row in got[start:stop] for number in row.tolist()] == want[3]


def test_workers_keep_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte the same files; an error in one of them is the error of that line."""
    monkeypatch.setattr(documents, "BATCH_BYTES", 2000)  # some twenty batches
    for workers in (1, 2):
        preprocess(
            tmp_path / f"out{workers}",
            "--input",
            ENGLISH,
            "--tokenizer",
            GPT2,
            "--workers",
            workers,
        )
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"out1{ending}").read_bytes() == (
            tmp_path / f"out2{ending}"
        ).read_bytes()


# --- what CPM-1 was trained on


@pytest.fixture
def letters(tmp_path: Path) -> str:
    """A vocabulary of single characters: id 0 to 5 as CPM-1's, then a, b, c, ..."""
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    (folder / "vocab.txt").write_text(
        "\n".join(["<unk>", "<s>", "<pad>", "</_>", "</n>", "<eod>", *"abcdefgh"]) + "\n"
    )
    return str(folder)


SPACE, A, B = 3, 6, 7


def test_the_preset_of_cpm1(tmp_path: Path, letters: str) -> None:
    """Worked out by hand: see the comment beside the preset."""
    text = tmp_path / "a.txt"
    text.write_text(
        "\n".join(
            ["a" * 31, "b" * 32, "a" * 16 + "<n>" + "Ω" * 9 + "b" * 16, "a " * 265, "a " * 275]
        )
    )
    got = preprocess(tmp_path / "out", "--input", text, "--tokenizer", letters, "--preset", "cpm1")
    long = [1] + [A, SPACE] * 275 + [5]
    assert (
        lists(got)
        == [
            [1] + [B] * 32 + [5],  # 31 ids are too few, 32 are enough
            [1] + [A] * 16 + [4] + [B] * 16 + [5],  # a line break, and nothing for what is unknown
            [1] + [A, SPACE] * 255 + [A],  # the last 20 of 532 ids are dropped
            long[:512],
            long[512:],
        ]
    )
    assert got.doc_idx.tolist() == [0, 1, 2, 3, 5]
    assert str(got.dtype) == "int32"


def test_the_program_of_model_center(tmp_path: Path, letters: str) -> None:
    """Its flags, and its names of files; the same bytes as with the preset."""
    text = tmp_path / "part_3.txt"
    text.write_text("\n".join(["a " * 275, "b" * 40]))
    preprocess(tmp_path / "out", "--input", text, "--tokenizer", letters, "--preset", "cpm1")
    flags = ["--input", str(tmp_path / "part_"), "--uid", "3", "--tokenizer_path", letters]
    made = ["--output_path", str(tmp_path / "new"), "--workers", "1", "--log_interval", "5"]
    preprocess_cpm1_lm.main([*flags, *made])
    for end in (".bin", ".idx"):
        found = tmp_path / "new" / f"cpm1_lm_document_context_3{end}"
        assert found.read_bytes() == Path(f"{tmp_path / 'out'}{end}").read_bytes()
    with pytest.raises(SystemExit):
        preprocess_cpm1_lm.get_args([*flags, *made, "--dataset_impl", "lazy"])
    args = preprocess_cpm1_lm.get_args([*flags, "--output_path", "x"])
    assert (args.output_prefix, args.workers, args.log_interval) == ("cpm1_lm", 64, 10000)


def test_given_arguments_go_before_the_preset(tmp_path: Path, letters: str) -> None:
    """Another length of pieces."""
    (tmp_path / "a.txt").write_text("a " * 35)
    got = preprocess(
        tmp_path / "out",
        "--input",
        tmp_path / "a.txt",
        "--tokenizer",
        letters,
        "--preset",
        "cpm1",
        "--split-length",
        40,
    )
    assert got.sizes.tolist() == [40, 32]


# --- what cannot work

BROKEN = {
    "not json": (b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2 is not JSON"),
    "a list": (b'["a"]\n', r"a\.jsonl:1 is a JSON list"),
    "no key": (b'{"text": "a"}\n\n{"txt": "a"}\n', r"a\.jsonl:3 has only the keys 'txt'"),
    "no text": (b'{"text": 5}\n', r"a\.jsonl:1 has int under 'text'"),
    "not utf-8": (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2 is not UTF-8"),
    "nothing": (b"\n\n", "no document in .*: 2 lines"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_text_is_named(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With file and line, exit status 1, and nothing is left behind: not even the folder."""
    content, complaint = BROKEN[what]
    source = tmp_path / "a.jsonl"
    source.write_bytes(content)
    assert (
        main(
            [
                "preprocess",
                "--input",
                str(source),
                "--output",
                str(tmp_path / "new" / "out"),
                "--tokenizer",
                GPT2,
            ]
        )
        == 1
    )
    error = capsys.readouterr().err
    assert re.match(f"error: .*{complaint}", error)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_broken_line_in_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Comes out of the worker as it is; the first in the file's order, nothing left."""
    monkeypatch.setattr(documents, "BATCH_BYTES", 100)
    source = tmp_path / "a.jsonl"
    source.write_text(
        "".join(
            f'{{"text": "line {number}"}}\n' if number not in {30, 40} else "[]\n"
            for number in range(1, 60)
        )
    )
    assert (
        main(
            [
                "preprocess",
                "--input",
                str(source),
                "--output",
                str(tmp_path / "out"),
                "--tokenizer",
                GPT2,
                "--workers",
                "2",
            ]
        )
        == 1
    )
    assert "a.jsonl:30 is a JSON list" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--input", "nowhere.txt", "--tokenizer", GPT2], "nowhere.txt is no file"),
        (["--input", str(ENGLISH), "--tokenizer", str(DATA / "corpus")], "holds no tokenizer"),
        (["--input", str(ENGLISH), "--tokenizer", GPT2, "--workers", "0"], "workers is 0"),
        (
            ["--input", str(ENGLISH), "--tokenizer", GPT2, "--split-length", "0"],
            "split-length is 0",
        ),
        (["--input", str(ENGLISH), "--tokenizer", GPT2, "--key", "text"], "is for JSONL"),
        (
            ["--input", str(ENGLISH), "--tokenizer", GPT2, "--output", "folder/"],
            "output folder/ is a folder",
        ),
        (
            ["--input", str(ENGLISH), str(DATA / "corpus" / "english.jsonl"), "--tokenizer", GPT2],
            "files of one kind",
        ),
        (
            [
                "--input",
                str(ENGLISH),
                "--tokenizer",
                str(DATA / "tokenizers" / "bert"),
                "--append-eod",
            ],
            "no end-of-document token",
        ),
    ],
)
def test_arguments_that_cannot_work(
    tmp_path: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is said before anything is written."""
    assert main(["preprocess", "--output", str(tmp_path / "out"), *arguments]) == 1
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_line() -> None:
    """As users call it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "model_center", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"preprocess\s+text to token data", done.stdout)
    assert re.search(r"convert\s+a folder of Hugging Face", done.stdout)


@pytest.mark.parametrize(
    ("command", "option"), [("preprocess", "--split-length"), ("convert", "--to")]
)
def test_the_help_of_commands(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command has its arguments."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert option in capsys.readouterr().out


def test_errors_of_convert_are_said_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of preprocess."""
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
