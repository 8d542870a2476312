"""Rows for pre-training: packed documents, and those of CPM-1 and CPM-2, against plain Python."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import model_center.dataset.cpm1dataset
from model_center.dataset.cpm1 import CPM1_Dataset, CPM1_Dataset_Merge
from model_center.dataset.cpm2 import CPM2_Dataset
from model_center.dataset.distributed_indexed import DistributedMMapIndexedDataset
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.indexed_builder import make_builder
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.order import permutation
from model_center.dataset.packed import PackedDataset
from model_center.errors import DataError


def build(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], *, marks: bool = True
) -> MMapIndexedDataset:
    """Documents of sequences of ids."""
    with make_builder(f"{prefix}.bin", "mmap") as builder:
        for document in documents:
            for sequence in document:
                builder.add_item(sequence)
            if marks:
                builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return MMapIndexedDataset(str(prefix))


def random_documents(count: int, *, empty: bool = True) -> list[list[list[int]]]:
    """Documents of some sequences of some ids; all ids differ."""
    draw, ids = np.random.default_rng(0), itertools.count(1)
    low = 0 if empty else 1
    return [
        [[next(ids) for _ in range(draw.integers(low, 9))] for _ in range(draw.integers(low, 4))]
        for _ in range(count)
    ]


def expected_stream(
    documents: list[list[list[int]]], separator: int | None, order: Sequence[int] | None
) -> list[int]:
    """All ids of an epoch in a row; documents without ids are none."""
    flat = [
        flat
        for document in documents
        if (flat := [number for sequence in document for number in sequence])
    ]
    order = range(len(flat)) if order is None else order
    return [
        number
        for place in order
        for number in [*flat[place], *([] if separator is None else [separator])]
    ]


def check(dataset: PackedDataset, stream: list[int], length: int, fill: int) -> None:
    """Rows of `length`, targets one later, to the very last token."""
    assert len(dataset) == -(-(len(stream) - 1) // length)
    for row, start in enumerate(range(0, len(stream) - 1, length)):
        ids, targets = stream[start : start + length], stream[start + 1 : start + 1 + length]
        got = dataset[row]
        assert got["input_ids"].dtype == got["targets"].dtype == torch.int64
        assert got["input_ids"].tolist() == ids + [fill] * (length - len(ids))
        assert got["targets"].tolist() == targets + [-100] * (length - len(targets))


@pytest.mark.parametrize("separator", [None, 0, 999])
@pytest.mark.parametrize("length", [1, 5, 8, 1000])
def test_packed_rows_cover_every_token(tmp_path: Path, length: int, separator: int | None) -> None:
    """In the order of every epoch, and without shuffling."""
    documents = random_documents(25)
    indexed = build(tmp_path / "a", documents)
    count = len([document for document in documents if any(document)])
    dataset = PackedDataset(indexed, length, seed=3, separator=separator)
    for epoch in (0, 1, 7):
        dataset.set_epoch(epoch)
        check(
            dataset,
            expected_stream(documents, separator, permutation(count, 3, epoch).tolist()),
            length,
            separator or 0,
        )
    plain = PackedDataset(indexed, length, separator=separator, shuffle=False)
    check(plain, expected_stream(documents, separator, None), length, separator or 0)


def test_unmarked_sequences_are_documents(tmp_path: Path) -> None:
    """Where nothing is marked, and after the last mark."""
    documents = random_documents(9, empty=False)
    sequences = [[sequence] for document in documents for sequence in document]
    order = permutation(len(sequences), 0, 0).tolist()
    check(
        PackedDataset(build(tmp_path / "a", documents, marks=False), 4),
        expected_stream(sequences, None, order),
        4,
        0,
    )
    with make_builder(f"{tmp_path}/b.bin", "mmap") as builder:
        for number in range(6):
            builder.add_item([number, number])
            if number == 2:
                builder.end_document()
        builder.finalize(f"{tmp_path}/b.idx")
    order = permutation(4, 0, 0).tolist()
    halves = [[[0, 0, 1, 1, 2, 2]], [[3, 3]], [[4, 4]], [[5, 5]]]
    check(
        PackedDataset(MMapIndexedDataset(f"{tmp_path}/b"), 4),
        expected_stream(halves, None, order),
        4,
        0,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_rows_through_the_loader(tmp_path: Path, workers: int) -> None:
    """Every token a target once an epoch, other rows in the next, resumed exactly."""
    documents = random_documents(30)
    dataset = PackedDataset(build(tmp_path / "a", documents), 6)
    loader = DistributedDataLoader(
        dataset, shuffle=True, batch_size=4, num_workers=workers, persistent_workers=workers > 0
    )
    epochs = [[batch["targets"] for batch in loader] for _ in range(2)]
    for epoch in range(2):
        stream = expected_stream(
            documents, None, permutation(len({*dataset._starts.tolist()}) - 1, 0, epoch).tolist()
        )
        targets = torch.cat(epochs[epoch])
        assert sorted(targets[targets != -100].tolist()) == sorted(stream[1:])
    assert not torch.equal(epochs[0][0], epochs[1][0])
    again = DistributedDataLoader(
        PackedDataset(MMapIndexedDataset(str(tmp_path / "a")), 6), shuffle=True, batch_size=4
    )
    again.load_state_dict({**loader.state_dict(), "epoch": 1, "row": 8})
    assert all(
        torch.equal(one["targets"], two) for one, two in zip(again, epochs[1][2:], strict=True)
    )
    assert len(pickle.dumps(dataset)) < 3000


def test_packed_bad_arguments(tmp_path: Path) -> None:
    """Nothing to predict, no length, no such row."""
    collections: tuple[list[list[list[int]]], ...] = ([], [[[1]]], [[[]], [[]]])
    for documents in collections:
        with pytest.raises(DataError, match="expected at least two"):
            PackedDataset(build(tmp_path / "a", documents), 4)
    indexed = build(tmp_path / "b", [[[1, 2, 3]]])
    with pytest.raises(DataError, match="length is 0"):
        PackedDataset(indexed, 0)
    dataset = PackedDataset(indexed, 2)
    assert len(dataset) == 1
    assert dataset[-1]["targets"].tolist() == [2, 3]
    with pytest.raises(IndexError):
        dataset[1]


# --- CPM-1


def test_the_old_paths() -> None:
    """The packages, beside the task datasets' modules of similar names."""
    assert model_center.dataset.cpm1dataset.DATASET
    assert CPM1_Dataset.__module__.startswith("model_center.dataset.cpm1")


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[MMapIndexedDataset, MMapIndexedDataset]:
    """Four pairs; the second and the last are too long for 5 and 5."""
    ctx = build(tmp_path / "ctx", [[[1, 2, 3]], [[1] * 6], [[4]], [[26239, 26240]]])
    tgt = build(tmp_path / "tgt", [[[7, 8, 9]], [[1]], [[5, 26429, 6]], [[1] * 6]])
    return ctx, tgt


