"""Files and states that are damaged, of another kind, or made to harm: refused by name and reason."""

import copy
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
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.checkpoint.files import inside, read_object, read_text, read_torch
from bmtrain.errors import CheckpointError
from bmtrain.optim import AdamOptimizer
from model_center.config.base import read_json
from model_center.errors import ConfigError, DataError
from model_center.tokenizer.serialized import read
from model_center.weights.staging import write_whole

TENSORS = {"weight": torch.ones(3, 4)}


def rewritten(path, old, new, kind=zipfile.ZIP_STORED):
    """An archive of torch with other bytes in its pickle."""
    torch.save(TENSORS if old else {"weight": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in content.items():
            is_pickle = name.endswith("data.pkl") and bool(old)
            assert old in data or not is_pickle
            archive.writestr(name, data.replace(old, new) if is_pickle else data)


def changed(start, stop, new=b""):
    """A good file, cut or overwritten."""

    def write(path):
        save = safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save
        save(TENSORS, path)
        data = path.read_bytes()
        at = data.find(b"data.pkl") + start if new else start
        path.write_bytes(data[:at] + new + data[at:][len(new) : stop])

    return write


def saved(content, **options):
    return lambda path: torch.save(content, path, **options)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def index(content):
    """A folder with an index."""

    def write(folder):
        folder.mkdir()
        safetensors.torch.save_file({"a": torch.ones(1)}, folder / "x.safetensors")
        text = content if isinstance(content, str) else json.dumps({"weight_map": content})
        (folder / "model.safetensors.index.json").write_text(text)

    return write


HUGE = b"\x8a\x08" + (2**50).to_bytes(8, "little")  # as a pickle has it
OLD = {"_use_new_zipfile_serialization": False}
# What a file is, by its name, and what is said of it.
BAD = {
    "missing.pt": (lambda path: None, "no such file or folder; "),
    "empty.pt": (lambda path: path.touch(), "not a checkpoint"),
    "text.pt": (lambda path: path.write_text("{}"), "not a checkpoint"),
    "zeros.pt": (lambda path: path.write_bytes(bytes(1000)), "not a checkpoint"),
    "folder.pt": (lambda path: path.mkdir(), "holds nothing; expected one of"),
    "pipe.pt": (os.mkfifo, "named pipe"),
    "socket.pt": (a_socket, "a socket"),
    "device.pt": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "link.pt": (lambda path: path.symlink_to("/nowhere"), "no such file"),
    "truncated.pt": (changed(0, -40), "truncated"),
    "flipped.pt": (changed(60, None, bytes(40)), "cannot load"),
    "pickle.pt": (lambda path: path.write_bytes(pickle.dumps({"a": os.getcwd})), "could run code"),
    "code.pt": (saved({"weight": print}), "other than tensors"),
    "old_code.pt": (saved({"weight": print}, **OLD), "other than tensors"),
    "module.pt": (saved({"a": torch.nn.Linear(1, 1)}), "other than tensors"),
    "shape.pt": (lambda path: rewritten(path, b"K\x03K\x04\x86", HUGE + b"K\x04\x86"), "damaged"),
    "zip.pt": (lambda path: rewritten(path, b"", b"", zipfile.ZIP_DEFLATED), "would unpack to"),
}
BAD_MODELS = {
    **BAD,
    "list.pt": (saved([torch.ones(1)]), "holds a list"),
    "nested.pt": (saved({"model": TENSORS, "step": 3}), "holds model, step instead of tensors"),
    "half.safetensors": (changed(0, -20), "truncated"),
    "tiny.safetensors": (lambda path: path.write_bytes(bytes(6)), "truncated"),
    "text.safetensors": (lambda path: path.write_text("this is none"), "no safetensors"),
    "pipe.safetensors": (os.mkfifo, "named pipe"),
    "long.safetensors": (
        lambda path: path.write_bytes((2**60).to_bytes(8, "little") + b"{}"),
        "no safetensors file",
    ),
    "no json": (index("{"), "not JSON"),
    "a list": (index("[1]"), "holds a list"),
    "lying": (index({"weight": "x.safetensors"}), "does not hold it"),
    "types": (index({"weight": 3}), "weight_map of names to files"),
    "absolute": (index({"weight": "/outside.safetensors"}), "not a file inside it"),
    "up": (index({"weight": "../../outside.safetensors"}), "not a file inside it"),
}


def loading(folder):
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 3, bias=False))
    before = model.state_dict()["weight"].clone()
    for name, (_, reason) in BAD_MODELS.items():
        with pytest.raises(CheckpointError) as raised:
            bmt.load(model, folder / name)
        assert name in str(raised.value) and reason in str(raised.value), raised.value
        assert torch.equal(model.state_dict()["weight"], before)
    bmt.load(model, folder.parent / "cache" / "snapshots" / "1")
    assert model.state_dict()["weight"].eq(1).all()
    # temporary names that lead to a file of the user's
    for name in ("model.pt", "model.safetensors"):
        path = folder.parent / name
        if bmt.rank() == 0:
            path.with_name(f"{name}.tmp").symlink_to(folder.parent / "precious")
        bmt.save(model, path)
        bmt.load(model, path)
        assert not path.is_symlink()


