"""Block datasets: written, read by ranks, saved and resumed, shuffled, hidden, compacted; old ones;
broken ones.
"""

import itertools
import json
import os
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.data_sets.common import overwrite, refused
from tests.ranks.runner import run_ranks
from torch.utils.data import DataLoader

import bmtrain as bmt
from model_center.dataset import block_meta
from model_center.dataset.block_dataset import DistributedDataset, SimpleDataset
from model_center.dataset.block_tools import compact_dataset, mask_dataset, shuffle_dataset
from model_center.dataset.block_writer import build_dataset
from model_center.dataset.loader import DistributedDataLoader

BLOCK = 64  # a record of one small number has 18 bytes with its header: three to a block


def build(path, name, numbers, block_size=BLOCK):
    """A file of numbers."""
    with build_dataset(str(path), name, block_size) as dataset:
        for number in numbers:
            dataset.write(number)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """The numbers 0 to 22 in two files: blocks of 3, the last of each file of 1."""
    build(tmp_path / "data", "a", range(10))
    return build(tmp_path / "data", "b", range(10, 23))


def names(path):
    """What lies in a folder."""
    return sorted(entry.name for entry in Path(path).iterdir())


def read(path, **options):
    return list(SimpleDataset(path, **options))


def meta_of(path):
    return json.loads(Path(path, "meta.json").read_text())


def test_what_is_written_is_read(tmp_path):
    """Records in order, over blocks; the writer's counts; the layout of the file."""
    texts = ["x" * length for length in range(8)]
    with build_dataset(str(tmp_path), "a", block_size=256) as dataset:
        for text in texts:
            dataset.write({"text": text, "ids": torch.arange(len(text))})
        assert dataset.nlines == 8
        blocks = dataset.nblocks
    got = read(str(tmp_path))
    assert [record["text"] for record in got] == texts
    assert all(torch.equal(one["ids"], torch.arange(number)) for number, one in enumerate(got))
    content = (tmp_path / "a").read_bytes()
    assert len(content) == blocks * 256 > 256
    assert all(content[start] == 0x1E for start in range(0, len(content), 256))
    meta = meta_of(str(tmp_path))
    assert meta["block_size"] == 256
    entry = {"file_name": "a", "block_begin": 0, "block_end": blocks, "nlines": 8, "mask": False}
    assert meta["files"] == [entry | {"nbytes": dataset.nbytes}]
    assert names(str(tmp_path)) == ["a", "meta.json"]


def test_records_fill_blocks_to_the_last_byte(tmp_path):
    """No padding where none is left, and none needed; what fits no block is refused, and the
    writer goes on.
    """
    with build_dataset(str(tmp_path), "a", block_size=36) as dataset:
        for number in range(4):
            dataset.write(number)
        for value, complaint in (("x" * 40, "fits no block of 36"), ({1}, "cannot hold set")):
            with refused(complaint):
                dataset.write(value)
        dataset.write("x" * 22)  # 36 bytes with its header: a whole block
        dataset.write(4)
        assert (dataset.nblocks, dataset.nbytes, dataset.nlines) == (4, 126, 6)
    assert read(str(tmp_path)) == [0, 1, 2, 3, "x" * 22, 4]
    with build_dataset(str(tmp_path), "empty"):
        pass
    assert len(read(str(tmp_path))) == 6


def test_simple_dataset(folder):
    """Every pass reads all; len, bytes and blocks without masked files; worker processes share."""
    dataset = SimpleDataset(folder)
    assert list(dataset) == list(dataset) == list(range(23))
    assert (len(dataset), dataset.nbytes) == (23, 23 * 18)
    assert sorted(DataLoader(dataset, batch_size=None, num_workers=2)) == list(range(23))
    mask_dataset(folder, "a")
    hidden = SimpleDataset(folder)
    assert list(hidden) == list(range(10, 23))
    assert (len(hidden), hidden.nbytes, DistributedDataset(folder).nbytes) == (13, 234, 234)


