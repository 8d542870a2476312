"""save and load against torch's own files: formats, files that do not fit, full disks."""

import contextlib
import gc
import itertools
import json
import os
import pathlib
import resource
import shutil
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.flushes import recorded_flushes
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks

import bmtrain as bmt
from bmtrain.checkpoint import LoadResult, files, load, save, sources, writer
from bmtrain.checkpoint.shards import MODEL, SIZES, Manifest, ShardedCheckpoint, TensorFacts
from bmtrain.errors import CheckpointError
from bmtrain.shard.storage import Storage


class Layer(torch.nn.Module):
    """Two dtypes, awkward sizes, a persistent and a non-persistent buffer."""

    def __init__(self, width):
        super().__init__()
        self.project = torch.nn.Linear(width, 2 * width + 1)
        self.back = torch.nn.Linear(2 * width + 1, width, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Net(torch.nn.Module):
    """Embedding tied to the head, blocks, a parameter smaller than the world, a scalar and a root
    buffer that is not contiguous.
    """

    table: torch.Tensor

    def __init__(self, tied=True):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 7)
        self.layers = torch.nn.ModuleList([Layer(7) for _ in range(2)])
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.tiny = torch.nn.Parameter(torch.ones(1, 2), requires_grad=False)
        self.register_buffer("table", torch.zeros(5, 3).t())
        if tied:
            self.head.weight = self.embed.weight


def plain(seed, tied=True):
    """An ordinary model with random values everywhere."""
    generator = torch.Generator().manual_seed(seed)
    net = Net(tied)
    with torch.no_grad():
        for value in [*net.parameters(), net.table]:
            value.copy_(torch.randn(value.shape, generator=generator))
        for layer in net.layers:
            layer.get_buffer("steps").fill_(seed)
    return net


def sharded(seed, tied=True):
    return bmt.BMTrainModelWrapper(plain(seed, tied))


def want(seed=5):
    """The values of a seed."""
    return dict(plain(seed).state_dict())


def assert_state(state, wanted, what):
    models.assert_same_dicts(state, wanted, what, 0.0)


def cast(dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in want().items()}


