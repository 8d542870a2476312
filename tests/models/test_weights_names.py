"""Names of checkpoints: matching, cutting and turning on the way in, the inverse on the way out; no
files, no processes.
"""

import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bmtrain.checkpoint.reading import Read, read_all
from bmtrain.checkpoint.source import Header, Source
from model_center.errors import WeightsError
from model_center.weights.export import Exporter, targets_of
from model_center.weights.keymap import KeyMap, TensorPart
from model_center.weights.matching import MappedSource, check_coverage, match
from model_center.weights.safetensors_writer import SafetensorsWriter, parse_size, shards

MAP = KeyMap(
    {
        "table.weight": TensorPart("model.embed.weight"),
        "q.weight": TensorPart("model.qkv.weight", transpose=True, rows=(0, 4)),
        "k.weight": TensorPart("model.qkv.weight", transpose=True, rows=(4, 8)),
        "q.bias": TensorPart("model.qkv.bias", rows=(0, 4)),
        "k.bias": TensorPart("model.qkv.bias", rows=(4, 8)),
        "norm1.weight": TensorPart("model.LayerNorm.weight"),
        "norm2.weight": TensorPart("model.LayerNorm.weight"),
    },
    prefix="model.",
    ignored=(r"inv_freq$",),
    tied={"head.weight": "model.embed.weight"},
    new=(r"classes\.",),
)


def headers_of(tensors):
    return {name: Header(tuple(value.shape), value.dtype) for name, value in tensors.items()}


class Memory(Source):
    """Tensors in memory, which keeps count of the elements that are looked at."""

    count = 0

    def __init__(self, tensors):
        super().__init__(Path("memory"), headers_of(tensors), {})
        self.tensors, self.lock = tensors, threading.Lock()

    def part(self, name, start, stop):
        if name == "broken":
            raise OSError("the disk is gone")
        with self.lock:
            self.count += stop - start
        return self.tensors[name].reshape(-1)[start:stop]

    def mapped(self, name):
        return Looked(self, self.tensors[name])


class Looked:
    """A tensor that tells its source how much of it is taken."""

    def __init__(self, source, tensor):
        self.source, self.tensor = source, tensor

    def __getitem__(self, place):
        with self.source.lock:  # several threads read
            self.source.count += self.tensor[place].numel()
        return self.tensor[place]


def theirs():
    shapes = {"embed": (11, 3), "qkv": (3, 8), "LayerNorm": (5,)}
    tensors = {f"model.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    return tensors | {"model.qkv.bias": torch.randn(8)}


def expected(tensors):
    table, qkv, norm, bias = tensors.values()
    return {
        "table.weight": table,
        "q.weight": torch.stack([qkv[:, column] for column in range(4)]),
        "k.weight": torch.stack([qkv[:, column] for column in range(4, 8)]),
        "q.bias": bias[:4],
        "k.bias": bias[4:],
        "norm1.weight": norm,
        "norm2.weight": norm,
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("model.", ""),
        ("LayerNorm.weight", "LayerNorm.gamma"),
        ("model.embed.weight", "head.weight"),  # the tie only
    ],
)
def test_every_spelling_is_read(before, after):
    """Any part of a tensor, rows cut or not, in scratch memory or not."""
    tensors = theirs()
    source = Memory({name.replace(before, after): value for name, value in tensors.items()})
    found = match(MAP, MAP.pieces, source.headers)
    assert not found.unexpected and not found.copies
    mapped = MappedSource(source, found.pieces)
    assert mapped.headers == headers_of(expected(tensors))
    for name, value in expected(tensors).items():
        assert torch.equal(mapped.whole(name), value)
        for start in range(value.numel() + 1):
            for stop in range(start, value.numel() + 1):
                want = value.reshape(-1)[start:stop]
                scratch = torch.zeros(value.numel() * 8, dtype=torch.uint8)
                assert torch.equal(mapped.part(name, start, stop), want)
                assert torch.equal(mapped.read(name, start, stop, scratch).reshape(-1), want)


def test_other_names():
    """Unexpected, ignored, copies, missing."""
    extra = dict.fromkeys(("model.rotary.inv_freq", "head.weight", "what"), torch.ones(1))
    found = match(MAP, [*MAP.pieces, "classes.weight"], theirs() | extra)
    assert found.unexpected == ["what"]
    assert found.copies == [("head.weight", "model.embed.weight")]
    assert found.pieces.keys() == MAP.pieces.keys()
    assert MAP.may_be_new("classes.weight") and not MAP.may_be_new("q.classes.weight")
    assert match(MAP, ["own"], ["own"]).pieces == {"own": TensorPart("own")}
    with pytest.raises(WeightsError, match=r"\(\["):
        KeyMap({}, ignored=("([",))


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [((3, 9), "9 rows or columns"), ((3, 7), "too small"), ((8,), "expected a matrix")],
)
def test_files_of_another_size_are_refused(shape, complaint):
    """Rows left over would be lost in silence."""
    source = Memory({**theirs(), "model.qkv.weight": torch.zeros(shape)})
    pieces = match(MAP, MAP.pieces, source.headers).pieces
    with pytest.raises(WeightsError, match=complaint):
        MappedSource(source, pieces)
        check_coverage(source, pieces)


