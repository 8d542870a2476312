"""Token data: against files put together by hand from the description of the format, and files that
are broken.
"""

import itertools
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data_sets.common import overwrite, refused, write_tokens
from tests.flushes import recorded_flushes
from torch.utils.data import DataLoader

from model_center.dataset.distributed_indexed import DistributedMMapIndexedDataset
from model_center.dataset.indexed import IndexedCachedDataset, MMapIndexedDataset, make_dataset
from model_center.dataset.indexed_builder import make_builder
from model_center.dataset.loader import DistributedDataLoader
from model_center.tools import indexed_dataset as old_path

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "f", 7: "d", 8: "H"}  # struct's letters
ROWS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


def packed(letter, *numbers):
    return struct.pack(f"<{len(numbers)}{letter}", *numbers)


def by_hand(prefix, rows, code=4, letter=None, marks=(0, 2, 4), old=False):
    """The two files as the format is described, with nothing but struct; or the older format.

    `letter`: what the elements really are.
    """
    letter = letter or CODES[code]
    count, sizes = len(rows), list(map(len, rows))
    data = [packed(letter, *row) for row in rows]
    if old:
        index = b"TNTIDX\0\0" + packed("Q", 1, code, struct.calcsize(letter), count, count, 2)
        index += packed("q", *range(count + 1)) + packed("q", 0, *itertools.accumulate(sizes))
        index += packed("q", *sizes) + packed("q", 0, count)
    else:
        offsets = [0, *itertools.accumulate(map(len, data))][:count]
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, count, len(marks))
        index += packed("i", *sizes) + packed("q", *offsets) + packed("q", *marks)
    prefix.with_suffix(".bin").write_bytes(b"".join(data))
    prefix.with_suffix(".idx").write_bytes(index)
    return str(prefix)


def build(prefix, rows, dtype=np.int32):
    """With the builder, a document per row."""
    return write_tokens(prefix, [[row] for row in rows], dtype)


def lists(dataset):
    """All sequences as lists."""
    return [dataset[number].tolist() for number in range(len(dataset))]


@pytest.mark.parametrize("code", CODES)
def test_files_are_those_written_by_hand(tmp_path, code):
    """Every dtype: read, with numbers, sizes and documents; written byte for byte, from tensors,
    arrays and lists.
    """
    want = by_hand(tmp_path / "want", ROWS, code)
    dataset = MMapIndexedDataset(want)
    assert lists(dataset) == ROWS
    assert dataset.dtype == np.dtype(CODES[code])
    assert dataset.sizes.tolist() == [3, 0, 1, 4]
    assert dataset.doc_idx.tolist() == [0, 2, 4]
    assert dataset.tokens.tolist() == list(itertools.chain(*ROWS))
    with make_builder(str(tmp_path / "got.bin"), "mmap", np.dtype(CODES[code])) as builder:
        for number, row in enumerate(ROWS):
            forms: list[Any] = [row, np.array(row, np.int64), torch.tensor(row)]
            builder.add_item(forms[number % 3])
            assert len(builder) == number + 1
            if number % 2:
                builder.end_document()
        builder.finalize(str(tmp_path / "got.idx"))
    assert len([*tmp_path.iterdir()]) == 4
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"got{ending}").read_bytes() == Path(want + ending).read_bytes()


def test_indices_of_every_kind(tmp_path):
    """numpy's integers, negative ones, slices with steps; what is out of range is an IndexError, so
    loops end. It pickles as its path, for worker processes, and small.
    """
    dataset = MMapIndexedDataset(by_hand(tmp_path / "a", ROWS))
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), -1, np.int32(-1)):
        assert dataset[index].tolist() == ROWS[3]
    assert dataset[-4].tolist() == ROWS[0]
    for cut in (slice(1, 3), slice(None), slice(None, None, -2), slice(5, 9)):
        assert [row.tolist() for row in dataset[cut]] == ROWS[cut]
    assert [row.tolist() for row in dataset] == ROWS  # type: ignore[attr-defined]  # Python iterates by `__getitem__`
    for index in (4, -5, np.int64(4)):
        with pytest.raises(IndexError, match="it has 4"):
            dataset[index]
    with pytest.raises(TypeError):
        dataset[1.0]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 1
    large = MMapIndexedDataset(by_hand(tmp_path / "b", [[1] * 10_000] * 3))
    content = pickle.dumps(large)
    assert len(content) < 500
    assert lists(pickle.loads(content)) == lists(large)
    kinds = MMapIndexedDataset, DistributedMMapIndexedDataset
    assert all(kind.exists(path=str(tmp_path / "b")) for kind in kinds)
    for ending in (".bin", ".idx"):
        (tmp_path / f"b{ending}").unlink()
        assert not any(kind.exists(str(tmp_path / "b")) for kind in kinds)


