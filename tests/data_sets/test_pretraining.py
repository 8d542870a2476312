"""Rows for pre-training: packed documents, and those of CPM-1 and CPM-2, against plain Python."""

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.data_sets.common import filled, listed, refused, write_tokens
from torch.utils.data import Subset

import model_center.dataset.cpm1dataset
from model_center.dataset.cpm1 import CPM1_Dataset, CPM1_Dataset_Merge
from model_center.dataset.cpm2 import CPM2_Dataset
from model_center.dataset.distributed_indexed import DistributedMMapIndexedDataset
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.packed import PackedDataset
from model_center.dataset.sampler import permutation


def build(*how, **options):
    return MMapIndexedDataset(write_tokens(*how, **options))


def random_documents(count, *, empty=True):
    """Documents of some sequences of some ids; all ids differ."""
    draw, ids, low = np.random.default_rng(0), itertools.count(1), int(not empty)

    def some(most):
        return range(draw.integers(low, most))

    return [[[next(ids) for _ in some(9)] for _ in some(4)] for _ in range(count)]


def stream_of(documents, separator, epoch, seed):
    """All ids of an epoch in a row; documents without ids are none. Without an epoch in order."""
    flat = [list(itertools.chain(*document)) for document in documents if any(document)]
    end = [] if separator is None else [separator]
    order = range(len(flat)) if epoch is None else permutation(len(flat), seed, epoch).tolist()
    return [number for place in order for number in [*flat[place], *end]]


def check(dataset, stream, length, fill=0):
    """Rows of `length`, targets one later, to the very last token."""
    assert len(dataset) == -(-(len(stream) - 1) // length)
    for row, start in enumerate(range(0, len(stream) - 1, length)):
        ids, targets = stream[start : start + length], stream[start + 1 : start + 1 + length]
        got = dataset[row]
        assert got["input_ids"].dtype == got["targets"].dtype == torch.int64
        assert got["input_ids"].tolist() == filled(ids, length, fill)
        assert got["targets"].tolist() == filled(targets, length, -100)


@pytest.mark.parametrize("separator", [None, 0, 999])
def test_packed_rows_cover_every_token(tmp_path, separator):
    """In the order of every epoch, and without shuffling."""
    documents = random_documents(25)
    indexed = build(tmp_path / "a", documents)
    for length in (1, 5, 8, 1000):
        dataset = PackedDataset(indexed, length, seed=3, separator=separator)
        for epoch in (0, 1, 7):
            dataset.set_epoch(epoch)
            check(dataset, stream_of(documents, separator, epoch, 3), length, separator or 0)
        plain = PackedDataset(indexed, length, separator=separator, shuffle=False)
        check(plain, stream_of(documents, separator, None, 0), length, separator or 0)


def test_unmarked_sequences_are_documents(tmp_path):
    """Where nothing is marked, and after the last mark."""
    documents = random_documents(9, empty=False)
    for marked in (0, 2):
        rest = [[sequence] for document in documents[marked:] for sequence in document]
        dataset = PackedDataset(build(tmp_path / "a", documents, marked=marked), 4)
        check(dataset, stream_of([*documents[:marked], *rest], None, 0, 0), 4)


def test_packed_rows_through_the_loader(tmp_path):
    """Workers that outlive an epoch read the next one in its order; the dataset pickles small."""
    documents = random_documents(30)
    dataset = PackedDataset(build(tmp_path / "a", documents), 6)
    how: Any = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    loader = DistributedDataLoader(dataset, **how)
    for epoch in range(2):
        targets = torch.cat([batch["targets"] for batch in loader])
        want = stream_of(documents, None, epoch, 0)[1:]
        assert targets[targets != -100].tolist() == want
    assert len(pickle.dumps(dataset)) < 3000


def test_packed_bad_arguments(tmp_path):
    """Nothing to predict, no length, no such row."""
    for documents in ([], [[[1]]], [[[]], [[]]]):
        with refused("expected at least two"):
            PackedDataset(build(tmp_path / "a", documents), 4)
    assert len(PackedDataset(build(tmp_path / "a", [[[1]]]), 4, separator=0)) == 1
    indexed = build(tmp_path / "b", [[[1, 2, 3]]])
    with refused("length is 0"):
        PackedDataset(indexed, 0)
    dataset = PackedDataset(indexed, 2)
    assert len(dataset) == 1
    assert dataset[-1]["targets"].tolist() == [2, 3]
    for row in (1, -2):
        with pytest.raises(IndexError):
            dataset[row]


# --- CPM-1 and CPM-2


@pytest.fixture
def pairs(tmp_path):
    """Four pairs; the second and the last are too long for 5 and 5."""
    ctx = build(tmp_path / "ctx", [[[1, 2, 3]], [[1] * 6], [[4]], [[26239, 26240]]])
    tgt = build(tmp_path / "tgt", [[[7, 8, 9]], [[1]], [[5, 26429, 6]], [[1] * 6]])
    return ctx, tgt


def test_cpm1_pairs(pairs: tuple[Any, Any]):
    """Padded; numbered as in the files, so long ones are None. The packages stand beside the task
    datasets' modules of similar names.
    """
    dataset = CPM1_Dataset(*pairs, max_length=5)
    assert (len(dataset), dataset.num_skipped, dataset.short) == (4, 2, [0, 2])
    want = {"ctx": [1, 2, 3, 0, 0], "tgt": [7, 8, 9, -100, -100], "len_ctx": 3}
    assert listed(dataset[np.int64(0)]) == want
    assert dataset[-1] == dict.fromkeys(want)
    [batch] = DistributedDataLoader(Subset(dataset, dataset.short), batch_size=2)
    assert batch["ctx"].tolist() == [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]]
    assert batch["len_ctx"].tolist() == [3, 1]
    assert all(torch.equal(value, batch[key]) for key, value in dataset[0:3].items())
    with refused("2 rows of CPM1_Dataset are too long: load .*dataset.short"):
        list(DistributedDataLoader(dataset, batch_size=2))
    assert CPM1_Dataset(*pairs).num_skipped == 0
    assert model_center.dataset.cpm1dataset.DATASET
    assert CPM1_Dataset.__module__.startswith("model_center.dataset.cpm1")