def test_ranks_divide_the_blocks(folder):
    """Each epoch every record on one rank; iteration ends; `epoch` counts; a fixed order; a rank
    without a block is an error on all.
    """
    for ranks in (1, 2, 9):
        parts = [DistributedDataset(folder, rank, ranks) for rank in range(ranks)]
        for epoch in range(3):
            assert [part.epoch for part in parts] == [epoch] * ranks
            assert sorted(number for part in parts for number in part) == list(range(23))
    assert list(DistributedDataset(folder, 0, 3)) == [0, 1, 2, 9, 16, 17, 18]  # blocks 0, 3, 6
    for rank in range(10):
        with refused("9 blocks to read, too few for each of 10 ranks"):
            DistributedDataset(folder, rank, 10).read()
    for rank, ranks in ((2, 2), (-1, 2)):
        with refused("is out of range"):
            DistributedDataset(folder, rank, ranks)


def test_files_may_be_added_and_hidden_while_reading(folder):
    """New ones join the epoch at hand, once; hidden ones leave; shown again, they are not read as
    often as they missed.
    """
    dataset = DistributedDataset(folder)
    for _ in range(3):
        list(dataset)
    assert [dataset.read() for _ in range(3)] == [0, 1, 2]
    new = list(range(100, 105))
    build(folder, "c", range(100, 105))
    assert list(dataset) == [*range(3, 23), *new]
    mask_dataset(folder, "b")
    for _ in range(2):
        assert list(dataset) == [*range(10), *new]
    mask_dataset(folder, "b", mask=False)
    assert list(dataset) == [*range(23), *new]
    assert dataset.epoch == 7


def test_lost_files_are_left_out_with_a_warning(folder):
    """And forgotten by compact_dataset; open readers say what to do, and go on when the files are
    where they were.
    """
    reader = DistributedDataset(folder)
    assert reader.read() == 0
    before = Path(folder, "meta.json").read_bytes()
    Path(folder, "a").rename(f"{folder}-a")
    with pytest.warns(UserWarning, match="has lost a"):
        assert read(folder) == list(range(10, 23))
    compact_dataset(folder)
    assert read(folder) == list(range(10, 23))
    assert meta_of(folder)["files"][0]["block_begin"] == 0
    reader.read(), reader.read()
    for _ in range(2):
        with refused("open the dataset again"):
            reader.read()
    Path(f"{folder}-a").rename(Path(folder, "a"))
    Path(folder, "meta.json").write_bytes(before)
    assert [reader.read() for _ in range(3)] == [3, 4, 5]


def test_compact_from_elsewhere(folder, monkeypatch, tmp_path):
    """A relative path, another working directory; a folder without any of its files is not
    believed.
    """
    before = meta_of(folder)
    monkeypatch.chdir(tmp_path)
    compact_dataset("data")
    assert meta_of(folder) == before
    for name in ("a", "b"):
        Path(folder, name).rename(tmp_path / name)
    with refused("none of the 2 files"):
        compact_dataset(folder)
    assert meta_of(folder) == before


# --- the place


def read_and_resume(folder, steps):
    """Read some, the second rank fewer; the place; the rest of the epoch, and once more from the
    place, with the epoch behind it.
    """
    dataset, again = (DistributedDataset(folder, bmt.rank(), bmt.world_size()) for _ in range(2))
    done = [dataset.read() for _ in range(steps - bmt.rank())]
    state = dataset.state_dict()
    again.load_state_dict(state)
    return done, state, list(dataset), list(again), list(again)