def write_files(folder):
    """Files and folders of torch and of transformers: one tied name, both, other dtypes."""
    state = want()
    untied = {k: v.contiguous() for k, v in state.items() if k != "head.weight"}
    torch.save(state, folder / "plain.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({k: v for k, v in state.items() if k != "embed.weight"}, folder / "head.pt")
    torch.save(untied, folder / "embed.pt")
    torch.save(cast(torch.float64), folder / "wide.pt")
    torch.save(cast(torch.bfloat16), folder / "narrow.pt")
    names = list(untied)
    writers: list[tuple[str, Callable[..., Any]]] = [
        ("model{}.safetensors", safetensors.torch.save_file),
        ("pytorch_model{}.bin", torch.save),
    ]
    for number, (name, write) in enumerate(writers):
        one, several = (folder / f"{kind}-{number}" for kind in ("one", "several"))
        one.mkdir()
        several.mkdir()
        write(untied, one / name.format(""))
        places = {}
        for part in (names[:3], names[3:]):
            places |= dict.fromkeys(part, name.format(f"-{len(places)}"))
            write({key: untied[key] for key in part}, several / places[part[0]])
        index = several / (name.format("") + ".index.json")
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def save_all(folder):
    net = sharded(5)
    gathered = []
    storages = {p.storage_of for p in net.parameters() if isinstance(p, bmt.DistributedParameter)}
    original = Storage.gather

    def gather(self, shard):
        gathered.append(self)
        return original(self, shard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "gather", gather)
        for name in ("model.pt", "model.safetensors", "link.pt"):
            gathered.clear()
            assert save(net, f"{folder}/{name}").done
            assert len(gathered) == len(storages) > 4, "each storage is gathered once"
    save(net, f"{folder}/some.pt", only=["gain", "embed.weight"])


FILES = "model.pt model.safetensors link.pt plain.pt old.pt head.pt embed.pt wide.pt narrow.pt"
FOLDERS = "one-0 one-1 several-0 several-1"


def load_all(folder):
    for file in (FILES + " " + FOLDERS).split():
        net = sharded(99)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert load(net, f"{folder}/{file}") == LoadResult([], [])
        told = [str(warning.message) for warning in caught]
        assert len(told) == (file == "wide.pt" and bmt.rank() == 0), (file, told)
        assert all("float64 to torch.float32" in text for text in told)
        wanted = want()
        if file == "narrow.pt":
            wanted = {k: v.to(wanted[k].dtype) for k, v in cast(torch.bfloat16).items()}
        assert_state(net.state_dict(), wanted, file)
    for file in ("model.pt", "model.safetensors"):
        net = sharded(99, tied=False)
        load(net, f"{folder}/{file}")
        assert_state(net.state_dict(), want(), f"{file}, untied")
    net = sharded(99)
    load(net, f"{folder}/some.pt", only=["gain", "embed.weight"])
    some = {k: want()[k] for k in ("embed.weight", "head.weight", "gain")}
    assert_state(net.state_dict(), want(99) | some, "some names")


def test_files_of_ranks_and_of_torch(tmp_path):
    """Three ranks write what torch, safetensors and two ranks read; what these write is read, too:
    old archives, one tied name, other dtypes, folders with and without an index. A link stays one.
    """
    write_files(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "link.pt").symlink_to(tmp_path / "deep" / "model.pt")
    before = set(os.listdir(tmp_path))
    run_ranks(save_all, 3, str(tmp_path))
    assert {*os.listdir(tmp_path)} - before == {"model.pt", "model.safetensors", "some.pt"}
    assert (tmp_path / "link.pt").is_symlink()
    modes = {(tmp_path / f"model.{kind}").stat().st_mode for kind in ("pt", "safetensors")}
    assert len(modes) == 1  # who may read the one may read the other
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_state(state, want(), "torch.load")
    assert list(state) == list(want())
    assert {*torch.load(tmp_path / "some.pt")} == {"embed.weight", "head.weight", "gain"}
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    sizes = [(tmp_path / name).stat().st_size for name in ("model.pt", "plain.pt")]
    assert sizes[0] < 1.1 * sizes[1]
    Net().load_state_dict(state)
    net = Net()
    safetensors.torch.load_model(net, str(tmp_path / "model.safetensors"))
    assert_state(net.state_dict(), want(), "safetensors")
    run_ranks(load_all, 2, str(tmp_path))


def refuse_all(folder):
    net, here = sharded(99), pathlib.Path(folder)
    before = models.cloned_state(net)

    def refused(file, *parts, **options):
        with pytest.raises(CheckpointError) as caught:
            load(net, here / file if file != "only_here.pt" else file, **options)
        assert all(part in str(caught.value) for part in (file, *parts)), caught.value
        assert_state(net.state_dict(), before, f"after {file}")

    refused(
        "names.pt",
        "missing from the file: 'layers.0.project.weight' (nearest: 'layers.0.projekt.weight')",
        "unexpected in the file: 'layers.0.projekt.weight' (nearest: 'layers.0.project.weight')",
    )
    for strict in (True, False):
        refused("shapes.pt", "'tiny'", "(1, 2)", "(2, 1)", "'gain'", strict=strict)
    refused("complex.pt", "'tiny' is torch.float32 in the model and torch.complex64")
    refused("several-1", "pytorch_model-0.bin", "No such file")
    with pytest.raises(CheckpointError, match="no tensor of the model has the name 'x'"):
        load(net, here / "plain.pt", only=["x"])
    refused("some.pt", "missing from the file: 'tiny'", only=["gain", "tiny"])
    os.chdir(folder if bmt.rank() == 0 else "/")  # as on a machine that does not share the disk
    refused("only_here.pt", "no such file")
    result = load(net, here / "names.pt", strict=False)
    assert result == LoadResult(["layers.0.project.weight"], ["layers.0.projekt.weight"])
    wanted = want() | {name: before[name] for name in result.missing_keys}
    assert_state(net.state_dict(), wanted, "what fits")
    original = files.read_into

    def fill(memory, path, offset):
        if bmt.rank() == 1:
            os.truncate(here / "cut.safetensors", 2000)
        original(memory, path, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "read_into", fill)
        with pytest.raises(CheckpointError, match="it became shorter while it was read"):
            load(net, here / "cut.safetensors")
    load(net, here / "plain.pt")
    assert_state(net.state_dict(), want(), "after all that was refused")


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    """Names, shapes, kinds, parts that are missing, on one rank too: then a good file is read."""
    write_files(tmp_path)
    (tmp_path / "several-1" / "pytorch_model-0.bin").unlink()
    (tmp_path / "plain.pt").rename(tmp_path / "only_here.pt")
    torch.save(want(), tmp_path / "plain.pt")
    torch.save({"gain": torch.ones(())}, tmp_path / "some.pt")
    safetensors.torch.save_model(plain(5), str(tmp_path / "cut.safetensors"))
    names = {k.replace("0.project.w", "0.projekt.w"): value for k, value in want().items()}
    torch.save(names, tmp_path / "names.pt")
    shapes = want() | {"tiny": torch.ones(2, 1), "gain": torch.ones(1)}
    torch.save(shapes, tmp_path / "shapes.pt")
    torch.save(want() | {"tiny": torch.ones(1, 2) * 1j}, tmp_path / "complex.pt")
    run_ranks(refuse_all, 2, str(tmp_path))


def read_own(file):
    def bytes_read():
        return int(pathlib.Path("/proc/self/io").read_text().split()[1])

    model = bmt.Block(torch.nn.Linear(1024, 1024, bias=False))
    load(model, file)
    before = bytes_read()
    load(model, file)
    read, size = bytes_read() - before, 4 * 1024**2 / bmt.world_size()
    # the header, and what the processes tell each other
    assert size - 1024 * 4 <= read < size + 20_000
    assert torch.equal(model.state_dict()["weight"], torch.arange(1024.0**2).view(1024, 1024))


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/io").exists(), reason="bytes are counted as Linux shows them"
)
def test_every_rank_reads_only_its_own_rows(tmp_path):
    file = tmp_path / "big.safetensors"
    safetensors.torch.save_file({"weight": torch.arange(1024.0**2).view(1024, 1024)}, file)
    run_ranks(read_own, 3, str(file))