def test_cpm2_pairs(pairs: tuple[Any, Any]):
    """One more place for the decoder's first id; the vocabulary's gap is closed."""
    dataset = CPM2_Dataset(*pairs, max_source_length=5, max_target_length=3)
    assert (len(dataset), dataset.num_skipped) == (4, 2)
    assert dataset[1] is None
    assert listed(dataset[:5]) == {
        "ctx": [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]],
        "tgt": [[7, 8, 9, -100], [5, 26239, 6, -100]],
        "len_ctx": [3, 1],
        "len_tgt": [3, 3],
    }
    longest = CPM2_Dataset(*pairs, max_source_length=5, max_target_length=2)[2]
    assert (longest["tgt"].tolist(), longest["len_tgt"]) == ([5, 26239, 6], 2)
    whole = CPM2_Dataset(*pairs)
    assert whole[3]["ctx"].tolist() == filled([26239, 26050], 512)
    assert whole[3]["tgt"].shape == (257,)


def test_files_that_do_not_belong_together(pairs, tmp_path):
    """Other numbers of sequences; and what is divided already is not divided again."""
    with refused("ctx has 4 sequences and tgt 1"):
        CPM2_Dataset(pairs[0], build(tmp_path / "short", [[[1]]]))
    for number in range(2):
        build(tmp_path / f"part_{number}", [[[1, 2]]] * 3)
    part = DistributedMMapIndexedDataset(str(tmp_path), "part", 0, 2)
    for dataset in (CPM1_Dataset(part, part), CPM2_Dataset(part, part), CPM1_Dataset_Merge(part)):
        assert len(dataset) == 3
        with refused("one of 2 parts"):
            DistributedDataLoader(dataset)
    with refused("divided alike"):
        CPM1_Dataset(part, build(tmp_path / "whole", [[[1, 2]]] * 3))


