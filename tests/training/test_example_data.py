"""The GPT-2 example's text: documents, held-out part, vocabulary, cache, packing, and the order of
reading.
"""

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tests.modules import importable

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt2"
pytest.importorskip("tokenizers")
with importable(EXAMPLE):  # as its train.py imports them
    corpus, data = (importlib.import_module(name) for name in ("corpus", "data"))


def write_text(path, num_lines=2000):
    lines = (f"line {i}: the value of {i * i} is {i % 7} — née\n" for i in range(num_lines))
    return file(path, "".join(lines))


def file(path, content):
    path.write_text(content, "utf-8")
    return path


def json_lines(path, *texts, field="text"):
    return file(path, "".join(json.dumps({field: text}) + "\n\n" for text in texts))


def cached(text, folder, vocab_size=400):
    place = data.cache_folder(folder, text, vocab_size)
    for _ in data.build_cache(place, text, vocab_size):
        pass
    return data.open_cache(place)


@pytest.mark.long
def test_standard_library_is_large_sorted_and_the_same_twice():
    text = corpus.standard_library()
    assert len(text.files) > 300
    assert list(text.files) == sorted(text.files)
    assert text.digest() == corpus.standard_library().digest()
    assert not any("site-packages" in path.relative_to(text.root).parts for path in text.files)


def test_what_is_not_utf8(tmp_path):
    """It is skipped in the standard library, and an error in a text of one's own."""
    file(tmp_path / "good.txt", "fine\n")
    (tmp_path / "latin.txt").write_bytes("näive\n".encode("latin-1"))
    files = tuple(sorted(tmp_path.iterdir()))
    lenient = corpus.Corpus(root=tmp_path, files=files, own=False)
    assert [document.name for document in lenient.documents()] == ["good.txt#0"]
    with pytest.raises(corpus.DataError, match=r"latin\.txt is not UTF-8"):
        list(corpus.Corpus(root=tmp_path, files=files).documents())


def test_digest_follows_files_and_sizes(tmp_path):
    path = write_text(tmp_path / "a.txt")
    before = corpus.own_text(path).digest()
    assert corpus.own_text(path).digest() == before
    file(path, path.read_text("utf-8") + "more\n")
    assert corpus.own_text(path).digest() != before


