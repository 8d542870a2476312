"""Files and states that are damaged, of another kind, or made to harm: refused by name and reason."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import resource
import socket
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.checkpoint.files import inside, read_object, read_text, read_torch
from bmtrain.errors import CheckpointError
from bmtrain.optim import AdamOptimizer, OptimManager
from model_center.config.base import read_json
from model_center.errors import ConfigError, DataError
from model_center.tokenizer.serialized import read
from model_center.training.files import write_whole

TENSORS = {"weight": torch.ones(3, 4)}


def rewritten(path: pathlib.Path, old: bytes, new: bytes, kind: int = zipfile.ZIP_STORED) -> None:
    """The archive at `path` with other bytes in its pickle."""
    with zipfile.ZipFile(path) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in content.items():
            is_pickle = name.endswith("data.pkl") and bool(old)
            assert old in data or not is_pickle
            archive.writestr(name, data.replace(old, new) if is_pickle else data)


def big(number: int) -> bytes:
    """A whole number as a pickle has it."""
    data = number.to_bytes(8, "little")
    return b"\x8a" + bytes([len(data)]) + data


def huge_storage(path: pathlib.Path) -> None:
    """12 elements that are said to be 2**50."""
    torch.save(TENSORS, path)
    rewritten(path, b"K\x0c", big(2**50))


def huge_shape(path: pathlib.Path) -> None:
    torch.save(TENSORS, path)
    rewritten(path, b"K\x03K\x04\x86", big(2**50) + b"K\x04\x86")


def unpacking(path: pathlib.Path) -> None:
    """Zeros that a zip archive makes small."""
    torch.save({"weight": torch.zeros(10**6)}, path)
    rewritten(path, b"", b"", zipfile.ZIP_DEFLATED)


def running(path: pathlib.Path) -> None:
    torch.save({"weight": print}, path)


def truncated(path: pathlib.Path) -> None:
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-40])


def flipped(path: pathlib.Path) -> None:
    torch.save(TENSORS, path)
    data = bytearray(path.read_bytes())
    start = data.index(b"data.pkl") + 60
    data[start : start + 40] = bytes(40)
    path.write_bytes(bytes(data))


def a_socket(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


BAD: dict[str, Callable[[pathlib.Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.touch(),
    "text": lambda path: path.write_text("{}"),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "folder": lambda path: path.mkdir(),
    "named pipe": os.mkfifo,
    "socket": a_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("/nowhere"),
    "truncated": truncated,
    "flipped": flipped,
    "pickle": lambda path: path.write_bytes(pickle.dumps({"weight": [1]})),
    "code": running,
    "huge shape": huge_shape,
    "unpacking": unpacking,
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("mmap", [True, False])
def test_torch_files(kind: str, mmap: bool, tmp_path: pathlib.Path) -> None:
    """A CheckpointError with the path and a reason, soon, without much memory; no advice to run
    what the file holds.
    """
    path = tmp_path / "file.pt"
    BAD[kind](path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as raised:
        content = read_torch(path, mmap=mmap)
        raise AssertionError(f"read {content}")
    assert str(path) in str(raised.value) and "weights_only" not in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "KiB"


def test_storages_larger_than_the_file(tmp_path: pathlib.Path) -> None:
    """Mapped, they are as large as what is there; else they are refused."""
    path = tmp_path / "file.pt"
    huge_storage(path)
    with pytest.raises(CheckpointError, match="it is damaged or no checkpoint"):
        read_torch(path, mmap=False)
    assert torch.equal(read_torch(path)["weight"], TENSORS["weight"])


def test_good_files(tmp_path: pathlib.Path) -> None:
    """Old and new forms, and a link to one."""
    for new in (True, False):
        path = tmp_path / f"{new}.pt"
        torch.save(TENSORS, path, _use_new_zipfile_serialization=new)
        (tmp_path / f"link-{new}.pt").symlink_to(path)
        for mmap in (True, False):
            for name in (path.name, f"link-{new}.pt"):
                assert torch.equal(
                    read_torch(tmp_path / name, mmap=mmap)["weight"], torch.ones(3, 4)
                )


def test_text_files(tmp_path: pathlib.Path) -> None:
    """JSON that is none, too large or too deep; pipes are not waited for."""
    path = tmp_path / "file.json"
    for content, reason in (
        (b"", "no JSON"),
        (b"[1]", "holds a list, expected an object"),
        (b"\xff\xfe", "no text"),
        (b"[" * 10**6, "no JSON"),
        (b'{"a": 1', "no JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=reason):
            read_object(path)
        with pytest.raises(ConfigError, match=reason):
            read_json(path)
        with pytest.raises(DataError, match=reason):
            read(path)
    with pytest.raises(CheckpointError, match="it has 7 bytes, expected 6 at most"):
        read_text(path, 6)
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no space on the disk
    with pytest.raises(CheckpointError, match=f"it has {2**40} bytes"):
        read_object(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="it is a named pipe, expected a regular file"):
        read_object(path)


def test_names_stay_in_their_folder(tmp_path: pathlib.Path) -> None:
    """Up, absolute, through a linked folder, empty, of another type; links of Hugging Face's cache
    are followed.
    """
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (tmp_path / "else").mkdir()
    (folder / "link").symlink_to(tmp_path / "else")
    wrong = ["../x", "/etc/passwd", "part/../../x", "..", "", "link/x", "//x", "a\0b", 3, None]
    for name in wrong:
        with pytest.raises(CheckpointError, match="no file inside of it"):
            inside(folder, name)
    assert inside(folder, "part/x") == folder / "part" / "x"
    assert inside(pathlib.Path("."), "x") == pathlib.Path("x")
    (folder / "x").symlink_to("../else/blob")
    assert inside(folder, "x") == folder / "x"


def loading(folder: str) -> list[str]:
    """What `bmt.load` says of folders and files that are made to harm."""
    said = []
    for place in sorted(pathlib.Path(folder).iterdir()):
        model = torch.nn.Linear(4, 3, bias=False)
        before = model.weight.detach().clone()
        with pytest.raises(CheckpointError) as raised:
            bmt.load(model, str(place))
        assert torch.equal(model.weight, before)
        said.append(f"{place.name}: {raised.value}")
    good = torch.nn.Linear(4, 3, bias=False)
    bmt.load(good, str(pathlib.Path(folder).parent / "cache" / "snapshots" / "1"))
    assert torch.equal(good.weight, torch.ones(3, 4))
    return said


def index(folder: pathlib.Path, content: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_load_stays_in_the_folder(tmp_path: pathlib.Path) -> None:
    """An index that names files elsewhere, pipes, headers of 2**60 bytes; a snapshot of Hugging
    Face's cache is read.
    """
    places = tmp_path / "places"
    safetensors.torch.save_file(TENSORS, tmp_path / "outside.safetensors")
    index(places / "absolute", {"weight_map": {"weight": str(tmp_path / "outside.safetensors")}})
    index(places / "up", {"weight_map": {"weight": "../../outside.safetensors"}})
    index(places / "types", {"weight_map": {"weight": 3}})
    index(places / "list", [1])
    os.mkfifo(places / "pipe.pt")
    os.mkfifo(places / "pipe.safetensors")
    (places / "long.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1", tmp_path / "cache" / "blobs"
    index(snapshot, {"weight_map": {"weight": "model-1.safetensors"}})
    blobs.mkdir()
    safetensors.torch.save_file(TENSORS, blobs / "a1b2")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/a1b2")
    (said, same) = run_ranks(loading, 2, str(places))
    assert len(said) == len(same) == 7
    reasons = {
        "absolute": "no file inside of it",
        "up": "no file inside of it",
        "types": "weight_map of names to files",
        "list": "holds a list",
        "pipe.pt": "named pipe",
        "pipe.safetensors": "named pipe",
        "long.safetensors": "no safetensors file",
    }
    for line in said:
        assert reasons[line.partition(":")[0]] in line


def saving(folder: str) -> None:
    """Temporary names that lead to a file of the user's."""
    here = pathlib.Path(folder)
    precious = here / "precious"
    precious.write_text("mine")
    model = torch.nn.Linear(4, 3)
    for name in ("model.pt", "model.safetensors"):
        (here / f"{name}.tmp").symlink_to(precious)
        bmt.save(model, str(here / name))
        bmt.load(model, str(here / name))
        assert not (here / name).is_symlink()
    (here / "text.partial").symlink_to(precious)
    write_whole(here / "text", "ours")
    assert (here / "text").read_text() == "ours" and precious.read_text() == "mine"