def test_a_rank_looks_only_at_its_own_elements():
    """Turned matrices and rows of tensors too: whole columns of theirs are rows of ours."""
    source = Memory({"w": torch.arange(40 * 60.0).view(40, 60)})
    mapped = MappedSource(source, {"ours": TensorPart("w", transpose=True, rows=(20, 60))})
    whole = source.tensors["w"][:, 20:].t().reshape(-1)
    for start, stop in ((800, 1200), (815, 1185)):  # the second cuts two rows
        out, source.count = torch.zeros(stop - start), 0
        read_all([Read(out, "ours", start, stop)], mapped)
        assert torch.equal(out, whole[start:stop]) and source.count == 400


def test_reads_in_many_pieces_are_those_in_one():
    """Slices of ranks, which begin and end anywhere, in pieces of at most a chunk or a row, read by
    several threads; in the dtype of their targets. An error of one ends all.
    """
    tensors = theirs()
    source, wanted = Memory(tensors), expected(tensors)
    mapped = MappedSource(source, match(MAP, MAP.pieces, tensors).pieces)
    sizes = []

    def counted(name, start, stop, scratch):
        shape = mapped.headers[name].shape
        sizes.append((4 * (stop - start), 4 * shape[-1] if len(shape) > 1 else 4))
        return MappedSource.read(mapped, name, start, stop, scratch)

    mapped.read = counted  # type: ignore[method-assign]
    for chunk, dtype in ((1, torch.float), (24, torch.bfloat16), (50, torch.float)):
        for rank in range(3):
            reads = []
            for name, value in wanted.items():
                start, stop = (value.numel() * place // 3 for place in (rank, rank + 1))
                target = torch.full((stop - start,), float("nan"), dtype=dtype)
                reads.append(Read(target, name, start, stop))
            read_all(reads, mapped, chunk)
            for read in reads:
                whole = wanted[read.name].reshape(-1).to(dtype)
                assert torch.equal(read.target, whole[read.start : read.stop]), (read.name, rank)
            assert all(size <= max(chunk, row) for size, row in sizes)
            sizes.clear()
    broken = Memory({name: torch.ones(3) for name in ("a", "broken", "c")})
    with pytest.raises(OSError, match="the disk is gone"):
        read_all([Read(torch.zeros(3), name, 0, 3) for name in broken.tensors], broken)


def export(tensors, folder):
    targets = targets_of(MAP, headers_of(tensors))
    headers = {name: target.header for name, target in targets.items()}
    exporter = Exporter(MAP, targets, SafetensorsWriter(folder, headers, 10**9))
    for name, value in tensors.items():
        exporter.put([name], value)


def test_writing_is_the_inverse_of_reading(tmp_path):
    """Read by the format's own library."""
    tensors, own = theirs(), {"own": torch.tensor(3), "none": torch.zeros(0, 2)}
    own["flags"] = torch.tensor([True, False, True])
    export(expected(tensors) | own, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert got.keys() == tensors.keys() | own.keys()
    for name, value in (tensors | own).items():
        assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name
    assert int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") % 8 == 0
    gap = KeyMap({"a": TensorPart("x", rows=(0, 1)), "b": TensorPart("x", rows=(2, 3))})
    with pytest.raises(WeightsError, match=r"the model has none of its rows \[1, 2\)"):
        targets_of(gap, headers_of(dict.fromkeys("ab", torch.zeros(1))))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("norm2.weight", torch.zeros(5), "'norm2.weight' and 'norm1.weight' are one tensor"),
        ("k.bias", torch.zeros(3), "'k.bias', a part of 'model.qkv.bias'"),
        ("k.weight", torch.zeros(4, 3).half(), "float16"),
        ("k.weight", None, "needs 'k.weight'"),
        ("table.weight", torch.zeros(2, dtype=torch.complex64), "safetensors files do not hold"),
    ],
)
def test_what_their_format_cannot_hold_is_an_error(tmp_path, name, change, complaint):
    tensors = expected(theirs())
    tensors.pop(name) if change is None else tensors.update({name: change})
    with pytest.raises(WeightsError, match=complaint):
        export(tensors, tmp_path)


def test_files_are_cut_by_size():
    sizes = {"a": 4, "b": 6, "c": 1, "d": 50, "e": 10}
    headers = {name: Header((size,), torch.int8) for name, size in sizes.items()}
    assert shards(headers, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert shards(headers, 100) == [[*sizes]]
    given = ("5GB", "1.5 MiB", 7, "300kb")
    assert [parse_size(size) for size in given] == [5 * 10**9, 3 * 2**19, 7, 300_000]
    for size in ("", "5 bytes", "-1", 0, "GB"):
        with pytest.raises(WeightsError, match="max_shard_size"):
            parse_size(size)
