"""Token data: against files put together by hand from the description of the format, and files that
are broken.
"""

from __future__ import annotations

import itertools
import pickle
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from model_center.dataset.distributed_indexed import DistributedMMapIndexedDataset
from model_center.dataset.indexed import IndexedCachedDataset, MMapIndexedDataset, make_dataset
from model_center.dataset.indexed_builder import make_builder
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import DataError
from model_center.tools import indexed_dataset as old_path

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "f", 7: "d", 8: "H"}  # struct's letters
ROWS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


def write_by_hand(
    prefix: Path,
    rows: list[list[int]],
    code: int = 4,
    letter: str | None = None,
    marks: tuple[int, ...] = (0, 2, 4),
) -> str:
    """The two files as the format is described, with nothing but struct.

    `letter`: what the elements really are.
    """
    letter = letter or CODES[code]
    data = [struct.pack(f"<{len(row)}{letter}", *row) for row in rows]
    offsets = [0, *itertools.accumulate(map(len, data))][: len(rows)]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(rows), len(marks))
    index += struct.pack(f"<{len(rows)}i", *map(len, rows))
    index += struct.pack(f"<{len(rows)}q", *offsets) + struct.pack(f"<{len(marks)}q", *marks)
    prefix.with_suffix(".bin").write_bytes(b"".join(data))
    prefix.with_suffix(".idx").write_bytes(index)
    return str(prefix)


def write_old_by_hand(
    prefix: Path, rows: list[list[int]], code: int = 4, letter: str | None = None
) -> str:
    """The same in the older format."""
    letter = letter or CODES[code]
    count, marks = len(rows), (0, len(rows))
    index = b"TNTIDX\0\0" + struct.pack(
        "<Q2Q2QQ", 1, code, struct.calcsize(letter), count, count, len(marks)
    )
    index += struct.pack(f"<{count + 1}q", *range(count + 1))
    index += struct.pack(f"<{count + 1}q", 0, *itertools.accumulate(map(len, rows)))
    index += struct.pack(f"<{count}q", *map(len, rows)) + struct.pack("<2q", *marks)
    prefix.with_suffix(".bin").write_bytes(
        b"".join(struct.pack(f"<{len(row)}{letter}", *row) for row in rows)
    )
    prefix.with_suffix(".idx").write_bytes(index)
    return str(prefix)


def build(prefix: Path, rows: list[list[int]], dtype: Any = np.int32) -> str:
    """With the builder, a document per row."""
    with make_builder(f"{prefix}.bin", "mmap", dtype) as builder:
        for row in rows:
            builder.add_item(row)
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def lists(dataset: Any) -> list[list[int]]:
    """All sequences as lists."""
    return [dataset[number].tolist() for number in range(len(dataset))]


@pytest.mark.parametrize("code", CODES)
def test_reads_what_was_written_by_hand(tmp_path: Path, code: int) -> None:
    """Every dtype; numbers, sizes and documents."""
    dataset = MMapIndexedDataset(write_by_hand(tmp_path / "a", ROWS, code))
    assert lists(dataset) == ROWS
    assert dataset.dtype == np.dtype(CODES[code])
    assert dataset.sizes.tolist() == [3, 0, 1, 4]
    assert dataset.doc_idx.tolist() == [0, 2, 4]
    assert dataset.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("code", CODES)
def test_writes_what_is_written_by_hand(tmp_path: Path, code: int) -> None:
    """Byte for byte, from tensors, arrays and lists."""
    want = write_by_hand(tmp_path / "want", ROWS, code)
    with make_builder(str(tmp_path / "got.bin"), "mmap", dtype=np.dtype(CODES[code])) as builder:
        for number, row in enumerate(ROWS):
            forms: list[Any] = [row, np.array(row, np.int64), torch.tensor(row)]
            builder.add_item(forms[number % 3])
            if number % 2:
                builder.end_document()
        builder.finalize(str(tmp_path / "got.idx"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "got.bin",
        "got.idx",
        "want.bin",
        "want.idx",
    ]
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"got{ending}").read_bytes() == Path(want + ending).read_bytes()


