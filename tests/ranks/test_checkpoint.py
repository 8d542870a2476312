"""save and load against torch's own files: world sizes, formats, bad files, full disks, background
writing.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import resource
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.checkpoint import LoadResult, Writing, load, save, writer
from bmtrain.checkpoint import sources as sources_module
from bmtrain.errors import CheckpointError
from bmtrain.shard.storage import Storage

State = dict[str, torch.Tensor]


class Layer(torch.nn.Module):
    """Two dtypes, awkward sizes, a persistent and a non-persistent buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = torch.nn.Linear(width, 2 * width + 1)
        self.back = torch.nn.Linear(2 * width + 1, width, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.back(self.project(x).bfloat16()).float())


class Net(torch.nn.Module):
    """Embedding tied to the head, blocks, a parameter smaller than the world, a scalar and a root
    buffer.
    """

    table: torch.Tensor

    def __init__(self, width: int = 7, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, width)
        self.layers = torch.nn.ModuleList([Layer(width) for _ in range(2)])
        self.head = torch.nn.Linear(width, 11, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.tiny = torch.nn.Parameter(torch.ones(1, 2), requires_grad=False)
        self.register_buffer("table", torch.zeros(5, 3).t())
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.gain


def plain(seed: int, tied: bool = True) -> Net:
    """An ordinary model with random values everywhere, non-contiguous and integer buffers
    included.
    """
    generator = torch.Generator().manual_seed(seed)
    net = Net(tied=tied)
    with torch.no_grad():
        for value in [*net.parameters(), net.table]:
            value.copy_(torch.randn(value.shape, generator=generator))
        for layer in net.layers:
            layer.get_buffer("steps").fill_(seed)
    return net


def sharded(seed: int, tied: bool = True) -> torch.nn.Module:
    return bmt.BMTrainModelWrapper(plain(seed, tied))


def same(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(
        torch.equal(state[name], other[name]) and state[name].dtype == other[name].dtype
        for name in state
    )


def state_of(net: torch.nn.Module) -> State:
    return {name: value.clone() for name, value in net.state_dict().items()}


def do_save(file: str, seed: int, tied: bool = True) -> None:
    assert save(sharded(seed, tied), file).done


def do_load(file: str, strict: bool = True, tied: bool = True) -> tuple[State, LoadResult]:
    net = sharded(99, tied)
    result = load(net, file, strict)
    return state_of(net), result


def untouched(file: str, strict: bool = True) -> str:
    """The error of a load that must fail on this rank and leave the model as it was."""
    net = sharded(99)
    before = state_of(net)
    with pytest.raises(CheckpointError) as caught:
        load(net, file, strict)
    assert same(before, state_of(net))
    return str(caught.value)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 2), (2, 1)])
def test_saved_by_some_ranks_loaded_by_others(
    tmp_path: pathlib.Path, writers: int, readers: int, ending: str
) -> None:
    file = str(tmp_path / f"model{ending}")
    run_ranks(do_save, writers, file, 5)
    expected = plain(5).state_dict()
    assert os.listdir(tmp_path) == [f"model{ending}"]
    for state, result in run_ranks(do_load, readers, file):
        assert same(state, expected)
        assert result == LoadResult([], [])