def test_bad_files_are_explained_on_every_rank(tmp_path):
    """Soon, without much memory, with no advice to run what the file holds; then a snapshot of
    Hugging Face's cache, made of links, is read.
    """
    places = tmp_path / "places"
    places.mkdir()
    for name, (make, _) in BAD_MODELS.items():
        make(places / name)
    for name in BAD:
        for mmap in (True, False):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(CheckpointError) as raised:
                read_torch(places / name, mmap=mmap)
            assert str(places / name) in str(raised.value)
            assert "weights_only" not in str(raised.value)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "KiB"
    safetensors.torch.save_file(TENSORS, tmp_path / "outside.safetensors")
    (tmp_path / "cache" / "snapshots").mkdir(parents=True)
    snapshot = tmp_path / "cache" / "snapshots" / "1"
    index({"weight": "model-1.safetensors"})(snapshot)
    (snapshot / "model-1.safetensors").symlink_to("../../../outside.safetensors")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run_ranks(loading, 2, places)
    (tmp_path / "text.partial").symlink_to(precious)
    write_whole(tmp_path / "text", "ours")
    assert (tmp_path / "text").read_text() == "ours" and precious.read_text() == "mine"


def test_good_files(tmp_path):
    """Old and new forms, a link to one; storages larger than the file are as large as what is
    there if they are mapped, else refused.
    """
    path = tmp_path / "file.pt"
    (tmp_path / "link.pt").symlink_to(path)
    for options in (OLD, {}):
        saved(TENSORS, **options)(path)
        for mmap in (True, False):
            for name in (path, tmp_path / "link.pt"):
                assert torch.equal(read_torch(name, mmap=mmap)["weight"], torch.ones(3, 4))
    rewritten(path, b"K\x0c", HUGE)
    with pytest.raises(CheckpointError, match="it is damaged or not a checkpoint"):
        read_torch(path, mmap=False)
    assert torch.equal(read_torch(path)["weight"], TENSORS["weight"])


def test_text_files_and_names(tmp_path):
    """JSON that is none, too large or too deep; pipes are not waited for. Names that lead out of
    their folder; links of Hugging Face's cache are followed.
    """
    path = tmp_path / "file.json"
    for content, reason in (
        (b"", "not JSON"),
        (b"[1]", "holds a list, expected an object"),
        (b"\xff\xfe", "not text"),
        (b"[" * 10**6, "not JSON"),
    ):
        path.write_bytes(content)
        readers: tuple[tuple[Callable[..., Any], Any], ...]
        readers = ((read_object, CheckpointError), (read_json, ConfigError), (read, DataError))
        for reader, kind in readers:
            with pytest.raises(kind, match=reason):
                reader(path)
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no space on the disk
    with pytest.raises(CheckpointError, match=f"it has {2**40} bytes"):
        read_object(path)
    path.write_text('{"a": 1}')
    assert read_text(path, 8) == '{"a": 1}' and read_object(path) == {"a": 1}
    with pytest.raises(CheckpointError, match="it has 8 bytes, expected 7 at most"):
        read_text(path, 7)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="a device, expected a regular file"):
        read_object(path)
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (tmp_path / "else").mkdir()
    (folder / "link").symlink_to(tmp_path / "else")
    for name in ["../x", "/etc/passwd", "part/../../x", "..", "", "link/x", "//x", "a\0b", 3, None]:
        with pytest.raises(CheckpointError, match="not a file inside it"):
            inside(folder, name)
    assert inside(folder, "part/x") == folder / "part" / "x"
    assert inside(pathlib.Path("."), "x") == pathlib.Path("x")
    (folder / "x").symlink_to("../else/blob")
    assert inside(folder, "x") == folder / "x"


def states():
    """On two ranks: what is no state, on the last of them."""
    parameter = torch.nn.Parameter(torch.ones(3, device="cpu"))
    optimizer = AdamOptimizer([parameter])
    manager = models.managed(optimizer, loss_scale=8)

    def step():
        parameter.grad = torch.ones(3)
        manager.step()
        values = parameter.tolist()
        assert values == pytest.approx([values[0]] * 3)
        return values

    step()
    good = copy.deepcopy(manager.state_dict())
    own, scale = good["optimizers"][0], {"value": 8.0, "good_steps": 0}
    wrong: list[Any] = [3, None, [], {}, {**good, "optimizers": None}, {**good, "optimizers": [3]}]
    change: dict[str, Any]
    for change in (
        {"state": [1]},
        {"state": {0: 3}},
        {"param_groups": "x"},
        {"param_groups": [{"lr": 1}]},
    ):
        wrong.append({**good, "optimizers": [{**own, **change}]})
    for change in (
        {"lr_schedulers": ["x"]},
        {"num_steps": "x"},
        {"num_steps": -1},
        {"loss_scale_state": {}},
        {"loss_scale_state": scale | {"value": "x"}},
        {"loss_scale_state": scale | {"value": float("nan")}},
    ):
        wrong.append({**good, **change})
    said = []
    last = bmt.rank() == bmt.world_size() - 1
    for state in wrong:
        with pytest.raises(CheckpointError, match=r"expected what state_dict\(\) re") as raised:
            manager.load_state_dict(state if last else good)
        said.append(str(raised.value))
    for state in (None, [], own["state"]):
        with pytest.raises(CheckpointError, match="load_state_dict got no optimizer state"):
            optimizer.load_state_dict(state if last else own)
    before = parameter.detach().clone()
    wanted = step()  # with the state that was there
    with torch.no_grad():
        parameter.copy_(before)
    manager.load_state_dict(good)
    assert manager.state_dict()["num_steps"] == 1
    assert step() == wanted
    return said


def test_states_are_checked_on_all_ranks():
    """One rank's state is none: all raise, and nothing has changed."""
    first, second = run_ranks(states, 2)
    assert [text.removesuffix(" (on rank 1)") for text in first] == second