def test_empty_sequences_and_float64_under_code_6(tmp_path):
    """No sequence, or only empty ones. Old tools wrote float64 so; the size of the data tells, also
    when the last sequences are empty.
    """
    assert lists(MMapIndexedDataset(by_hand(tmp_path / "a", [], marks=(0,)))) == []
    assert lists(MMapIndexedDataset(build(tmp_path / "a", [[], []]))) == [[], []]
    rows = [[1, 2], [3], []]
    assert MMapIndexedDataset(by_hand(tmp_path / "a", rows, 6)).dtype == np.float32
    old = MMapIndexedDataset(by_hand(tmp_path / "b", rows, 6, "d"))
    assert old.dtype == np.float64
    assert lists(old) == rows
    assert lists(make_dataset(by_hand(tmp_path / "c", rows, 6, "d", old=True), "lazy")) == rows
    path = Path(by_hand(tmp_path / "d", rows, 6) + ".bin")
    path.write_bytes(path.read_bytes() * 3)  # neither 4 nor 8 bytes an element
    with refused("longer than its index says"):
        MMapIndexedDataset(str(path.with_suffix("")))


def test_the_older_format(tmp_path):
    """Read under its names; kept in memory where that is asked for: the file may go. The wrong kind
    is an error, not another error later.
    """
    new, old = by_hand(tmp_path / "b", ROWS), by_hand(tmp_path / "a", ROWS, old=True)
    for path, impl in itertools.product((old, new), ("lazy", "cached", "infer", "mmap")):
        if impl == "infer" or (impl == "mmap") == (path == new):
            dataset = make_dataset(path, impl, skip_warmup=True)
            assert lists(dataset) == ROWS
            assert dataset.doc_idx.tolist() == ([0, 2, 4] if path == new else [0, 4])
        else:
            with refused(f"kind '{'mmap' if path == new else 'cached'}'"):
                make_dataset(path, impl)
    with refused("unknown"):
        make_dataset(new, "fast")
    for code, letter in CODES.items():
        one = make_dataset(by_hand(tmp_path / "c", ROWS, code, old=True), "lazy")
        assert lists(one) == ROWS and one.dtype == np.dtype(letter)
    cached = make_dataset(old, "cached")
    assert isinstance(cached, IndexedCachedDataset)
    cached.prefetch(np.array([1, 2]))
    cached.prefetch(np.array([3, 0, 3]))
    (tmp_path / "a.bin").write_bytes(bytes((tmp_path / "a.bin").stat().st_size))
    assert lists(cached) == [ROWS[0], [], [0], ROWS[3]]