def test_resume_on_other_numbers_of_ranks(folder):
    """What two ranks had not read in the epoch is read by 1, 2, 3 or 4, once; then whole epochs."""
    for steps in (2, 7):
        first, second = run_ranks(read_and_resume, 2, folder, steps)
        state = first[1]
        assert all(torch.equal(state[key], second[1][key]) for key in ("states", "block"))
        assert first[2:4] == (first[2], first[2]) and second[2:4] == (second[2], second[2])
        assert sorted(first[4] + second[4]) == list(range(23))
        for ranks in (1, 2, 3, 4):
            parts = [DistributedDataset(folder, rank, ranks) for rank in range(ranks)]
            for part in parts:
                part.load_state_dict(state)
            rest, whole = ([list(part) for part in parts] for _ in range(2))
            assert ranks != 2 or rest == [first[2], second[2]]
            assert sorted(itertools.chain(first[0], second[0], *rest)) == list(range(23))
            assert sorted(itertools.chain(*whole)) == list(range(23))


def test_places_that_do_not_fit(folder):
    """Other blocks; a state that the ranks here cannot put together. A reader that refuses one
    reads on.
    """
    few = DistributedDataset(folder)
    assert len([*few, *few]) == 46
    state = few.state_dict()
    build(folder, "c", range(5))
    more = DistributedDataset(folder)
    assert more.read() == 0
    for reader, place, first in ((more, state, 1), (few, more.state_dict(), 0)):
        with refused("strict=False"):
            reader.load_state_dict(place, strict=reader is more)
        assert reader.read() == first
    more.load_state_dict(state, strict=False)
    assert len(list(more)) == 28 and more.epoch == 3
    with refused("a run of as many ranks"):
        DistributedDataset(folder, 0, 2).state_dict()


def test_the_state_goes_through_torch_save(folder, tmp_path):
    """Without pickled classes; and through the loader."""
    loader, again = (DistributedDataLoader(DistributedDataset(folder), batch_size=4) for _ in "ab")
    batches = iter(loader)
    done = [next(batches).tolist() for _ in range(3)]
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [*itertools.chain(*done, *(batch.tolist() for batch in again))] == list(range(23))


def test_workers_share_a_part(folder):
    """Every record of the part once per epoch."""
    for rank, ranks in ((0, 2), (4, 5)):  # the second has one block: a worker has none
        part = DistributedDataset(folder, rank, ranks)
        loader = DataLoader(DistributedDataset(folder, rank, ranks), batch_size=None, num_workers=2)
        assert sorted(loader) == sorted(part)


# --- shuffling


@pytest.mark.parametrize("bucket_size", [2**30, 100, 1])
def test_shuffle(folder, tmp_path, bucket_size):
    """All records once in another order, with small and large buckets; the block size is honoured;
    it ends.
    """
    mask_dataset(folder, "a")
    target = str(tmp_path / "target")
    shuffle_dataset(folder, target, block_size=36, bucket_size=bucket_size, seed=1)
    got = read(target)
    assert sorted(got) == list(range(10, 23)) != got
    assert meta_of(target)["block_size"] == 36
    assert Path(target, "shuffled").stat().st_size == 7 * 36
    assert names(target) == ["meta.json", "shuffled"]


def test_shuffled_orders_depend_on_the_seed(folder, tmp_path):
    """The same for the same; every place equally likely (for the first record, over many seeds);
    never into a dataset.
    """

    def shuffled(name, seed, progress_bar=False):
        target = str(tmp_path / str(name))
        shuffle_dataset(folder, target, None, 100, progress_bar, seed)
        return read(target)

    orders = [shuffled(number, seed, number == 0) for number, seed in enumerate((1, 1, 2))]
    orders += [shuffled(f"none {number}", None) for number in range(2)]
    assert orders[0] == orders[1]
    assert len(set(map(tuple, orders))) == 4
    assert meta_of(str(tmp_path / "0"))["block_size"] == BLOCK
    places = [shuffled(f"s{seed}", seed).index(0) for seed in range(60)]
    assert 8 < sum(places) / len(places) < 14  # mean 11, standard error 0.86
    assert len(set(places)) > 14
    for source, target, size, complaint in (
        (folder, folder, 1, "already"),
        (str(tmp_path / "nowhere"), str(tmp_path / "target"), 1, "holds no block dataset"),
        (folder, str(tmp_path / "target"), 0, "bucket_size is 0"),
    ):
        with refused(complaint):
            shuffle_dataset(source, target, bucket_size=size)