def test_cpm1_pairs(pairs: tuple[Any, Any]) -> None:
    """Padded; long ones left out, and counted."""
    dataset = CPM1_Dataset(*pairs, max_length=5)
    assert (len(dataset), dataset.num_skipped) == (2, 2)
    one = dataset[np.int64(0)]
    assert one["ctx"].tolist() == [1, 2, 3, 0, 0]
    assert one["tgt"].tolist() == [7, 8, 9, -100, -100]
    assert one["len_ctx"] == 3
    [batch] = DataLoader(dataset, batch_size=2)
    assert batch["ctx"].tolist() == [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]]
    assert batch["len_ctx"].tolist() == [3, 1]
    assert all(torch.equal(value, batch[key]) for key, value in dataset[0:2].items())
    assert len(CPM1_Dataset(*pairs)) == 4


def test_cpm2_pairs(pairs: tuple[Any, Any]) -> None:
    """One more place for the decoder's first id; the vocabulary's gap is closed."""
    dataset = CPM2_Dataset(*pairs, max_source_length=5, max_target_length=3)
    assert (len(dataset), dataset.num_skipped) == (2, 2)
    assert dataset[1]["ctx"].tolist() == [4, 0, 0, 0, 0]
    assert dataset[1]["tgt"].tolist() == [5, 26239, 6, -100]
    assert (dataset[1]["len_ctx"], dataset[1]["len_tgt"]) == (1, 3)
    longest = CPM2_Dataset(*pairs, max_source_length=5, max_target_length=2)[1]
    assert (longest["tgt"].tolist(), longest["len_tgt"]) == ([5, 26239, 6], 2)
    batch = dataset[:5]
    assert {key: value.tolist() for key, value in batch.items()} == {
        "ctx": [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]],
        "tgt": [[7, 8, 9, -100], [5, 26239, 6, -100]],
        "len_ctx": [3, 1],
        "len_tgt": [3, 3],
    }
    whole = CPM2_Dataset(*pairs)
    assert whole[3]["ctx"].tolist() == [26239, 26050] + [0] * 510
    assert whole[3]["tgt"].shape == (257,)