@on_ranks(2)
def test_ranks_that_load_different_files_are_refused(tmp_path):
    """Each rank would fill its slices from a file of its own."""
    rank = bmt.rank()
    names = [tmp_path / name for name in ("a.pt", "b.pt", "c.pt")]
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(16, 16))
    bmt.save(model, names[0])
    bmt.save(model, names[1])
    with torch.no_grad():
        model.weight.add_(1)
    bmt.save(model, names[2])
    before = models.cloned_state(model)
    with pytest.raises(
        CheckpointError, match=r"different arguments on the ranks.*nothing was loaded"
    ):
        bmt.load(model, names[2 * rank])
    with pytest.raises(CheckpointError, match=r"1 tensors of .*; rank 1: 2 tensors of "):
        bmt.load(model, names[0], strict=False, only=None if rank else ["weight"])
    assert_state(model.state_dict(), before, "different files")
    bmt.load(model, names[rank])  # each machine may have a copy of its own
    assert_state(model.state_dict(), dict(torch.load(names[0])), "copies of a file")


@on_ranks(2)
def test_a_full_disk_leaves_the_old_file(tmp_path):
    """And the next save succeeds."""
    net, here = sharded(6), tmp_path
    for place, reason in (("absent/model.pt", "absent does not exist"), (".", "it is a folder")):
        with pytest.raises(CheckpointError, match=reason):
            save(net, here / place)
    with pytest.raises(CheckpointError, match="no tensor of the model has the name 'x'"):
        save(net, here / "model.pt", only=["x"])
    for name in ("model.pt", "model.safetensors"):
        file = here / name
        save(sharded(5), file)
        before = file.read_bytes()
        for limit, background in ((0, False), (1000, False), (3000, True)):
            ends = resource.getrlimit(resource.RLIMIT_FSIZE)
            if bmt.rank() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, ends[1]))
            try:
                with pytest.raises(CheckpointError) as caught:
                    save(net, file, non_blocking=background).wait()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, ends)
            text = str(caught.value)
            assert name in text and "intact" in text
            assert "File too large" in text or "os error 27" in text
            assert file.read_bytes() == before and not list(here.glob("*.tmp"))
        save(net, file)
        bmt.synchronize()
        load(net, file)
        assert_state(net.state_dict(), want(6), name)


@on_ranks(1)
def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path):
    """And then its name: a power failure leaves the old one or the new one."""
    with recorded_flushes() as flushes:
        for name in ("a.pt", "a.safetensors"):
            save(sharded(5), f"{tmp_path}/{name}")
            assert flushes.renamed.pop() == (name, True) and flushes.has(tmp_path)


def test_a_failed_save_keeps_no_copy_of_the_model():
    """Errors that pass through torch's writer would stay there, and with them all tensors."""
    x = torch.ones(2**16)
    gone = weakref.ref(x)
    with pytest.raises(OSError, match="No space left"):
        writer._write_torch(pathlib.Path("/dev/full"), {"x": x})
    del x
    gc.collect()
    assert gone() is None


def die_while_writing(file):
    def half(temporary, tensors):
        temporary.write_bytes(b"half of it")
        os._exit(9)

    writer._write_torch = half
    save(sharded(6), file)


def save_and_load(file):
    net = sharded(6)
    save(net, file)
    load(net, file)


@pytest.mark.fresh
def test_a_process_killed_in_the_middle_leaves_the_old_file(tmp_path):
    file = tmp_path / "model.pt"
    torch.save(want(), file)
    with pytest.raises(RuntimeError):
        run_ranks(die_while_writing, 2, str(file))
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.pt.tmp"]
    assert_state(torch.load(file), want(), "the old file")
    run_ranks(save_and_load, 2, str(file))
    assert os.listdir(tmp_path) == ["model.pt"]
    assert_state(torch.load(file), want(6), "the new file")