def test_indices_of_every_kind(tmp_path: Path) -> None:
    """numpy's integers, negative ones, slices with steps; what is out of range is an IndexError, so
    loops end.
    """
    dataset = MMapIndexedDataset(write_by_hand(tmp_path / "a", ROWS))
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), -1, np.int32(-1)):
        assert dataset[index].tolist() == ROWS[3]
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


def test_pickles_as_its_path(tmp_path: Path) -> None:
    """For worker processes, and small."""
    dataset = MMapIndexedDataset(write_by_hand(tmp_path / "a", [[1] * 10_000] * 3))
    content = pickle.dumps(dataset)
    assert len(content) < 500
    assert lists(pickle.loads(content)) == lists(dataset)


def test_an_empty_file(tmp_path: Path) -> None:
    """No sequence, or only empty ones."""
    assert lists(MMapIndexedDataset(write_by_hand(tmp_path / "a", [], marks=(0,)))) == []
    assert lists(MMapIndexedDataset(build(tmp_path / "b", [[], []]))) == [[], []]


def test_float64_under_code_6(tmp_path: Path) -> None:
    """Old tools wrote it; the size of the data tells, also when the last sequences are empty."""
    rows = [[1, 2], [3], []]
    assert MMapIndexedDataset(write_by_hand(tmp_path / "a", rows, 6)).dtype == np.float32
    old = MMapIndexedDataset(write_by_hand(tmp_path / "b", rows, 6, "d"))
    assert old.dtype == np.float64
    assert lists(old) == rows
    assert lists(make_dataset(write_old_by_hand(tmp_path / "c", rows, 6, "d"), "lazy")) == rows
    path = Path(write_by_hand(tmp_path / "d", rows, 6) + ".bin")
    path.write_bytes(path.read_bytes() * 3)  # neither 4 nor 8 bytes an element
    with pytest.raises(DataError, match="longer than its index says"):
        MMapIndexedDataset(str(path.with_suffix("")))


@pytest.mark.parametrize("impl", ["lazy", "cached", "infer"])
def test_the_older_format(tmp_path: Path, impl: str) -> None:
    """Read under its names."""
    dataset = make_dataset(write_old_by_hand(tmp_path / "a", ROWS), impl, skip_warmup=True)
    assert lists(dataset) == ROWS
    assert dataset.doc_idx.tolist() == [0, 4]


def test_cached_keeps_what_it_was_told(tmp_path: Path) -> None:
    """In memory: the file may go."""
    dataset = make_dataset(write_old_by_hand(tmp_path / "a", ROWS), "cached")
    assert isinstance(dataset, IndexedCachedDataset)
    dataset.prefetch(np.array([3, 0, 3]))
    (tmp_path / "a.bin").write_bytes(bytes((tmp_path / "a.bin").stat().st_size))
    assert lists(dataset) == [ROWS[0], [], [0], ROWS[3]]


def test_make_dataset_looks_at_the_file(tmp_path: Path) -> None:
    """The wrong kind is an error, not another error later."""
    new, old = write_by_hand(tmp_path / "a", ROWS), write_old_by_hand(tmp_path / "b", ROWS)
    assert lists(make_dataset(new, "infer")) == lists(make_dataset(new, "mmap")) == ROWS
    for path, impl, complaint in (
        (new, "cached", "kind 'mmap'"),
        (old, "mmap", "kind 'cached'"),
        (new, "fast", "unknown"),
    ):
        with pytest.raises(DataError, match=complaint):
            make_dataset(path, impl)