def test_files_that_do_not_belong_together(pairs: tuple[Any, Any], tmp_path: Path) -> None:
    """Other numbers of sequences; and what is divided already is not divided again."""
    with pytest.raises(DataError, match="ctx has 4 sequences and tgt 1"):
        CPM2_Dataset(pairs[0], build(tmp_path / "short", [[[1]]]))
    for number in range(2):
        build(tmp_path / f"part_{number}", [[[1, 2]]] * 3)
    part = DistributedMMapIndexedDataset(str(tmp_path), "part", 0, 2)
    for dataset in (CPM1_Dataset(part, part), CPM2_Dataset(part, part), CPM1_Dataset_Merge(part)):
        assert len(dataset) == 3
        with pytest.raises(DataError, match="one of 2 parts"):
            DistributedDataLoader(dataset)
    with pytest.raises(DataError, match="divided alike"):
        CPM1_Dataset(part, build(tmp_path / "whole", [[[1, 2]]] * 3))


def test_merged_spans(tmp_path: Path) -> None:
    """Where they may begin and end, what is predicted from where, and the end of a line."""
    lengths = [2, 3, 4, 8, 21, 64]
    sequences = [list(range(10, 10 + length)) for length in lengths]
    dataset = CPM1_Dataset_Merge(
        build(tmp_path / "a", [sequences, [[9]], [[]], [[3] * 65], [[5, 6, 7, 4]]]), max_length=64
    )
    assert (len(dataset), dataset.num_skipped) == (7, 3)
    assert dataset.sizes.tolist() == [*lengths, 4]
    seen: dict[int, set[tuple[int, int]]] = {row: set() for row in range(7)}
    for epoch in range(200):
        dataset.set_epoch(epoch)
        for row in range(7):
            ids, targets, length, is_context = dataset[row]
            want = [*sequences, [5, 6, 7, 4]][row]
            assert ids.tolist() == want
            assert [str(row.dtype) for row in (ids, targets, is_context)] == [
                "int32",
                "int64",
                "bool",
            ]
            assert length == len(want)
            span = np.flatnonzero(~is_context).tolist()
            left, right = span[0], span[-1] + 1
            assert span == list(range(left, right))
            assert max(1, length // 8) <= left <= max(1, length // 4)
            assert length * 3 // 4 <= right <= length
            predicted = {
                place + 1: target for place, target in enumerate(targets.tolist()) if target != -100
            }
            assert predicted == {place: want[place] for place in span}
            seen[row].add((left, right))
    assert {right for _, right in seen[6]} == {4}  # it ends with the id of a line break
    assert {left for left, _ in seen[5]} == set(range(8, 17))
    assert {right for _, right in seen[5]} == set(range(48, 65))


def test_merged_rows_of_small_ids_make_batches(tmp_path: Path) -> None:
    """Rows keep the file's dtype, uint16 here; batches are int64."""
    with make_builder(f"{tmp_path}/a.bin", "mmap", np.uint16) as builder:
        for sequence in ([60000, 7, 8], [9, 10]):
            builder.add_item(sequence)
        builder.finalize(f"{tmp_path}/a.idx")
    dataset = CPM1_Dataset_Merge(MMapIndexedDataset(f"{tmp_path}/a"))
    assert dataset[0][0].dtype == np.uint16
    (batch,) = DistributedDataLoader(dataset, batch_size=2)
    assert batch["input_tokens"].dtype == batch["targets"].dtype == torch.int64
    assert batch["input_tokens"].tolist() == [[60000, 7, 8], [9, 10, 0]]
    assert batch["targets"].tolist()[1] == [10, -100, -100]


def test_merged_rows_are_a_function_of_seed_epoch_and_row(tmp_path: Path) -> None:
    """In worker processes too; the loader tells the epoch; batches are padded."""
    indexed = build(tmp_path / "a", [[list(range(10, 10 + length))] for length in range(30, 60, 3)])
    epochs: list[list[dict[str, torch.Tensor]]] = []
    for workers in (0, 2):
        loader = DistributedDataLoader(
            CPM1_Dataset_Merge(indexed, seed=5), batch_size=4, num_workers=workers
        )
        epochs += [list(loader) for _ in range(2)]
    for one, two in ((0, 2), (1, 3)):
        for left, right in zip(epochs[one], epochs[two], strict=True):
            assert all(torch.equal(left[key], right[key]) for key in left)
    assert not torch.equal(epochs[0][0]["targets"], epochs[1][0]["targets"])
    other = CPM1_Dataset_Merge(indexed, seed=6)
    assert any(
        not np.array_equal(other[row][1], CPM1_Dataset_Merge(indexed, seed=5)[row][1])
        for row in range(10)
    )
    batch = epochs[0][0]
    assert (
        batch["input_tokens"].shape
        == batch["targets"].shape
        == batch["input_span"].shape
        == (4, 39)
    )
    assert batch["input_length"].tolist() == [30, 33, 36, 39]
    assert batch["input_tokens"][0, 30:].tolist() == [0] * 9
    assert batch["targets"][0, 30:].tolist() == [-100] * 9
    assert batch["input_context"].dtype == torch.bool
