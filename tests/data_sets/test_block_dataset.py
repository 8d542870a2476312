"""Block datasets: written, read by ranks, kept and resumed, shuffled, hidden, compacted; old ones;
broken ones.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from torch.utils.data import DataLoader

from model_center.dataset import block_meta
from model_center.dataset.block_dataset import DistributedDataset, SimpleDataset
from model_center.dataset.block_tools import compact_dataset, mask_dataset, shuffle_dataset
from model_center.dataset.block_writer import build_dataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import DataError

BLOCK = 64  # a record of one small number has 18 bytes with its header: three to a block


def build(path: Path, name: str, numbers: range, block_size: int = BLOCK) -> str:
    """A file of numbers."""
    with build_dataset(str(path), name, block_size) as dataset:
        for number in numbers:
            dataset.write(number)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The numbers 0 to 22 in two files: blocks of 3, the last of each file of 1."""
    build(tmp_path / "data", "a", range(10))
    return build(tmp_path / "data", "b", range(10, 23))


def names(path: str) -> list[str]:
    """What lies in a folder."""
    return sorted(entry.name for entry in Path(path).iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Records in order, over blocks; the writer's counts; the layout of the file."""
    records: list[dict[str, Any]] = [
        {"text": "x" * length, "ids": torch.arange(length)} for length in range(8)
    ]
    with build_dataset(str(tmp_path), "a", block_size=256) as dataset:
        for record in records:
            dataset.write(record)
        assert dataset.nlines == 8
        blocks = dataset.nblocks
    got = list(SimpleDataset(str(tmp_path)))
    assert [record["text"] for record in got] == [record["text"] for record in records]
    assert all(torch.equal(one["ids"], two["ids"]) for one, two in zip(got, records, strict=True))
    content = (tmp_path / "a").read_bytes()
    assert len(content) == blocks * 256 > 256
    assert all(content[start] == 0x1E for start in range(0, len(content), 256))
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["block_size"] == 256
    assert meta["files"] == [
        {
            "file_name": "a",
            "block_begin": 0,
            "block_end": blocks,
            "nbytes": dataset.nbytes,
            "nlines": 8,
            "mask": False,
        }
    ]
    assert names(str(tmp_path)) == ["a", "meta.json"]


def test_records_fill_blocks_to_the_last_byte(tmp_path: Path) -> None:
    """No padding where none is left, and none needed."""
    with build_dataset(str(tmp_path), "a", block_size=36) as dataset:
        for number in range(5):
            dataset.write(number)
        assert (dataset.nblocks, dataset.nbytes) == (3, 90)
        with pytest.raises(DataError, match="fits no block of 36"):
            dataset.write("x" * 40)
        with pytest.raises(DataError, match="cannot hold set"):
            dataset.write({1})
    assert list(SimpleDataset(str(tmp_path))) == list(range(5))
    with build_dataset(str(tmp_path), "empty"):
        pass
    assert list(SimpleDataset(str(tmp_path))) == list(range(5))


def test_simple_dataset(folder: str) -> None:
    """Every pass reads all; len, bytes and blocks without masked files; worker processes share."""
    dataset = SimpleDataset(folder)
    assert list(dataset) == list(dataset) == list(range(23))
    assert (len(dataset), dataset.nbytes) == (23, 23 * 18)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(loader) == list(range(23))
    mask_dataset(folder, "a")
    hidden = SimpleDataset(folder)
    assert list(hidden) == list(range(10, 23))
    assert (len(hidden), hidden.nbytes) == (13, 13 * 18)


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_ranks_divide_the_blocks(folder: str, ranks: int) -> None:
    """Each epoch every record on one rank; iteration ends; `epoch` counts; a fixed order."""
    parts = [DistributedDataset(folder, rank, ranks) for rank in range(ranks)]
    for epoch in range(3):
        assert [part.epoch for part in parts] == [epoch] * ranks
        assert sorted(number for part in parts for number in part) == list(range(23))
    assert list(DistributedDataset(folder, 0, 3)) == [0, 1, 2, 9, 16, 17, 18]  # blocks 0, 3, 6
    assert parts[0].nbytes == 23 * 18


def test_read_never_ends(folder: str) -> None:
    """Epoch after epoch, and iteration goes on from where it is."""
    dataset = DistributedDataset(folder, 1, 2)
    one = list(DistributedDataset(folder, 1, 2))
    assert [dataset.read() for _ in range(len(one) * 2 + 4)] == one * 2 + one[:4]
    assert dataset.epoch == 2
    assert list(dataset) == one[4:]
    assert dataset.epoch == 3


def test_too_few_blocks_for_the_ranks(folder: str) -> None:
    """An error on every rank, instead of a rank that reads nothing for ever."""
    for rank in range(10):
        with pytest.raises(DataError, match="9 blocks to read, too few for each of 10 ranks"):
            DistributedDataset(folder, rank, 10).read()
    with pytest.raises(DataError, match="is no part"):
        DistributedDataset(folder, 2, 2)


def test_files_may_be_added_and_hidden_while_reading(folder: str) -> None:
    """New ones join the epoch at hand, once; hidden ones leave; shown again, they are not read as
    often as they missed.
    """
    dataset = DistributedDataset(folder)
    for _ in range(3):
        list(dataset)
    assert [dataset.read() for _ in range(3)] == [0, 1, 2]
    build(Path(folder), "c", range(100, 105))
    assert list(dataset) == [*range(3, 23), *range(100, 105)]
    mask_dataset(folder, "b")
    assert list(dataset) == [*range(10), *range(100, 105)]
    assert list(dataset) == [*range(10), *range(100, 105)]
    mask_dataset(folder, "b", mask=False)
    assert list(dataset) == [*range(23), *range(100, 105)]
    assert dataset.epoch == 7


def test_lost_files_are_left_out_with_a_warning(folder: str) -> None:
    """And forgotten by compact_dataset, from any working directory; open readers say what to do."""
    open_reader = DistributedDataset(folder)
    os.unlink(Path(folder, "a"))
    with pytest.warns(UserWarning, match="has lost a"):
        assert list(SimpleDataset(folder)) == list(range(10, 23))
    compact_dataset(folder)
    assert list(SimpleDataset(folder)) == list(range(10, 23))
    assert json.loads(Path(folder, "meta.json").read_text())["files"][0]["block_begin"] == 0
    with pytest.raises(DataError, match="open the dataset again"):
        open_reader.read()


def test_compact_from_elsewhere(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A relative path, another working directory; a folder without any of its files is not
    believed.
    """
    before = Path(folder, "meta.json").read_text()
    monkeypatch.chdir(tmp_path)
    compact_dataset("data")
    assert Path(folder, "meta.json").read_text() == before
    for name in ("a", "b"):
        Path(folder, name).rename(tmp_path / name)
    with pytest.raises(DataError, match="not one of the 2 files"):
        compact_dataset(folder)
    assert Path(folder, "meta.json").read_text() == before


# --- the place


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 22, 23, 30])
def test_resume_on_one_rank(folder: str, steps: int) -> None:
    """The record after the last, and all others, in the same order."""
    dataset = DistributedDataset(folder)
    for _ in range(steps):
        dataset.read()
    state = dataset.state_dict()
    again = DistributedDataset(folder)
    again.load_state_dict(state)
    assert again.epoch == dataset.epoch == steps // 23
    assert [again.read() for _ in range(50)] == [dataset.read() for _ in range(50)]


def _read_and_keep(folder: str, steps: int) -> tuple[list[int], dict[str, torch.Tensor], list[int]]:
    """Read some, the second rank fewer; keep the place; the rest of the epoch."""
    import bmtrain as bmt

    dataset = DistributedDataset(folder, bmt.rank(), bmt.world_size())
    read = [dataset.read() for _ in range(steps - bmt.rank())]
    return read, dataset.state_dict(), list(dataset)


def _go_on(folder: str, state: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    """The rest of the epoch, and the next."""
    import bmtrain as bmt

    dataset = DistributedDataset(folder, bmt.rank(), bmt.world_size())
    dataset.load_state_dict(state)
    return list(dataset), list(dataset)


def _go_on_one_by_one(
    folder: str, state: dict[str, torch.Tensor], ranks: int
) -> list[tuple[list[int], list[int]]]:
    """The same for each of several ranks, without processes: nothing in it communicates."""
    parts = [DistributedDataset(folder, rank, ranks) for rank in range(ranks)]
    for part in parts:
        part.load_state_dict(state)
    return [(list(part), list(part)) for part in parts]


def test_resume_on_other_numbers_of_ranks(folder: str) -> None:
    """What two ranks had not read in the epoch is read by 1, 2, 3 or 4, once; then whole epochs."""
    for steps in (2, 7):
        kept = run_ranks(_read_and_keep, 2, folder, steps)
        read = [number for part, _, _ in kept for number in part]
        states = [state for _, state, _ in kept]
        assert all(torch.equal(states[0][key], states[1][key]) for key in ("states", "block"))
        assert run_ranks(_go_on, 2, folder, states[0])[0][0] == kept[0][2]
        for ranks in (1, 2, 3, 4):
            rest = _go_on_one_by_one(folder, states[0], ranks)
            assert sorted(read + [number for first, _ in rest for number in first]) == list(
                range(23)
            )
            assert sorted(number for _, second in rest for number in second) == list(range(23))
        two = _go_on_one_by_one(folder, states[0], 2)
        assert [first for first, _ in two] == [later for _, _, later in kept]


def test_places_that_do_not_fit(folder: str) -> None:
    """Other blocks; a state that the ranks here cannot put together."""
    state = DistributedDataset(folder).state_dict()
    build(Path(folder), "c", range(5))
    with pytest.raises(DataError, match="strict=False"):
        DistributedDataset(folder).load_state_dict(state)
    more = DistributedDataset(folder)
    more.load_state_dict(state, strict=False)
    assert len(list(more)) == 28
    with pytest.raises(DataError, match="process group of as many ranks"):
        DistributedDataset(folder, 0, 2).state_dict()


def test_the_state_goes_through_torch_save(folder: str, tmp_path: Path) -> None:
    """Without pickled classes; and through the loader."""
    loader = DistributedDataLoader(DistributedDataset(folder), batch_size=4)
    batches = iter(loader)
    read = [next(batches).tolist() for _ in range(3)]
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    again = DistributedDataLoader(DistributedDataset(folder), batch_size=4)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    read += [batch.tolist() for batch in again]
    assert list(itertools.chain(*read)) == list(range(23))


def test_workers_share_a_part(folder: str) -> None:
    """Every record of the part once per epoch."""
    for rank, ranks in ((0, 2), (4, 5)):  # the second has one block: a worker has none
        part = sorted(DistributedDataset(folder, rank, ranks))
        loader = DataLoader(DistributedDataset(folder, rank, ranks), batch_size=None, num_workers=2)
        assert sorted(loader) == part


# --- shuffling


@pytest.mark.parametrize("bucket_size", [2**30, 100, 1])
def test_shuffle(folder: str, tmp_path: Path, bucket_size: int) -> None:
    """All records once in another order, with small and large buckets; the block size is honoured;
    it ends.
    """
    mask_dataset(folder, "a")
    target = str(tmp_path / "target")
    shuffle_dataset(folder, target, block_size=36, bucket_size=bucket_size, seed=1)
    got = list(SimpleDataset(target))
    assert sorted(got) == list(range(10, 23)) != got
    assert json.loads(Path(target, "meta.json").read_text())["block_size"] == 36
    assert Path(target, "shuffled").stat().st_size == 7 * 36
    assert names(target) == ["meta.json", "shuffled"]


def test_shuffled_orders_depend_on_the_seed(folder: str, tmp_path: Path) -> None:
    """The same for the same; every place equally likely (for the first record, over many seeds)."""
    orders = []
    for number, seed in enumerate([1, 1, 2, None, None]):
        shuffle_dataset(
            folder,
            str(tmp_path / str(number)),
            seed=seed,
            bucket_size=100,
            progress_bar=number == 0,
        )
        orders.append(tuple(SimpleDataset(str(tmp_path / str(number)))))
    assert orders[0] == orders[1]
    assert len(set(orders)) == 4
    places = []
    for seed in range(60):
        shuffle_dataset(folder, str(tmp_path / f"s{seed}"), seed=seed, bucket_size=100)
        places.append(list(SimpleDataset(str(tmp_path / f"s{seed}"))).index(0))
    assert 8 < sum(places) / len(places) < 14  # mean 11, standard error 0.86
    assert len(set(places)) > 14


def test_shuffle_into_a_dataset_is_refused(folder: str, tmp_path: Path) -> None:
    """Also into itself."""
    with pytest.raises(DataError, match="already"):
        shuffle_dataset(folder, folder)
    with pytest.raises(DataError, match="holds no block dataset"):
        shuffle_dataset(str(tmp_path / "nowhere"), str(tmp_path / "target"))


# --- what goes wrong


def test_a_failed_build_leaves_nothing(folder: str) -> None:
    """Neither a file nor an entry; the name is free again; names are checked."""
    with pytest.raises(ZeroDivisionError), build_dataset(folder, "c") as dataset:
        dataset.write(1)
        raise ZeroDivisionError
    assert names(folder) == ["a", "b", "meta.json"]
    with pytest.raises(DataError, match="has a file 'a' already"):
        build(Path(folder), "a", range(2))
    Path(folder, "stray").write_text("")
    for name, complaint in (
        ("stray", "no part of the dataset"),
        ("x/y", "plain file name"),
        ("meta.json", "plain file name"),
    ):
        with pytest.raises(DataError, match=complaint):
            build(Path(folder), name, range(2))
    with pytest.raises(DataError, match="blocks of 64 bytes, not 128"):
        build(Path(folder), "c", range(2), block_size=128)
    with pytest.raises(DataError, match="block_size is 0"):
        build(Path(folder), "c", range(2), block_size=0)
    assert list(SimpleDataset(folder)) == list(range(23))


def test_two_builders_at_once(folder: str) -> None:
    """Both files are there in the end, with blocks of their own; the same name only once."""
    with build_dataset(folder, "c") as one, build_dataset(folder, "d") as two:
        for number in range(5):
            one.write(100 + number)
            two.write(200 + number)
    assert list(SimpleDataset(folder)) == [*range(23), *range(200, 205), *range(100, 105)]
    with pytest.raises(DataError, match="already"), build_dataset(folder, "e") as one:
        one.write(0)
        build(Path(folder), "e", range(3))
    assert list(SimpleDataset(folder))[-3:] == [0, 1, 2]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process end at 10 kB, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(folder: str, small_disk: None, tmp_path: Path) -> None:
    """An error; the dataset is what it was."""
    with pytest.raises(OSError, match="File too large"):
        build(Path(folder), "c", range(2000))
    assert names(folder) == ["a", "b", "meta.json"]
    with pytest.raises(OSError, match="File too large"):
        shuffle_dataset(folder, str(tmp_path / "target"), block_size=20_000)
    assert names(str(tmp_path / "target")) == []


def test_a_full_disk_at_the_meta_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is taken back, the meta data stay whole."""
    monkeypatch.setattr(block_meta, "write_meta", _no_space)
    with pytest.raises(OSError, match="no space"):
        build(Path(folder), "c", range(3))
    assert names(folder) == ["a", "b", "meta.json"]
    assert list(SimpleDataset(folder)) == list(range(23))


def _no_space(*_: object) -> None:
    raise OSError("no space")


def _damage(path: Path, at: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "content", "complaint"),
    [
        (12, b"\x55", "checksum"),
        (1, b"\xff\xff", "length or checksum"),
        (64, b"\x77", "0x77, which starts no record"),
        (64, b"\0", "block 1 of .*a is damaged: no record starts it"),
    ],
)
def test_damaged_blocks(folder: str, at: int, content: bytes, complaint: str) -> None:
    """Said where."""
    _damage(Path(folder, "a"), at, content)
    with pytest.raises(DataError, match=complaint):
        list(SimpleDataset(folder))


def test_other_damage(folder: str, tmp_path: Path) -> None:
    """Truncated files, broken meta data, no dataset."""
    with pytest.raises(DataError, match="blocks of 64 bytes, not 32"):
        SimpleDataset(folder, block_size=32)
    os.truncate(Path(folder, "a"), 100)
    with pytest.raises(DataError, match="truncated"):
        list(SimpleDataset(folder))
    meta = Path(folder, "meta.json")
    good = meta.read_text()
    for content, complaint in (
        ("{", "damaged"),
        ("[]", "damaged"),
        (good.replace('"version": 2', '"version": 9'), "version 9"),
        (good.replace('"block_begin": 4', '"block_begin": 5'), "do not follow"),
        (good.replace('"nlines"', '"lines"'), "damaged"),
        (good.replace('"a"', '"../a"'), "names '../a', no file inside of it"),
        (good.replace('"a"', '"/etc/hosts"'), "no file inside of it"),
        (good.replace('"a"', '"\udcff"'), "no text"),
    ):
        meta.write_text(content, errors="surrogateescape")
        with pytest.raises(DataError, match=complaint):
            SimpleDataset(folder)
    meta.unlink()
    os.mkfifo(meta)
    with pytest.raises(DataError, match="a named pipe"):
        SimpleDataset(folder)
    meta.unlink()
    with pytest.raises(DataError, match="holds no block dataset"):
        DistributedDataset(str(tmp_path))
    with pytest.raises(DataError, match="has no file 'c': expected one of a, b"):
        meta.write_text(good)
        mask_dataset(folder, "c")


# --- datasets of ModelCenter


@pytest.fixture(params=["class method", "state"])
def old(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Pickled meta data and records, put together by hand; their class is pickled in either way
    that fits its description.
    """
    module = types.ModuleType("model_center.dataset.distributed_dataset")
    namespace: dict[str, Any] = {
        "__module__": module.__name__,
        "__init__": lambda self, *fields: setattr(self, "fields", fields),
    }
    kind: Any = type("FileInfo", (), namespace)
    if request.param == "state":
        kind.__getstate__ = lambda self: self.fields
        kind.__setstate__ = lambda self, state: None
    else:

        def _load_from_state(cls: type, version: int, fields: tuple[Any, ...]) -> Any:
            return cls(*fields)

        kind._load_from_state = classmethod(_load_from_state)
        kind.__reduce__ = lambda self: (kind._load_from_state, (1, self.fields))
    module.FileInfo = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = []
    for start in range(0, 6, 2):
        block = b"".join(
            b"\x1f" + pickle.dumps({"n": number}) for number in range(start, start + 2)
        )
        blocks.append(block.ljust(100, b"\0"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").write_bytes(b"".join(blocks))
    (tmp_path / "old" / "meta.bin").write_bytes(pickle.dumps([kind("x", 0, 3, 300, 6, False)]))
    monkeypatch.delitem(sys.modules, module.__name__)
    return str(tmp_path / "old")


def test_old_datasets_need_a_word(old: str) -> None:
    """Pickles run code, so they are read only when the caller says so; the block size was not
    stored.
    """
    with pytest.raises(DataError, match="allow_pickle=True"):
        SimpleDataset(old)
    got = SimpleDataset(old, block_size=100, allow_pickle=True)
    assert [record["n"] for record in got] == list(range(6))
    assert len(got) == 6
    with pytest.raises(DataError, match="another block_size"):
        list(SimpleDataset(old, allow_pickle=True))
    with pytest.raises(DataError, match="allow_pickle=True"):
        build(Path(old), "y", range(3), 100)


def test_old_records_in_a_new_dataset_need_it_too(tmp_path: Path) -> None:
    """A data file with a pickle in it does not run because its meta data are plain."""
    folder = build(tmp_path / "data", "a", range(3))
    _damage(Path(folder, "a"), 0, b"\x1f" + pickle.dumps(1))
    with pytest.raises(DataError, match="this record is a pickle"):
        list(SimpleDataset(folder))


def test_meta_files_run_no_code(tmp_path: Path) -> None:
    """Even when pickles are allowed: what names another class is no meta file."""
    (tmp_path / "meta.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    )
    with pytest.raises(DataError, match=r"it names os\.system"):
        SimpleDataset(str(tmp_path), allow_pickle=True)
    assert names(str(tmp_path)) == ["meta.bin"]