def _cut_off(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def _overwrite(path: Path, at: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)


BROKEN = {
    "no index": (lambda a: a.with_suffix(".idx").unlink(), r"a\.idx is missing"),
    "no data": (lambda a: a.with_suffix(".bin").unlink(), r"a\.bin is missing"),
    "empty index": (lambda a: a.with_suffix(".idx").write_bytes(b""), r"a\.idx is truncated"),
    "short header": (
        lambda a: a.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0\1"),
        r"a\.idx is truncated",
    ),
    "short index": (
        lambda a: _cut_off(a.with_suffix(".idx"), 1),
        r"a\.idx is truncated: \d+ bytes, expected \d+",
    ),
    "long index": (lambda a: _overwrite(a.with_suffix(".idx"), 106, b"x"), r"a\.idx is longer"),
    "short data": (
        lambda a: _cut_off(a.with_suffix(".bin"), 1),
        r"a\.bin is truncated: 31 bytes, where .*a\.idx says 32 of int32",
    ),
    "foreign": (
        lambda a: a.with_suffix(".idx").write_bytes(b"PK\3\4 a zip archive"),
        r"no index of token data",
    ),
    "version": (lambda a: _overwrite(a.with_suffix(".idx"), 9, b"\2"), "version 2"),
    "dtype": (lambda a: _overwrite(a.with_suffix(".idx"), 17, b"\77"), "dtype code 63"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_named(tmp_path: Path, what: str) -> None:
    """At opening, with what is wrong."""
    write_by_hand(tmp_path / "a", ROWS)
    damage, complaint = BROKEN[what]
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=complaint):
        MMapIndexedDataset(str(tmp_path / "a"))


def test_an_offset_into_nothing(tmp_path: Path) -> None:
    """Found when the sequence is read."""
    write_by_hand(tmp_path / "a", ROWS)
    for offset in (1000, -8):
        _overwrite(tmp_path / "a.idx", 34 + 4 * 4 + 8 * 2, struct.pack("<q", offset))
        dataset = MMapIndexedDataset(str(tmp_path / "a"))
        assert dataset[0].tolist() == ROWS[0]
        with pytest.raises(DataError, match="sequence 2 lies outside"):
            dataset[2]


def test_merge(tmp_path: Path) -> None:
    """Sequences and documents follow each other."""
    one, two = build(tmp_path / "one", [[1, 2], [3]]), write_by_hand(tmp_path / "two", ROWS)
    with make_builder(str(tmp_path / "all.bin"), "mmap", np.int32) as builder:
        builder.add_item([0])
        builder.merge_file_(one)
        builder.merge_file_(two)
        builder.finalize(str(tmp_path / "all.idx"))
    merged = MMapIndexedDataset(str(tmp_path / "all"))
    assert lists(merged) == [[0], [1, 2], [3], *ROWS]
    assert merged.doc_idx.tolist() == [0, 2, 3, 5, 7]
    with (
        make_builder(str(tmp_path / "x.bin"), "mmap", np.uint16) as builder,
        pytest.raises(DataError, match="holds int32"),
    ):
        builder.merge_file_(one)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """By a block that raises, one that does not finalize, and a builder that is forgotten; what was
    there stays.
    """
    build(tmp_path / "a", [[1]])
    with pytest.raises(ZeroDivisionError), make_builder(str(tmp_path / "a.bin"), "mmap") as builder:
        builder.add_item([2])
        raise ZeroDivisionError
    with make_builder(str(tmp_path / "a.bin"), "mmap") as builder:
        builder.add_item([2])
    make_builder(str(tmp_path / "a.bin"), "mmap").add_item([2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert lists(MMapIndexedDataset(str(tmp_path / "a"))) == [[1]]
    build(tmp_path / "a", [[2, 3]])
    assert lists(MMapIndexedDataset(str(tmp_path / "a"))) == [[2, 3]]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process end at 10 kB, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("items", [1, 500])
def test_a_full_disk(tmp_path: Path, small_disk: None, items: int) -> None:
    """While sequences are added, or when the last are written: an error, and what was there stays
    alone.
    """
    build(tmp_path / "a", [[1]])
    with (
        pytest.raises(OSError, match="File too large"),
        make_builder(str(tmp_path / "a.bin"), "mmap") as builder,
    ):
        for _ in range(items):
            builder.add_item([2] * 3000)
        builder.finalize(str(tmp_path / "a.idx"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert lists(MMapIndexedDataset(str(tmp_path / "a"))) == [[1]]


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
def test_numbers_that_do_not_fit(tmp_path: Path, dtype: Any, item: Any, complaint: str) -> None:
    """Instead of being wrapped around; the builder goes on."""
    with make_builder(str(tmp_path / "a.bin"), "mmap", dtype) as builder:
        with pytest.raises(DataError, match=complaint):
            builder.add_item(item)
        builder.add_item([7])
        builder.finalize(str(tmp_path / "a.idx"))
    assert lists(MMapIndexedDataset(str(tmp_path / "a"))) == [[7]]


def test_builders_of_other_kinds(tmp_path: Path) -> None:
    """Said, with what to use."""
    with pytest.raises(DataError, match="impl='mmap'"):
        make_builder(str(tmp_path / "a.bin"), "cached")
    with pytest.raises(DataError, match="complex128 cannot be stored"):
        make_builder(str(tmp_path / "a.bin"), "mmap", np.complex128)
    assert not list(tmp_path.iterdir())


def test_the_old_import_path() -> None:
    """The same objects."""
    assert old_path.MMapIndexedDataset is MMapIndexedDataset
    assert old_path.make_builder is make_builder
    assert old_path.data_file_path("x") == "x.bin"
    assert old_path.index_file_path("x") == "x.idx"


# --- numbered files, divided among ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 sequences [0], [1], ... in three files."""
    for number, (start, stop) in enumerate([(0, 10), (10, 10), (10, 23)]):
        build(tmp_path / f"part_{number}", [[row] for row in range(start, stop)])
    return tmp_path


@pytest.mark.parametrize("total", [1, 2, 4, 5])
def test_ranks_divide_all_sequences(folder: Path, total: int) -> None:
    """Each once, none left out, lengths differ by one at most; any order of access; sizes."""
    parts = [
        DistributedMMapIndexedDataset(str(folder), "part", rank, total) for rank in range(total)
    ]
    assert sorted(row for part in parts for [row] in lists(part)) == list(range(23))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for rank, part in enumerate(parts):
        assert part[-1].tolist() == lists(part)[-1]
        assert part[np.int64(1)].tolist() == [rank + total]
        assert [row.tolist() for row in part[2:0:-1]] == lists(part)[2:0:-1]
        assert part.sizes.tolist() == [1] * len(part)
        with pytest.raises(IndexError):
            part[len(part)]


def test_both_spellings_of_the_path(folder: Path) -> None:
    """A folder with or without its slash, and the beginning of names that old programs gave."""
    for path, name in (
        (f"{folder}/", "part"),
        (str(folder), "part"),
        (f"{folder}/pa", "rt"),
        (f"{folder}/./", "part"),
    ):
        assert len(DistributedMMapIndexedDataset(path, name, 0, 1)) == 23


def test_numbers_may_start_at_one(tmp_path: Path) -> None:
    """As old documents have it; gaps are an error."""
    build(tmp_path / "x_1", [[1]])
    build(tmp_path / "x_2", [[2]])
    assert lists(DistributedMMapIndexedDataset(str(tmp_path), "x", 0, 1)) == [[1], [2]]
    build(tmp_path / "x_4", [[4]])
    with pytest.raises(DataError, match=r"x_3\.idx is missing"):
        DistributedMMapIndexedDataset(str(tmp_path), "x", 0, 1)


def test_bad_parts(folder: Path) -> None:
    """Wrong rank, wrong name, two places."""
    for rank, total in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(DataError, match="is no part"):
            DistributedMMapIndexedDataset(str(folder), "part", rank, total)
    with pytest.raises(DataError, match="no token data"):
        DistributedMMapIndexedDataset(str(folder), "parts", 0, 1)
    with pytest.raises(DataError, match="no token data"):
        DistributedMMapIndexedDataset(str(folder / "nowhere"), "part", 0, 1)
    build(folder.parent / f"{folder.name}part_0", [[1]])
    with pytest.raises(DataError, match="both"):
        DistributedMMapIndexedDataset(str(folder), "part", 0, 1)


def _as_lists(rows: list[Any]) -> list[list[int]]:
    return [row.tolist() for row in rows]


def test_workers_read_it(folder: Path) -> None:
    """It travels to spawned processes; divided already, it is refused by the loader that would
    divide it again.
    """
    part = DistributedMMapIndexedDataset(str(folder), "part", 1, 2)
    assert lists(pickle.loads(pickle.dumps(part))) == lists(part)
    loader = DataLoader(
        part, batch_size=4, num_workers=1, collate_fn=_as_lists, multiprocessing_context="spawn"
    )
    assert [row for batch in loader for row in batch] == lists(part)
    with pytest.raises(DataError, match="one of 2 parts"):
        DistributedDataLoader(part)
    whole = DistributedMMapIndexedDataset(str(folder), "part", 0, 1)
    assert [
        row
        for batch in DistributedDataLoader(whole, batch_size=4, collate_fn=_as_lists)
        for row in batch
    ] == lists(whole)