def test_unusable_texts_are_named(tmp_path):
    """Paths, and lines that are not what they are to be; a failed build leaves nothing behind."""
    empty = file(tmp_path / "empty.txt", "")
    (tmp_path / "nothing").mkdir()
    for path, message in (
        (tmp_path / "absent.txt", "absent.txt does not exist"),
        (tmp_path / "nothing", "nothing holds no text"),
        (empty, "empty.txt is empty"),
    ):
        with pytest.raises(corpus.DataError, match=message):
            corpus.own_text(path)
    for line, message in (
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is a JSON list"),
        ('{"body": "x"}', r"line 2 has no string under 'text' \(its fields: 'body'\)"),
        ('{"text": 3}', "line 2 has no string under 'text'"),
    ):
        path = file(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
        with pytest.raises(corpus.DataError, match=f"a.jsonl.* {message}"):
            list(corpus.own_text(path).documents())
    blank = corpus.own_text(file(tmp_path / "blank.txt", "\n  \n"))
    with pytest.raises(corpus.DataError, match="only white space"):
        cached(blank, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_few_files_are_cut_at_line_ends_and_lose_nothing(tmp_path):
    """JSON lines have a text each, by another field too."""
    path = write_text(tmp_path / "a.txt")
    documents = list(corpus.own_text(path).documents())
    assert len({document.name for document in documents}) == len(documents) > 30
    assert all(document.text.endswith("\n") for document in documents)
    assert "".join(document.text for document in documents) == path.read_text("utf-8")
    path = json_lines(tmp_path / "a.jsonl", "text 0", "text 1", field="body")
    documents = list(corpus.own_text(path, "body").documents())
    assert [document.text for document in documents] == ["text 0", "text 1"]


def test_held_out_documents_are_whole_and_decode_to_their_text(tmp_path):
    """A text that spells the end-of-text token does not end it."""
    text = corpus.own_text(write_text(tmp_path / "a.txt"))
    tokens, split = cached(text, tmp_path / "cache"), data.split_documents(text)
    expected = {"train": [], "valid": []}
    for document in text.documents():
        is_held_out = data.name_hash(document.name) <= split.held_out
        expected["valid" if is_held_out else "train"].append(document.text)
    assert expected["valid"] and len(expected["train"]) > 10 * len(expected["valid"])
    for part, documents in expected.items():
        ids = getattr(tokens, part)
        assert ids.dtype == np.uint16
        ends = np.flatnonzero(ids == tokens.end_of_text)
        assert len(ends) == len(documents) and ends[-1] == len(ids) - 1
        pieces = np.split(ids, ends + 1)[:-1]
        assert [tokens.tokenizer.decode(piece[:-1].tolist()) for piece in pieces] == documents
    path = json_lines(tmp_path / "a.jsonl", *(f"a <|endoftext|> b {i}" for i in range(50)))
    other = cached(corpus.own_text(path), tmp_path / "cache")
    assert sum((ids == other.end_of_text).sum() for ids in (other.train, other.valid)) == 50


def test_cache_is_built_once_and_whole(tmp_path):
    text = corpus.own_text(write_text(tmp_path / "a.txt"))
    place = data.cache_folder(tmp_path / "cache", text, 400)
    building = data.build_cache(place, text, 400)
    next(building)
    assert not place.exists(), "nothing under its name before it is complete"
    building.close()
    assert not list((tmp_path / "cache").iterdir()), "an interrupted build leaves nothing behind"
    first = cached(text, tmp_path / "cache")
    assert list(data.build_cache(place, text, 400)) == []
    assert first.fingerprint == cached(text, tmp_path / "elsewhere").fingerprint
    assert data.cache_folder(tmp_path / "cache", text, 500) != place


def sequences_of(count, seed):
    return data.TrainingSequences(np.arange(count, dtype=np.uint16), seq_len=10, seed=seed)


def test_targets_are_the_inputs_one_later():
    sequences = sequences_of(101, 3)
    (inputs, targets), (second, _) = sequences.batch(0, 10), sequences.batch(10, 10)
    assert inputs.shape == targets.shape == (10, 10)
    assert (targets == inputs + 1).all()
    assert second.tolist() != inputs.tolist(), "the next pass has another order"
    for one in (inputs, second):
        assert sorted(one.flatten().tolist()) == list(range(100)), "every token once"
    with pytest.raises(corpus.DataError, match="10 tokens long, shorter than one sequence of 10"):
        sequences_of(10, 0)


def test_order_of_reading_survives_another_number_of_ranks():
    """Two steps on two ranks, then two on others."""
    straight = [sequences_of(1001, 1).sequence(sample) for sample in range(72)]
    for ranks in (1, 3):
        read = []
        consumed = 0
        for size in (2, 2, ranks, ranks):
            for micro in range(3):
                for rank in range(size):
                    start = data.rank_position(consumed, micro, 2, rank, size)
                    read += (sequences_of(1001, 1).batch(start, 2)[0][:, 0] // 10).tolist()
            consumed += 3 * 2 * size
        assert read == straight[: len(read)]


def test_validation_is_the_same_on_any_number_of_ranks():
    tokens = np.arange(211, dtype=np.uint16)
    for ranks in (1, 3):
        seen = []
        each = [[*data.validation_batches(tokens, 10, 4, r, ranks, limit=13)] for r in range(ranks)]
        assert len({len(batches) for batches in each}) == 1, "ranks call the model equally often"
        for inputs, targets in itertools.chain(*each):
            assert inputs.shape == (4, 10)
            counted = targets[:, 0] != data.IGNORED
            seen += (inputs[counted][:, 0] // 10).tolist()
        assert sorted(seen) == np.linspace(0, 20, 13).astype(int).tolist()
    assert list(data.validation_batches(tokens[:5], 10, 4, 0, 1, 13)) == []