# --- what goes wrong


def test_a_failed_build_leaves_nothing(folder):
    """Neither a file nor an entry; the name is free again; names are checked."""
    with pytest.raises(ZeroDivisionError), build_dataset(folder, "c") as dataset:
        dataset.write(1)
        raise ZeroDivisionError
    assert names(folder) == ["a", "b", "meta.json"]
    Path(folder, "stray").write_text("")
    wrong: list[tuple[str, int | None, str]] = [
        ("a", BLOCK, "has a file 'a' already"),
        ("stray", BLOCK, "no part of the dataset"),
        *((name, BLOCK, "plain file name") for name in ("x/y", ".x", "meta.json", "meta.bin")),
        ("c", 128, "blocks of 64 bytes, not 128"),
        ("c", 0, "block_size is 0"),
        ("c", 2**32, "expected bytes, from 1 to"),
    ]
    for name, size, complaint in wrong:
        with refused(complaint), build_dataset(folder, name, size):
            pytest.fail("it is said before anything is written")
    build(folder, "c", range(23, 25), None)
    assert read(folder) == list(range(25))


def test_two_builders_at_once(folder):
    """Both files are there in the end, with blocks of their own; the same name only once."""
    with build_dataset(folder, "c") as one, build_dataset(folder, "d") as two:
        for number in range(5):
            one.write(100 + number)
            two.write(200 + number)
    assert read(folder) == [*range(23), *range(200, 205), *range(100, 105)]
    with refused("already"), build_dataset(folder, "e") as one:
        one.write(0)
        build(folder, "e", range(3))
    assert read(folder)[-3:] == [0, 1, 2]


def test_a_full_disk(folder, small_disk, tmp_path):
    """An error, and the dataset is what it was; also where it is full at the meta file."""
    with pytest.raises(OSError, match="File too large"):
        build(folder, "c", range(2000))
    with pytest.raises(OSError, match="File too large"):
        shuffle_dataset(folder, str(tmp_path / "target"), block_size=20_000)
    assert names(str(tmp_path / "target")) == []
    full = OSError("no space")
    with mock.patch.object(block_meta, "write_meta", side_effect=full), pytest.raises(OSError):
        build(folder, "c", range(3))
    assert names(folder) == ["a", "b", "meta.json"]
    build(folder, "c", range(23, 25))
    assert read(folder) == list(range(25))


@pytest.mark.parametrize(
    ("at", "content", "complaint"),
    [
        (12, b"\x55", "checksum"),
        (1, b"\xff\xff", "length or checksum"),
        (64, b"\x77", "0x77, which starts no record"),
        (64, b"\0", "block 1 of .*a is damaged: no record starts it"),
        # its meta data are plain
        (0, b"\x1f" + pickle.dumps(1), "this record is a pickle"),
    ],
)
def test_damaged_blocks(folder, at, content, complaint):
    """Said where."""
    overwrite(Path(folder, "a"), at, content)
    reader = DistributedDataset(folder)
    for _ in range(2):
        with refused(complaint):
            list(reader)