def test_the_file_is_that_of_torch(tmp_path: pathlib.Path) -> None:
    run_ranks(do_save, 2, str(tmp_path / "model.pt"), 5)
    torch.save(plain(5).state_dict(), tmp_path / "plain.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert same(state, plain(5).state_dict())
    assert list(state) == list(plain(5).state_dict())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert (tmp_path / "model.pt").stat().st_size < 1.1 * (tmp_path / "plain.pt").stat().st_size
    Net().load_state_dict(state)


def test_the_safetensors_file_is_that_of_its_library(tmp_path: pathlib.Path) -> None:
    run_ranks(do_save, 2, str(tmp_path / "model.safetensors"), 5)
    net = Net()
    safetensors.torch.load_model(net, str(tmp_path / "model.safetensors"))
    assert same(net.state_dict(), plain(5).state_dict())


def test_files_of_torch_load(tmp_path: pathlib.Path) -> None:
    """Also those of one tied name, old archives, and what BMTrain wrote: flat dicts of full
    tensors.
    """
    expected = plain(5).state_dict()
    torch.save(expected, tmp_path / "plain.pt")
    torch.save(expected, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(
        {name: value for name, value in expected.items() if name != "embed.weight"},
        tmp_path / "head.pt",
    )
    torch.save(
        {name: value for name, value in expected.items() if name != "head.weight"},
        tmp_path / "embed.pt",
    )
    for file in ("plain.pt", "old.pt", "head.pt", "embed.pt"):
        for state, _ in run_ranks(do_load, 2, str(tmp_path / file)):
            assert same(state, expected), file


def test_a_tied_file_loads_into_an_untied_model(tmp_path: pathlib.Path) -> None:
    for ending in (".pt", ".safetensors"):
        file = str(tmp_path / f"model{ending}")
        run_ranks(do_save, 1, file, 5)
        for state, _ in run_ranks(do_load, 2, file, True, False):
            assert torch.equal(state["head.weight"], plain(5).embed.weight)
            assert torch.equal(state["embed.weight"], plain(5).embed.weight)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_folders_with_an_index(tmp_path: pathlib.Path, ending: str) -> None:
    state = {
        name: value.contiguous()
        for name, value in plain(5).state_dict().items()
        if name != "head.weight"
    }
    names, stem = list(state), "model" if ending == "safetensors" else "pytorch_model"
    places: dict[str, str] = {}
    for number, part in enumerate((names[:3], names[3:])):
        file = f"{stem}-0000{number}.{ending}"
        (safetensors.torch.save_file if ending == "safetensors" else torch.save)(
            {name: state[name] for name in part}, tmp_path / file
        )
        places |= dict.fromkeys(part, file)
    (tmp_path / f"{stem}.{ending}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    for loaded, _ in run_ranks(do_load, 2, str(tmp_path)):
        assert same(loaded, plain(5).state_dict())
    (tmp_path / f"{stem}-00001.{ending}").unlink()
    for message in run_ranks(untouched, 2, str(tmp_path)):
        assert f"{stem}-00001.{ending}" in message and "No such file" in message


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_folders_with_one_file(tmp_path: pathlib.Path, name: str) -> None:
    if name.endswith(".bin"):
        torch.save(plain(5).state_dict(), tmp_path / name)
    else:
        safetensors.torch.save_model(plain(5), str(tmp_path / name))
    for state, _ in run_ranks(do_load, 2, str(tmp_path)):
        assert same(state, plain(5).state_dict())


def bad_files(folder: pathlib.Path) -> dict[str, str]:
    """Files that are no checkpoint: name and what the error says of each."""
    good = folder / "good.pt"
    torch.save(plain(5).state_dict(), good)
    data = good.read_bytes()
    (folder / "half.pt").write_bytes(data[: len(data) // 2])
    (folder / "garbage.pt").write_bytes(bytes(range(256)) * 20)
    (folder / "text.pt").write_text("this is no checkpoint")
    (folder / "empty.pt").write_bytes(b"")
    (folder / "pickle.pt").write_bytes(pickle.dumps({"a": os.getcwd}))
    torch.save({"a": os.getcwd}, folder / "code.pt")
    torch.save({"a": os.getcwd}, folder / "old_code.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": torch.nn.Linear(1, 1)}, folder / "module.pt")
    torch.save([torch.ones(1)], folder / "list.pt")
    torch.save({"model": plain(5).state_dict(), "step": 3}, folder / "nested.pt")
    safetensors.torch.save_model(plain(5), str(folder / "good.safetensors"))
    data = (folder / "good.safetensors").read_bytes()
    (folder / "half.safetensors").write_bytes(data[: len(data) // 2])
    (folder / "tiny.safetensors").write_bytes(data[:6])
    (folder / "text.safetensors").write_text("this is no checkpoint")
    (folder / "a_folder").mkdir()
    (folder / "bad_index").mkdir()
    (folder / "bad_index" / "model.safetensors.index.json").write_text("{")
    (folder / "lying_index").mkdir()
    safetensors.torch.save_file({"a": torch.ones(1)}, folder / "lying_index" / "x.safetensors")
    (folder / "lying_index" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"b": "x.safetensors"}}'
    )
    return {
        "half.pt": "truncated",
        "garbage.pt": "no checkpoint",
        "text.pt": "no checkpoint",
        "empty.pt": "no checkpoint",
        "pickle.pt": "could run code",
        "code.pt": "other than tensors",
        "old_code.pt": "other than tensors",
        "module.pt": "other than tensors",
        "list.pt": "holds a list",
        "nested.pt": "holds no tensors but model, step",
        "half.safetensors": "truncated",
        "tiny.safetensors": "truncated",
        "text.safetensors": "no safetensors",
        "a_folder": "holds nothing",
        "bad_index": "no JSON",
        "lying_index": "does not hold it",
        "absent.pt": "no such file",
    }


def load_all(folder: str, files: list[str]) -> list[str]:
    return [untouched(f"{folder}/{file}") for file in files]


def test_bad_files_are_explained_on_every_rank(tmp_path: pathlib.Path) -> None:
    expected = bad_files(tmp_path)
    for messages in run_ranks(load_all, 2, str(tmp_path), list(expected)):
        for (file, reason), message in zip(expected.items(), messages, strict=True):
            assert file in message and reason in message, message
    assert "good.pt" in messages[-1]  # what a mistyped name may have meant


def test_names_and_shapes_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    state = plain(5).state_dict()
    state["layers.0.projekt.weight"] = state.pop("layers.0.project.weight")
    torch.save(state, tmp_path / "names.pt")
    for message in run_ranks(untouched, 2, str(tmp_path / "names.pt")):
        assert (
            "missing from the file: 'layers.0.project.weight' (nearest: 'layers.0.projekt.weight')"
        ) in message
        assert (
            "unexpected in the file: 'layers.0.projekt.weight' (nearest: 'layers.0.project.weight')"
        ) in message
        assert "names.pt" in message
    for loaded, result in run_ranks(do_load, 2, str(tmp_path / "names.pt"), False):
        assert result == LoadResult(["layers.0.project.weight"], ["layers.0.projekt.weight"])
        assert torch.equal(
            loaded["layers.0.project.weight"], plain(99).state_dict()["layers.0.project.weight"]
        )
        assert torch.equal(loaded["embed.weight"], state["embed.weight"])
    state["layers.0.project.weight"] = state.pop("layers.0.projekt.weight")
    state["tiny"], state["gain"] = torch.ones(2, 1), torch.ones(1)
    safetensors.torch.save_file(
        {k: v.contiguous() for k, v in state.items() if k != "head.weight"},
        tmp_path / "shapes.safetensors",
    )
    for strict in (True, False):
        for message in run_ranks(untouched, 2, str(tmp_path / "shapes.safetensors"), strict):
            for part in ("'tiny'", "(1, 2)", "(2, 1)", "'gain'", "shapes.safetensors"):
                assert part in message


def load_wide(file: str) -> tuple[State, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, _ = do_load(file)
    return state, [str(warning.message) for warning in caught]


def test_dtypes_are_converted_and_lost_precision_is_told_once(tmp_path: pathlib.Path) -> None:
    expected = plain(5).state_dict()
    torch.save(
        {k: v.double() if v.is_floating_point() else v for k, v in expected.items()},
        tmp_path / "wide.pt",
    )
    torch.save(
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in expected.items()},
        tmp_path / "narrow.pt",
    )
    for rank, (state, told) in enumerate(run_ranks(load_wide, 2, str(tmp_path / "wide.pt"))):
        assert same(state, expected)
        assert len(told) == (rank == 0)
    assert "float64 to torch.float32" in run_ranks(load_wide, 1, str(tmp_path / "wide.pt"))[0][1][0]
    ((state, told),) = run_ranks(load_wide, 1, str(tmp_path / "narrow.pt"))
    assert not told and state["embed.weight"].dtype == torch.float32
    assert torch.equal(state["embed.weight"], expected["embed.weight"].bfloat16().float())


def bytes_read() -> int:
    """What this process has read by system calls so far."""
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


def count_bytes(file: str) -> int:
    """Bytes of the file that this rank reads."""
    model = bmt.Block(torch.nn.Linear(4096, 4096, bias=False))
    load(model, file)
    before = bytes_read()
    load(model, file)
    read = bytes_read() - before
    assert torch.equal(model.state_dict()["weight"], torch.arange(4096.0 * 4096).view(4096, 4096))
    return read


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/io").exists(), reason="bytes are counted as Linux shows them"
)
def test_every_rank_reads_only_its_own_rows(tmp_path: pathlib.Path) -> None:
    size = 4 * 4096 * 4096
    safetensors.torch.save_file(
        {"weight": torch.arange(4096.0 * 4096).view(4096, 4096)}, tmp_path / "big.safetensors"
    )
    for read in run_ranks(count_bytes, 4, str(tmp_path / "big.safetensors")):
        # the header, and what the processes tell each other
        assert size / 4 <= read < size / 4 + 20_000


def shorten(file: str) -> str:
    """What a load says of a file that is cut while it is read."""
    model = sharded(5)
    original = sources_module.SafetensorsFile._fill

    def fill(self: Any, memory: memoryview, offset: int) -> None:
        if bmt.rank() == 1:
            os.truncate(file, 2000)
        original(self, memory, offset)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(sources_module.SafetensorsFile, "_fill", fill)
        load(model, file)
    return str(caught.value)


def load_different_ones(folder: pathlib.Path) -> None:
    """Each rank would fill its slices from a file of its own."""
    rank = bmt.rank()
    names = [folder / name for name in ("a.pt", "b.pt", "c.pt")]
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(16, 16))
    bmt.save(model, names[0])
    bmt.save(model, names[1])
    with torch.no_grad():
        model.weight.add_(1)
    bmt.save(model, names[2])
    before = model.state_dict()
    with pytest.raises(CheckpointError, match=r"something else on each rank.*nothing was loaded"):
        bmt.load(model, names[2 * rank])
    with pytest.raises(CheckpointError, match=r"1 tensors of .*; rank 1: 2 tensors of "):
        bmt.load(model, names[0], strict=False, only=None if rank else ["weight"])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    bmt.load(model, names[rank])  # each machine may have a copy of its own
    torch.testing.assert_close(dict(model.state_dict()), dict(torch.load(names[0])), rtol=0, atol=0)


def test_ranks_that_load_different_files_are_refused(tmp_path: pathlib.Path) -> None:
    run_ranks(load_different_ones, 2, tmp_path)


def test_a_file_cut_while_it_is_read_is_an_error_on_all_ranks(tmp_path: pathlib.Path) -> None:
    save_file = str(tmp_path / "model.safetensors")
    run_ranks(do_save, 1, save_file, 5)
    for message in run_ranks(shorten, 2, save_file):
        assert "it became shorter while it was read" in message


def count_gathers(file: str) -> tuple[int, int]:
    net = sharded(5)
    storages = {
        param.storage_of
        for param in net.parameters()
        if isinstance(param, bmt.DistributedParameter)
    }
    gathered: list[Storage] = []
    original = Storage.gather

    def gather(self: Storage) -> torch.Tensor:
        gathered.append(self)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "gather", gather)
        save(net, file)
    return len(storages), len(gathered)


def test_every_storage_is_gathered_once(tmp_path: pathlib.Path) -> None:
    """Though the two dtypes of a layer alternate in the state dict."""
    for num_storages, num_gathers in run_ranks(count_gathers, 2, str(tmp_path / "model.pt")):
        assert num_storages == num_gathers > 4


def save_limited(file: str, limit: int) -> list[str]:
    """Rank 0's disk is full after `limit` bytes: what each save says."""
    net = sharded(6)
    if bmt.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    messages = []
    try:
        for background in (False, True):
            with pytest.raises(CheckpointError) as caught:
                save(net, file, non_blocking=background).wait()
            messages.append(str(caught.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(net, file)
    return messages


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize(("world_size", "limit"), [(1, 1000), (2, 0), (2, 1000), (2, 3000)])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: pathlib.Path, ending: str, world_size: int, limit: int
) -> None:
    file = tmp_path / f"model{ending}"
    run_ranks(do_save, 1, str(file), 5)
    before = file.read_bytes()
    seen: list[list[str]] = run_ranks(save_and_compare, world_size, str(file), limit, before)
    for messages in seen:
        for message in messages:
            assert (
                str(file) in message
                and "intact" in message
                and ("File too large" in message or "os error 27" in message)
            )
    assert same(run_ranks(do_load, 1, str(file))[0][0], plain(6).state_dict())
    assert os.listdir(tmp_path) == [file.name]


def save_and_compare(file: str, limit: int, before: bytes) -> list[str]:
    original = writer._explain

    def explain(path: pathlib.Path, error: BaseException) -> str:
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]
        return original(path, error)

    writer._explain = explain
    return save_limited(file, limit)


def save_somewhere(file: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(sharded(5), file)
    return str(caught.value)


def test_places_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    for message in run_ranks(save_somewhere, 2, str(tmp_path / "absent" / "model.pt")):
        assert "absent does not exist" in message and "model.pt" in message
    for message in run_ranks(save_somewhere, 2, str(tmp_path)):
        assert "it is a folder" in message


def train_while_saving(folder: str) -> tuple[State, State]:
    """The state when save was called, and later; the writer waits until the model has changed."""
    net = sharded(5)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
    changed = threading.Event()
    original = writer.write_file

    def slowly(*args: Any) -> None:
        changed.wait(20)
        original(*args)

    writer.write_file = slowly  # type: ignore[assignment]
    at_call = state_of(net)
    handle = save(net, f"{folder}/a.pt", non_blocking=True)
    assert handle.done == (bmt.rank() != 0)
    for _ in range(2):
        net(torch.arange(11).view(1, 11)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net.get_buffer("table").fill_(7)
    later = state_of(net)
    changed.set()
    save(net, f"{folder}/b.pt", non_blocking=True)  # waits for the one before
    assert handle.done
    load(net, f"{folder}/a.pt")
    assert same(state_of(net), at_call)
    save(net, f"{folder}/c.pt", non_blocking=True)  # nobody waits for it but the interpreter
    return at_call, later


def test_writing_in_the_background_while_training_goes_on(tmp_path: pathlib.Path) -> None:
    for at_call, later in run_ranks(train_while_saving, 2, str(tmp_path)):
        assert not torch.equal(at_call["embed.weight"], later["embed.weight"])
        assert same(torch.load(tmp_path / "a.pt"), at_call)
        assert same(torch.load(tmp_path / "b.pt"), later)
    assert same(torch.load(tmp_path / "c.pt"), at_call)


def fail_in_background(folder: str) -> list[str]:
    net = sharded(5)
    original = writer.write_file

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    messages = []
    surfaces: list[Callable[[Writing], object]] = [
        lambda handle: save(net, f"{folder}/b.pt"),
        lambda handle: load(net, f"{folder}/b.pt"),
        lambda handle: handle.wait(),
    ]
    for surface in surfaces:
        writer.write_file = fail  # type: ignore[assignment]
        handle = save(net, f"{folder}/a.pt", non_blocking=True)
        while not handle.done:
            pass
        writer.write_file = original
        with pytest.raises(CheckpointError) as caught:
            surface(handle)
        messages.append(str(caught.value))
    save(net, f"{folder}/b.pt")
    return messages


def test_a_failure_in_the_background_surfaces(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for messages in run_ranks(fail_in_background, 2, str(tmp_path)):
        assert all("a.pt" in text and "No space left" in text for text in messages)
    assert os.listdir(tmp_path) == ["b.pt"]
    assert capsys.readouterr().out.count("No space left") == 3  # told at once, on rank 0


def die_while_writing(file: str) -> None:
    def half(temporary: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> None:
        temporary.write_bytes(b"half of it")
        os._exit(9)

    writer._write_torch = half
    save(sharded(6), file)


def test_a_process_killed_in_the_middle_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.pt"
    run_ranks(do_save, 1, str(file), 5)
    with pytest.raises(RuntimeError):
        run_ranks(die_while_writing, 2, str(file))
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.pt.tmp"]
    assert same(torch.load(file), plain(5).state_dict())
    run_ranks(do_save, 2, str(file), 6)
    assert os.listdir(tmp_path) == ["model.pt"]
    assert same(torch.load(file), plain(6).state_dict())


def load_elsewhere(folder: str) -> str:
    """Rank 1 looks in another folder, as on a machine that does not share the disk."""
    os.chdir(folder if bmt.rank() == 0 else "/")
    return untouched("only_here.pt")


def test_a_file_that_one_rank_cannot_see_is_an_error_on_all(tmp_path: pathlib.Path) -> None:
    torch.save(plain(5).state_dict(), tmp_path / "only_here.pt")
    first, second = run_ranks(load_elsewhere, 2, str(tmp_path))
    assert "no such file" in first and first.endswith("(on rank 1)") and "no such file" in second


def with_a_link(folder: str) -> None:
    save(sharded(5), f"{folder}/latest.pt")


def test_a_link_stays_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "latest.pt").symlink_to(tmp_path / "deep" / "model.pt")
    run_ranks(with_a_link, 1, str(tmp_path))
    assert (tmp_path / "latest.pt").is_symlink()
    assert same(torch.load(tmp_path / "deep" / "model.pt"), plain(5).state_dict())


def meta_model(file: str) -> tuple[State, Callable[[], object] | None]:
    with torch.device("meta"):
        net = Net()
    with pytest.warns(UserWarning, match=r"no file has these buffers.*: layers\.0\.scratch"):
        model = bmt.BMTrainModelWrapper(net)
    assert model.table.isnan().all()  # seen at once, should nothing fill it
    load(model, file)
    bmt.init_parameters(model)  # nothing is left to initialise, and nothing is overwritten
    return state_of(model), None


def test_a_model_made_on_meta_comes_up_from_a_file(tmp_path: pathlib.Path) -> None:
    torch.save(plain(5).state_dict(), tmp_path / "model.pt")
    for state, _ in run_ranks(meta_model, 2, str(tmp_path / "model.pt")):
        assert same(state, plain(5).state_dict())
