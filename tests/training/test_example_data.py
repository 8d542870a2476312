"""The GPT-2 example's text: documents, held-out part, vocabulary, cache, packing, and the order of
reading.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.modules import importable

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt2"
pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def example() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The example's modules `corpus` and `data`, imported as its train.py does."""
    with importable(EXAMPLE):
        yield importlib.import_module("corpus"), importlib.import_module("data")


@pytest.fixture
def corpus(example: tuple[ModuleType, ModuleType]) -> ModuleType:
    return example[0]


@pytest.fixture
def data(example: tuple[ModuleType, ModuleType]) -> ModuleType:
    return example[1]


def write_text(path: Path, num_lines: int = 2000) -> Path:
    path.write_text(
        "".join(f"line {i}: the value of {i * i} is {i % 7} — née\n" for i in range(num_lines)),
        encoding="utf-8",
    )
    return path


def cached(data: ModuleType, text: object, folder: Path, vocab_size: int = 400) -> object:
    place = data.cache_folder(folder, text, vocab_size)
    for _ in data.build_cache(place, text, vocab_size):
        pass
    return data.open_cache(place)


def test_standard_library_is_large_sorted_and_the_same_twice(corpus: ModuleType) -> None:
    text = corpus.standard_library()
    assert len(text.files) > 300
    assert list(text.files) == sorted(text.files)
    assert text.digest() == corpus.standard_library().digest()
    assert not any("site-packages" in path.relative_to(text.root).parts for path in text.files)


def test_standard_library_skips_what_is_not_utf8(corpus: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("fine\n")
    (tmp_path / "latin.txt").write_bytes("näive\n".encode("latin-1"))
    files = tuple(sorted(tmp_path.iterdir()))
    lenient = corpus.Corpus(root=tmp_path, files=files, own=False)
    assert [document.name for document in lenient.documents()] == ["good.txt#0"]
    with pytest.raises(corpus.DataError, match=r"latin\.txt is not UTF-8"):
        list(corpus.Corpus(root=tmp_path, files=files).documents())


def test_digest_follows_files_and_sizes(corpus: ModuleType, tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt")
    before = corpus.own_text(path).digest()
    assert corpus.own_text(path).digest() == before
    path.write_text(path.read_text() + "more\n")
    assert corpus.own_text(path).digest() != before


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda folder: folder / "absent.txt", "does not exist"),
        (lambda folder: folder, "holds no text"),
        (lambda folder: _file(folder / "empty.txt", ""), "is empty"),
    ],
)
def test_unusable_paths_are_named(
    corpus: ModuleType, tmp_path: Path, prepare: object, message: str
) -> None:
    path = prepare(tmp_path)  # type: ignore[operator]
    with pytest.raises(corpus.DataError, match=message) as caught:
        corpus.own_text(path)
    assert str(path) in str(caught.value)


