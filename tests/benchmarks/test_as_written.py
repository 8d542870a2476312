"""The suites of programs without an option: their words, their records, and what is compared."""

import json

import pytest

FACTS = {"gpu": "none"}


def record(backend, rate, suite="gpt2-one-gpu", rows=8, **others):
    found = {"suite": suite, "backend": backend, "mode": None, "recomputes": False, "rows": rows}
    return found | {"tokens_per_s": rate} | others


def test_words_of_all_suites_are_understood(bench):
    """Ours comes first, and with it a peer of each kind; records say how they were made."""
    written = bench.as_written
    for suite in written.SUITES.values():
        assert suite.peers[0] == "ours"
        found = {written.PEERS[peer].split()[0] for peer in suite.peers}
        assert found & {"plain", "fsdp2"}
        for peer in suite.peers:
            words = [*suite.words.split(), "--backend", *written.PEERS[peer].split()]
            common = written.common_of(words, suite.gpus)
            model = common["model"].removesuffix("-lora")
            assert model in written.GEOMETRIES or common["model"] in written.TRANSFORMERS
            assert common["gpus"] == suite.gpus
            assert common.get("padded", False) == ("--padded" in words)


def test_ours_is_compared_with_the_fastest_peer(bench):
    """Options and model_center are of this library; a repeated run replaces its record."""
    written = bench.as_written
    old = [record("ours", 50), record("plain", 80), record("plain", 90, mode="reduce-overhead")]
    new = [record("ours", 120), record("ours", 999, options="fp8"), record("center", 999)]
    records = [*written.merged(old, new)]
    assert len(records) == 5
    best = {"fastest_peer": "plain reduce-overhead", "ratio": 1.333}
    assert written.ratios(records) == [{"suite": "gpt2-one-gpu", "rows": 8, **best}]


def test_what_is_slower_than_the_saved_results_is_marked(bench, capsys):
    written = bench.as_written
    saved = {("gpt2-one-gpu", "ours", 8): 100.0}
    for rate, backend, ratio, is_slower in (
        (96, "ours", 0.96, False),
        (94, "ours", 0.94, True),
        (1, "plain", None, False),
    ):
        found = record(backend, rate)
        written.compare(found, "gpt2-one-gpu", saved)
        assert found.get("of_saved") == ratio
        assert ("SLOWER" in capsys.readouterr().out) is is_slower
    rates = written.saved_rates("NVIDIA H200")
    assert rates["gpt2-one-gpu", "ours", 32] > 0 and not written.saved_rates("another")


def test_records_of_another_commit_are_not_added_to(bench, tmp_path):
    path = tmp_path / "x.json"
    assert bench.as_written.earlier(path, "a", FACTS) == []
    report = {"commit": "a", "machine": FACTS, "records": [record("ours", 1)]}
    path.write_text(json.dumps(report))
    assert bench.as_written.earlier(path, "a", FACTS) == report["records"]
    for commit, facts in (("b", FACTS), ("a", {"gpu": "other"})):
        with pytest.raises(SystemExit, match="--add"):
            bench.as_written.earlier(path, commit, facts)


def test_rows_of_several_texts(bench, monkeypatch):
    """Lengths of 200 to 4,000 of 16,384 tokens, and places that begin anew; the same for every peer."""
    monkeypatch.setenv("RANK", "1")
    segments, places = bench.as_written.packed_rows(2, 16384)
    for row, own in zip(segments, places, strict=True):
        lengths = row.unique_consecutive(return_counts=True)[1].tolist()
        assert all(200 <= length <= 4000 for length in lengths[:-1])
        assert own.tolist() == [place for length in lengths for place in range(length)]
    assert segments.equal(bench.as_written.packed_rows(2, 16384)[0])