def test_links_at_temporary_names_are_not_followed(tmp_path: pathlib.Path) -> None:
    run_ranks(saving, 1, str(tmp_path))


def states() -> list[str]:
    """On two ranks: what is no state, on the last of them."""
    parameter = torch.nn.Parameter(torch.ones(3, device="cpu"))
    optimizer = AdamOptimizer([parameter])
    manager = OptimManager(loss_scale=8)
    manager.add_optimizer(optimizer)
    parameter.grad = torch.ones(3)
    manager.step()
    good = manager.state_dict()
    own = good["optimizers"][0]
    wrong: list[Any] = [3, None, [], {}, {**good, "optimizers": None}, {**good, "optimizers": [3]}]
    wrong += [{**good, "optimizers": [{**own, "state": [1]}]}]
    wrong += [{**good, "optimizers": [{**own, "state": {0: 3}}]}]
    wrong += [{**good, "optimizers": [{**own, "param_groups": "x"}]}]
    wrong += [{**good, "optimizers": [{**own, "param_groups": [{"lr": 1}]}]}]
    wrong += [
        {**good, "lr_schedulers": ["x"]},
        {**good, "num_steps": "x"},
        {**good, "num_steps": -1},
    ]
    wrong += [{**good, "loss_scale_state": {"value": "x", "good_steps": 0}}]
    wrong += [{**good, "loss_scale_state": {"value": float("nan"), "good_steps": 0}}]
    wrong += [{**good, "loss_scale_state": {}}]
    said = []
    last = bmt.rank() == bmt.world_size() - 1
    for state in wrong:
        with pytest.raises(
            CheckpointError, match=r"expected what state_dict\(\) returned"
        ) as raised:
            manager.load_state_dict(state if last else good)
        said.append(str(raised.value))
    for state in (None, [], own["state"]):
        with pytest.raises(CheckpointError, match="load_state_dict got no optimizer state"):
            optimizer.load_state_dict(state if last else own)
    manager.load_state_dict(good)
    assert manager.state_dict()["num_steps"] == 1
    return said


def test_states_are_checked_on_all_ranks() -> None:
    """One rank's state is none: all raise, and nothing has changed."""
    first, second = run_ranks(states, 2)
    assert [text.removesuffix(" (on rank 1)") for text in first] == second