def _file(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def test_only_white_space_is_an_error(corpus: ModuleType, data: ModuleType, tmp_path: Path) -> None:
    text = corpus.own_text(_file(tmp_path / "blank.txt", "\n  \n"))
    with pytest.raises(corpus.DataError, match="only white space"):
        cached(data, text, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir()), "a failed build leaves nothing behind"


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is a JSON list"),
        ('{"body": "x"}', r"line 2 has no string under 'text' \(its fields: 'body'\)"),
        ('{"text": 3}', "line 2 has no string under 'text'"),
    ],
)
def test_broken_json_lines_are_named(
    corpus: ModuleType, tmp_path: Path, line: str, message: str
) -> None:
    path = _file(tmp_path / "a.jsonl", json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(corpus.DataError, match=message) as caught:
        list(corpus.own_text(path).documents())
    assert str(path) in str(caught.value)


def test_json_lines_by_another_field(corpus: ModuleType, tmp_path: Path) -> None:
    path = _file(
        tmp_path / "a.jsonl", "".join(json.dumps({"body": f"text {i}"}) + "\n\n" for i in range(3))
    )
    assert [document.text for document in corpus.own_text(path, "body").documents()] == [
        "text 0",
        "text 1",
        "text 2",
    ]


def test_few_files_are_cut_at_line_ends_and_lose_nothing(
    corpus: ModuleType, tmp_path: Path
) -> None:
    path = write_text(tmp_path / "a.txt")
    documents = list(corpus.own_text(path).documents())
    assert len(documents) > 30
    assert all(document.text.endswith("\n") for document in documents)
    assert "".join(document.text for document in documents) == path.read_text(encoding="utf-8")
    assert len({document.name for document in documents}) == len(documents)


def test_held_out_documents_are_whole_and_decode_to_their_text(
    corpus: ModuleType, data: ModuleType, tmp_path: Path
) -> None:
    text = corpus.own_text(write_text(tmp_path / "a.txt"))
    tokens = cached(data, text, tmp_path / "cache")
    split = data.split_documents(text)
    expected: dict[str, list[str]] = {"train": [], "valid": []}
    for document in text.documents():
        expected["valid" if data.name_hash(document.name) <= split.held_out else "train"].append(
            document.text
        )
    assert expected["valid"] and len(expected["train"]) > 10 * len(expected["valid"])
    for part, documents in expected.items():
        ids = getattr(tokens, part)
        assert ids.dtype == np.uint16
        ends = np.flatnonzero(ids == tokens.end_of_text)  # type: ignore[attr-defined]
        assert len(ends) == len(documents) and ends[-1] == len(ids) - 1
        pieces = np.split(ids, ends + 1)[:-1]
        assert [tokens.tokenizer.decode(piece[:-1].tolist()) for piece in pieces] == documents  # type: ignore[attr-defined]


def test_text_that_spells_the_end_of_text_token_does_not_end_it(
    corpus: ModuleType, data: ModuleType, tmp_path: Path
) -> None:
    path = _file(
        tmp_path / "a.jsonl",
        "".join(json.dumps({"text": f"a <|endoftext|> b {i}"}) + "\n" for i in range(50)),
    )
    tokens = cached(data, corpus.own_text(path), tmp_path / "cache")
    counts = [int((ids == tokens.end_of_text).sum()) for ids in (tokens.train, tokens.valid)]  # type: ignore[attr-defined]
    assert sum(counts) == 50


def test_cache_is_built_once_and_whole(
    corpus: ModuleType, data: ModuleType, tmp_path: Path
) -> None:
    text = corpus.own_text(write_text(tmp_path / "a.txt"))
    place = data.cache_folder(tmp_path / "cache", text, 400)
    building = data.build_cache(place, text, 400)
    next(building)
    assert not place.exists(), "nothing under its name before it is complete"
    building.close()
    assert not list((tmp_path / "cache").iterdir()), "an interrupted build leaves nothing behind"
    first = cached(data, text, tmp_path / "cache")
    assert list(data.build_cache(place, text, 400)) == []
    again = cached(data, text, tmp_path / "elsewhere")
    assert first.fingerprint == again.fingerprint  # type: ignore[attr-defined]
    assert data.cache_folder(tmp_path / "cache", text, 500) != place


def test_targets_are_the_inputs_one_later(data: ModuleType) -> None:
    tokens = np.arange(101, dtype=np.uint16)
    sequences = data.TrainingSequences(tokens, seq_len=10, seed=3)
    inputs, targets = sequences.batch(0, 10)
    assert inputs.shape == targets.shape == (10, 10)
    assert (targets == inputs + 1).all()
    assert sorted(inputs.flatten().tolist()) == list(range(100)), "one pass reads every token once"
    second, _ = sequences.batch(10, 10)
    assert second.tolist() != inputs.tolist(), "the next pass has another order"
    assert sorted(second.flatten().tolist()) == list(range(100))


def test_a_text_shorter_than_a_sequence_is_an_error(corpus: ModuleType, data: ModuleType) -> None:
    with pytest.raises(corpus.DataError, match="10 tokens long, shorter than one sequence of 10"):
        data.TrainingSequences(np.arange(10, dtype=np.uint16), seq_len=10, seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_order_of_reading_survives_another_number_of_ranks(
    data: ModuleType, world_size: int
) -> None:
    sequences = data.TrainingSequences(np.arange(1001, dtype=np.uint16), seq_len=10, seed=1)
    straight = [sequences.sequence(sample) for sample in range(72)]
    read: list[int] = []
    consumed = 0
    for size in (2, world_size):  # two steps on two ranks, then a resume on others
        for _ in range(2):
            for micro in range(3):
                for rank in range(size):
                    fresh = data.TrainingSequences(
                        np.arange(1001, dtype=np.uint16), seq_len=10, seed=1
                    )
                    start = data.rank_position(consumed, micro, 2, rank, size)
                    read += (fresh.batch(start, 2)[0][:, 0] // 10).tolist()
            consumed += 3 * 2 * size
    assert read == straight[: len(read)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_is_the_same_on_any_number_of_ranks(data: ModuleType, world_size: int) -> None:
    tokens = np.arange(211, dtype=np.uint16)
    seen: list[int] = []
    lengths = set()
    for rank in range(world_size):
        batches = list(data.validation_batches(tokens, 10, 4, rank, world_size, limit=13))
        lengths.add(len(batches))
        for inputs, targets in batches:
            assert inputs.shape == (4, 10)
            counted = targets[:, 0] != data.IGNORED
            seen += (inputs[counted][:, 0] // 10).tolist()
    assert len(lengths) == 1, "ranks call the model equally often"
    assert sorted(seen) == np.linspace(0, 20, 13).astype(int).tolist()


def test_no_validation_without_a_held_out_sequence(data: ModuleType) -> None:
    assert list(data.validation_batches(np.arange(5, dtype=np.uint16), 10, 4, 0, 1, 13)) == []