def meta_model(file):
    with torch.device("meta"):
        net = Net()
    with pytest.warns(UserWarning, match=r"no file has these buffers.*: layers\.0\.scratch"):
        model = bmt.BMTrainModelWrapper(net)
    assert model.table.isnan().all()  # seen at once, should nothing fill it
    load(model, file)
    bmt.init_parameters(model)  # nothing is left to initialise, and nothing is overwritten
    assert_state(model.state_dict(), want(), "from meta")


def test_a_model_made_on_meta_comes_up_from_a_file(tmp_path):
    torch.save(want(), tmp_path / "model.pt")
    run_ranks(meta_model, 2, str(tmp_path / "model.pt"))


THEIRS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
OWN = ("pytorch_model.pt", "manifest.json")
NAMED, OTHER = "chosen.safetensors", "a.safetensors.index.json"


def put(folder, name, value):
    """One candidate for the weights of a folder."""
    if name == "manifest.json":
        model = torch.nn.Module()
        model.gain = torch.nn.Parameter(torch.full((2,), value))
        with bmt.CheckpointManager(folder / "run") as checkpoints:
            checkpoints.save(1, model).wait()
        for file in (folder / "run" / "step-00000001").iterdir():
            file.rename(folder / file.name)
        shutil.rmtree(folder / "run")
        return
    file = name.removesuffix(".index.json").replace("model.", "model-0.")
    file = file if name.endswith(".json") else name
    tensors = {"gain": torch.full((2,), value)}
    save = safetensors.torch.save_file if ".safetensors" in name else torch.save
    save(tensors, folder / file)
    if name.endswith(".json"):
        (folder / name).write_text(json.dumps({"weight_map": {"gain": file}}))
    if name == NAMED:
        (folder / "config.json").write_text(json.dumps({"transformers_weights": name}))


def first_or_refused(root):
    """All pairs of candidates, and each alone."""
    every = (NAMED, *THEIRS, *OWN, OTHER)
    for number, names in enumerate([*zip(every), *itertools.combinations(every, 2)]):
        folder = root / str(number)
        folder.mkdir()
        for name in names:
            put(folder, name, float(every.index(name)))
        theirs = [name for name in names if name in (NAMED, *THEIRS)]
        if len(names) == 1 or len(theirs) == 2 or (theirs and OTHER in names):
            warned = f"{names[0]} is read, as transformers does, and not {names[-1]}"
            said = pytest.warns(UserWarning, match=warned)
            with said if len(theirs) == 2 else contextlib.nullcontext():
                source = sources.open_source(folder)
            assert source.part("gain", 0, 1).item() == every.index(names[0])
        else:
            with pytest.raises(CheckpointError, match="may hold other weights") as refused:
                sources.open_source(folder)
            assert all(name in str(refused.value) for name in names)
            for name in names:  # the remedy of the message
                found = sources.open_source(folder / name).part("gain", 0, 1).item()
                assert found == every.index(name)


def test_which_file_counts(tmp_path):
    """Of several in a folder the one that transformers takes, which is said; where it has no
    order, none.
    """
    run_ranks(first_or_refused, 1, tmp_path)
    (tmp_path / "x").mkdir()
    put(tmp_path / "x", "model.safetensors", 1.0)
    (tmp_path / "x" / "manifest.json").write_text('{"name": "of another program"}')
    assert sources.open_source(tmp_path / "x").part("gain", 0, 1).item() == 1
    (tmp_path / "x" / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors, adapter_config\.json may hold"):
        sources.open_source(tmp_path / "x")


def test_a_tensor_without_elements_may_have_parts(tmp_path):
    facts = TensorFacts((0, 4), torch.float32, 0, 10**12, ())
    manifest = Manifest(1, dict.fromkeys(SIZES, 1), {}, {}, {MODEL: {"none": facts}}, {MODEL: {}})
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    assert ShardedCheckpoint(tmp_path).all()["none"].shape == (0, 4)


def test_a_tensor_in_two_shards(tmp_path):
    """It is one if both say the same; of two, neither is taken."""
    put(tmp_path, "model.safetensors.index.json", 1.0)
    second = {"gain": torch.full((2,), 1.0), "bias": torch.zeros(2)}
    for value in (1.0, 2.0):
        second["gain"][1] = value
        safetensors.torch.save_file(second, tmp_path / "second.safetensors")
        places = {"gain": "model-0.safetensors", "bias": "second.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        if value == 1:
            assert sources.open_source(tmp_path).part("gain", 1, 2).item() == 1
    words = r"'gain' differs in model-0\.safetensors and second\.safetensors"
    with pytest.raises(CheckpointError, match=words):
        sources.open_source(tmp_path)