def test_merged_spans(tmp_path):
    """Where they may begin and end, what is predicted from where, and the end of a line."""
    lengths = [2, 3, 4, 8, 21, 64]
    rows = [*(list(range(10, 10 + length)) for length in lengths), [5, 6, 7, 4]]
    indexed = build(tmp_path / "a", [rows[:-1], [[9]], [[]], [[3] * 65], rows[-1:]])
    dataset = CPM1_Dataset_Merge(indexed, max_length=64)
    assert (len(dataset), dataset.num_skipped) == (7, 3)
    assert dataset.sizes.tolist() == [*lengths, 4]
    seen = [set() for _ in rows]
    for epoch in range(200):
        dataset.set_epoch(epoch)
        for row, want in enumerate(rows):
            ids, targets, length, is_context = dataset[row]
            dtypes = [str(one.dtype) for one in (ids, targets, is_context)]
            assert dtypes == ["int32", "int64", "bool"]
            assert ids.tolist() == want and length == len(want)
            span = np.flatnonzero(~is_context).tolist()
            left, right = span[0], span[-1] + 1
            assert span == list(range(left, right))
            assert max(1, length // 8) <= left <= max(1, length // 4)
            assert length * 3 // 4 <= right <= length
            places = np.flatnonzero(targets != -100) + 1
            assert places.tolist() == span
            assert targets[places - 1].tolist() == want[left:right]
            seen[row].add((left, right))
    assert {right for _, right in seen[6]} == {4}  # it ends with the id of a line break
    assert {left for left, _ in seen[5]} == set(range(8, 17))
    assert {right for _, right in seen[5]} == set(range(48, 65))


def test_merged_rows_of_small_ids_make_batches(tmp_path):
    """Rows keep the file's dtype, uint16 here; batches are int64."""
    indexed = build(tmp_path / "a", [[[60000, 7, 8], [9, 10]]], dtype=np.uint16)
    dataset = CPM1_Dataset_Merge(indexed)
    assert dataset[0][0].dtype == np.uint16
    (batch,) = DistributedDataLoader(dataset, batch_size=2)
    assert batch["input_tokens"].dtype == batch["targets"].dtype == torch.int64
    assert batch["input_tokens"].tolist() == [[60000, 7, 8], [9, 10, 0]]
    assert batch["targets"].tolist()[1] == [10, -100, -100]


def test_merged_rows_are_a_function_of_seed_epoch_and_row(tmp_path):
    """In worker processes too; the loader tells the epoch; batches are padded."""
    indexed = build(tmp_path / "a", [[list(range(10, 10 + length))] for length in range(30, 60, 3)])

    def epochs(seed, workers):
        dataset = CPM1_Dataset_Merge(indexed, seed=seed)
        loader = DistributedDataLoader(dataset, batch_size=4, num_workers=workers)
        return [list(loader) for _ in range(2)]

    here = epochs(5, 0)
    for one, two in zip(here, epochs(5, 2), strict=True):
        for left, right in zip(one, two, strict=True):
            assert all(torch.equal(left[key], right[key]) for key in left)
    for other in (here[1], epochs(6, 0)[0]):
        assert not torch.equal(here[0][0]["targets"], other[0]["targets"])
    batch = here[0][0]
    for key in ("input_tokens", "targets", "input_span"):
        assert batch[key].shape == (4, 39)
    assert batch["input_length"].tolist() == [30, 33, 36, 39]
    assert batch["input_tokens"][0, 30:].tolist() == [0] * 9
    assert batch["targets"][0, 30:].tolist() == [-100] * 9
    assert batch["input_context"].dtype == torch.bool and batch["input_context"][0, 30:].all()