def test_other_damage(folder, tmp_path):
    """Truncated files, broken meta data, no dataset."""
    with refused("blocks of 64 bytes, not 32"):
        SimpleDataset(folder, block_size=32)
    os.truncate(Path(folder, "a"), 100)
    with refused("truncated"):
        read(folder)
    meta = Path(folder, "meta.json")
    good = meta.read_text()
    for content, complaint in (
        ("{", "damaged"),
        ("[]", "damaged"),
        (good.replace('"version": 2', '"version": 9'), "version 9"),
        (good.replace('"block_begin": 4', '"block_begin": 5'), "do not follow"),
        (good.replace('"nlines"', '"lines"'), "damaged"),
        (good.replace('"block_size": 64', '"block_size": 0'), "blocks of 0 bytes"),
        (good.replace('"block_size": 64', f'"block_size": {10**18}'), f"blocks of {10**18} bytes"),
        (re.sub(r"\d+(,\s+.nbytes[^}]*}\s*])", rf"{10**18}\1", good), f"has {10**18} blocks"),
        (good.replace('"a"', '"../a"'), "names '../a', which is not a file inside it"),
        (good.replace('"a"', '"/etc/hosts"'), "not a file inside it"),
        (good.replace('"a"', '"\udcff"'), "not text"),
    ):
        meta.write_text(content, errors="surrogateescape")
        with refused(complaint):
            SimpleDataset(folder)
    meta.unlink()
    os.mkfifo(meta)
    with refused("a named pipe"):
        SimpleDataset(folder)
    meta.unlink()
    with refused("holds no block dataset"):
        DistributedDataset(str(tmp_path))
    meta.write_text(good)
    with refused("has no file 'c': expected one of a, b"):
        mask_dataset(folder, "c")
    assert meta.read_text() == good


# --- datasets of ModelCenter


@pytest.fixture(params=["class method", "state"])
def old(tmp_path, request, monkeypatch):
    """Pickled meta data and records, put together by hand; their class is pickled in either way
    that fits its description.
    """
    module = types.ModuleType("model_center.dataset.distributed_dataset")
    members = {"__init__": lambda self, *fields: setattr(self, "fields", fields)}
    kind: Any = type("FileInfo", (), {"__module__": module.__name__, **members})
    if request.param == "state":
        kind.__getstate__ = lambda self: self.fields
        kind.__setstate__ = lambda self, state: None
    else:
        kind._load_from_state = classmethod(lambda cls, version, fields: cls(*fields))
        kind._load_from_state.__func__.__name__ = "_load_from_state"
        kind.__reduce__ = lambda self: (kind._load_from_state, (1, self.fields))
    module.FileInfo = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    records = [b"\x1f" + pickle.dumps({"n": number}) for number in range(6)]
    data = b"".join((records[n] + records[n + 1]).ljust(100, b"\0") for n in (0, 2, 4))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").write_bytes(data)
    (tmp_path / "old" / "meta.bin").write_bytes(pickle.dumps([kind("x", 0, 3, 300, 6, False)]))
    monkeypatch.delitem(sys.modules, module.__name__)
    return str(tmp_path / "old")


def test_old_datasets_need_a_word(old, tmp_path):
    """Pickles run code, so they are read only when the caller says so; the block size was not
    stored. What is shuffled has no pickles any more, and what is changed has plain meta data.
    """
    with refused("allow_pickle=True"):
        SimpleDataset(old)
    got = SimpleDataset(old, block_size=100, allow_pickle=True)
    assert [record["n"] for record in got] == list(range(6)) and len(got) == 6
    with refused("another block_size"):
        read(old, allow_pickle=True)
    with refused("allow_pickle=True"):
        build(old, "y", range(3), 100)
    assert names(old) == ["meta.bin", "x"]


def test_meta_files_run_no_code(tmp_path):
    """Even when pickles are allowed: what names another class is no meta file."""
    ran = str(tmp_path / "ran").encode()
    old = b"cmodel_center\nFileInfo\n"
    for content, complaint in (
        (b"cos\nsystem\n(S'touch " + ran + b"'\ntR.", r"it names os\.system"),
        (b"cbuiltins\ngetattr\n(" + old + b"S'mro'\ntR.", r"it names FileInfo\.mro"),
    ):
        (tmp_path / "meta.bin").write_bytes(content)
        with refused(complaint):
            SimpleDataset(str(tmp_path), allow_pickle=True)
    assert names(str(tmp_path)) == ["meta.bin"]
    (tmp_path / "meta.bin").unlink()
    os.mkfifo(tmp_path / "meta.bin")
    with refused("a named pipe"):
        SimpleDataset(str(tmp_path), allow_pickle=True)