# The file's ending, what it holds then, or its last byte gone; and what is said of it.
BROKEN: dict[str, tuple[str, bytes | int | None, str]] = {
    "no index": (".idx", None, r"a\.idx is missing"),
    "no data": (".bin", None, r"a\.bin is missing"),
    "empty index": (".idx", b"", r"a\.idx is truncated"),
    "short header": (".idx", b"MMIDIDX\0\0\1", r"a\.idx is truncated"),
    "short index": (".idx", -1, r"a\.idx is truncated: \d+ bytes, expected \d+"),
    "short data": (".bin", -1, r"a\.bin is truncated: 31 bytes, where .*a\.idx says 32 of int32"),
    "foreign": (".idx", b"PK\3\4 a zip archive", r"not an index of token data"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_named(tmp_path, what):
    """At opening, with what is wrong."""
    prefix = by_hand(tmp_path / "a", ROWS)
    ending, content, complaint = BROKEN[what]
    file = Path(prefix + ending)
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(before[:content] if isinstance(content, int) else content)
    with refused(complaint):
        MMapIndexedDataset(prefix)
    file.write_bytes(before)
    assert lists(MMapIndexedDataset(prefix)) == ROWS


def test_broken_numbers_are_named(tmp_path):
    """Of either format; an offset into nothing is found when the sequence is read."""
    for old, at, content, complaint in (
        (False, 106, b"x", r"a\.idx is longer"),
        (False, 9, b"\2", "version 2"),
        (False, 17, b"\77", "dtype code 63"),
        (True, 8, b"\2", "version 2"),
        (True, 24, b"\2", "elements of 2 bytes, where its dtype int32 has 4"),
        (True, 56 + 8, b"\2", "tensors of several dims"),
    ):
        prefix = by_hand(tmp_path / "a", ROWS, old=old)
        overwrite(tmp_path / "a.idx", at, content)
        with refused(complaint):
            MMapIndexedDataset(prefix)
    by_hand(tmp_path / "a", ROWS)
    for offset in (1000, -8):
        overwrite(tmp_path / "a.idx", 34 + 4 * 4 + 8 * 2, packed("q", offset))
        dataset = MMapIndexedDataset(str(tmp_path / "a"))
        assert dataset[0].tolist() == ROWS[0]
        with refused("sequence 2 lies outside"):
            dataset[2]
        assert dataset[3].tolist() == ROWS[3]


def test_merge(tmp_path):
    """Sequences and documents follow each other; another dtype is refused, and the builder goes
    on.
    """
    one, two = build(tmp_path / "one", [[1, 2], [3]]), by_hand(tmp_path / "two", ROWS)
    with make_builder(str(tmp_path / "all.bin"), "mmap", np.int32) as builder:
        builder.add_item([0])
        builder.merge_file_(one)
        with refused("holds uint16"):
            builder.merge_file_(build(tmp_path / "small", [[1]], np.uint16))
        builder.merge_file_(two)
        builder.finalize(str(tmp_path / "all.idx"))
    merged = MMapIndexedDataset(str(tmp_path / "all"))
    assert lists(merged) == [[0], [1, 2], [3], *ROWS]
    assert merged.doc_idx.tolist() == [0, 2, 3, 5, 7]


def test_nothing_is_left_behind(tmp_path, small_disk):
    """By a block that raises, one that does not finalize, a builder that is forgotten, and a full
    disk, while sequences are added or when the last are written; what was there stays.
    """
    prefix = build(tmp_path / "a", [[1]])
    with pytest.raises(ZeroDivisionError), make_builder(f"{prefix}.bin", "mmap") as builder:
        builder.add_item([2])
        raise ZeroDivisionError
    with make_builder(f"{prefix}.bin", "mmap") as builder:
        builder.add_item([2])
    make_builder(f"{prefix}.bin", "mmap").add_item([2])
    for items in (1, 500):
        with pytest.raises(OSError, match="File too large"):
            build(tmp_path / "a", [[2] * 3000] * items)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
        assert lists(MMapIndexedDataset(prefix)) == [[1]]
    build(tmp_path / "a", [[2, 3]])
    assert lists(MMapIndexedDataset(prefix)) == [[2, 3]]


def test_files_are_on_the_disk_before_they_take_their_names(tmp_path):
    with recorded_flushes() as flushes:
        build(tmp_path / "a", ROWS)
    assert flushes.renamed == [("a.bin", True), ("a.idx", True)]


@pytest.mark.parametrize(
    ("dtype", "item", "complaint"),
    [
        (np.uint16, [1, 65536], "from 1 to 65536: expected numbers that fit uint16"),
        (np.int32, [2**31], "fit int32"),
        (np.uint8, [-1], "fit uint8"),
        (np.int32, [1.5], "float64"),
        (np.int32, [[1], [2]], "1-D"),
    ],
)
def test_numbers_that_do_not_fit(tmp_path, dtype, item, complaint):
    """Instead of being wrapped around; the builder goes on."""
    limits = np.iinfo(dtype)
    with make_builder(str(tmp_path / "a.bin"), "mmap", dtype) as builder:
        with refused(complaint):
            builder.add_item(item)
        builder.add_item([limits.min, limits.max])
        builder.finalize(str(tmp_path / "a.idx"))
    assert lists(MMapIndexedDataset(str(tmp_path / "a"))) == [[limits.min, limits.max]]


def test_builders_of_other_kinds(tmp_path):
    """Said, with what to use. The old import path has the same objects."""
    with refused("impl='mmap'"):
        make_builder(str(tmp_path / "a.bin"), "cached")
    with refused("complex128 cannot be stored"):
        make_builder(str(tmp_path / "a.bin"), "mmap", np.complex128)
    assert not list(tmp_path.iterdir())
    assert old_path.MMapIndexedDataset is MMapIndexedDataset
    assert old_path.make_builder is make_builder
    assert old_path.data_file_path("x") == "x.bin"
    assert old_path.index_file_path("x") == "x.idx"


# --- numbered files, divided among ranks


@pytest.fixture
def folder(tmp_path):
    """23 sequences [0], [1], ... in three files."""
    for number, (start, stop) in enumerate([(0, 10), (10, 10), (10, 23)]):
        build(tmp_path / f"part_{number}", [[row] for row in range(start, stop)])
    return tmp_path


def part(path, rank=0, total=1, name="part"):
    return DistributedMMapIndexedDataset(str(path), name, rank, total)


def test_ranks_divide_all_sequences(folder):
    """Each once, none left out, lengths differ by one at most; any order of access; sizes; both
    spellings of the path.
    """
    for total in (1, 2, 4, 5):
        parts = [part(folder, rank, total) for rank in range(total)]
        assert sorted(row for one in parts for [row] in lists(one)) == list(range(23))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for rank, one in enumerate(parts):
            assert one[-1].tolist() == lists(one)[-1]
            assert one[-len(one)].tolist() == [rank]
            assert one[np.int64(1)].tolist() == [rank + total]
            assert [row.tolist() for row in one[2:0:-1]] == lists(one)[2:0:-1]
            assert one.sizes.tolist() == [1] * len(one)
            for index in (len(one), -len(one) - 1):
                with pytest.raises(IndexError):
                    one[index]
    for path, name in ((f"{folder}/", "part"), (f"{folder}/pa", "rt"), (f"{folder}/./", "part")):
        assert len(part(path, name=name)) == 23


def test_bad_parts(folder, tmp_path):
    """Wrong rank, wrong name, two places. Numbers may start at one; gaps are an error."""
    for rank, total in ((2, 2), (-1, 2), (0, 0)):
        with refused("is out of range"):
            part(folder, rank, total)
    for path, name in ((folder, "parts"), (folder / "nowhere", "part")):
        with refused("no token data"):
            part(path, name=name)
    for number in (1, 2, 4):
        build(tmp_path / f"x_{number}", [[number]])
        if number == 2:
            assert lists(part(tmp_path, name="x")) == [[1], [2]]
    with refused(r"x_3\.idx is missing"):
        part(tmp_path, name="x")
    build(folder.parent / f"{folder.name}part_0", [[1]])
    with refused("both"):
        part(folder)


def as_lists(rows):
    return [row.tolist() for row in rows]


def test_workers_read_it(folder):
    """It travels to other processes; divided already, it is refused by the loader that would divide
    it again.
    """
    own, whole = part(folder, 1, 2), part(folder)
    assert lists(pickle.loads(pickle.dumps(own))) == lists(own)
    how: Any = {"batch_size": 4, "collate_fn": as_lists}
    loader = DataLoader(own, num_workers=1, **how)
    assert [row for batch in loader for row in batch] == lists(own)
    with refused("one of 2 parts"):
        DistributedDataLoader(own)
    assert [row for batch in DistributedDataLoader(whole, **how) for row in batch] == lists(whole)
