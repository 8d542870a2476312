"""Names of checkpoints: matching, cutting and turning on the way in, the inverse on the way out; no
files, no processes.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from bmtrain.checkpoint import reading
from bmtrain.checkpoint.reading import Read, cuts, read_all
from bmtrain.checkpoint.source import Header, Source
from model_center.errors import WeightsError
from model_center.weights.export import Exporter, targets_of
from model_center.weights.keymap import KeyMap, Piece
from model_center.weights.matching import Mapped, check_coverage, match
from model_center.weights.safetensors_writer import SafetensorsWriter, parse_size, shards

MAP = KeyMap(
    {
        "table.weight": Piece("model.embed.weight"),
        "q.weight": Piece("model.qkv.weight", transpose=True, rows=(0, 4)),
        "k.weight": Piece("model.qkv.weight", transpose=True, rows=(4, 8)),
        "q.bias": Piece("model.qkv.bias", rows=(0, 4)),
        "k.bias": Piece("model.qkv.bias", rows=(4, 8)),
        "norm1.weight": Piece("model.LayerNorm.weight"),
        "norm2.weight": Piece("model.LayerNorm.weight"),
    },
    prefix="model.",
    ignored=(r"inv_freq$",),
    tied={"head.weight": "model.embed.weight"},
    new=(r"classes\.",),
)


class Memory(Source):
    """Tensors in memory, which keeps count of the elements that are looked at."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        headers = {name: Header(tuple(value.shape), value.dtype) for name, value in tensors.items()}
        super().__init__(pathlib.Path("memory"), headers, {})
        self.tensors = tensors
        self.count = 0

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.count += stop - start
        return self.tensors[name].reshape(-1)[start:stop]

    def mapped(self, name: str) -> Any:
        return Looked(self, self.tensors[name])


class Looked:
    """A tensor that tells its source how much of it is taken."""

    def __init__(self, source: Memory, tensor: torch.Tensor) -> None:
        self.source, self.tensor = source, tensor

    def __getitem__(self, place: Any) -> torch.Tensor:
        found = self.tensor[place]
        self.source.count += found.numel()
        return found


def theirs() -> dict[str, torch.Tensor]:
    return {
        "model.embed.weight": torch.randn(11, 3),
        "model.qkv.weight": torch.randn(3, 8),
        "model.qkv.bias": torch.randn(8),
        "model.LayerNorm.weight": torch.randn(5),
    }


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    table, qkv, bias, norm = tensors.values()
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
    "spell",
    [
        lambda name: name,
        lambda name: name.removeprefix("model."),
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma"),
        lambda name: name.replace("model.embed.weight", "head.weight"),
    ],
    ids=["as written", "without prefix", "old norms", "the tie only"],
)
def test_every_spelling_is_read(spell: Any) -> None:
    tensors = theirs()
    source = Memory({spell(name): value for name, value in tensors.items()})
    found = match(MAP, MAP.pieces, source.headers)
    assert not found.unexpected and not found.copies
    mapped = Mapped(source, found.pieces)
    for name, value in expected(tensors).items():
        assert mapped.headers[name] == Header(tuple(value.shape), value.dtype)
        assert torch.equal(mapped.whole(name), value)


def test_any_part_is_that_of_the_whole() -> None:
    """Elements from anywhere to anywhere, rows cut or not, in scratch memory or not."""
    tensors = theirs()
    mapped = Mapped(Memory(tensors), match(MAP, MAP.pieces, tensors).pieces)
    for name, value in expected(tensors).items():
        for start in range(value.numel() + 1):
            for stop in range(start, value.numel() + 1):
                want = value.reshape(-1)[start:stop]
                assert torch.equal(mapped.part(name, start, stop), want), (name, start, stop)
                scratch = torch.zeros(value.numel() * 8, dtype=torch.uint8)
                assert torch.equal(mapped.read(name, start, stop, scratch).reshape(-1), want), (
                    name,
                    start,
                    stop,
                )


def test_unexpected_ignored_copies_and_missing_names() -> None:
    tensors = {
        **theirs(),
        "model.rotary.inv_freq": torch.ones(1),
        "head.weight": torch.ones(1),
        "what": torch.ones(1),
    }
    found = match(MAP, [*MAP.pieces, "classes.weight"], tensors)
    assert found.unexpected == ["what"]
    assert found.copies == [("head.weight", "model.embed.weight")]
    assert (
        "classes.weight" not in found.pieces
        and MAP.may_be_new("classes.weight")
        and not MAP.may_be_new("q.classes.weight")
    )
    assert match(MAP, ["own"], ["own"]).pieces == {"own": Piece("own")}


def test_files_of_another_size_are_refused() -> None:
    """Rows left over would be lost in silence."""
    for shape, complaint in (
        ((3, 9), "9 rows or columns"),
        ((3, 7), "too small"),
        ((8,), "expected a matrix"),
    ):
        source = Memory({**theirs(), "model.qkv.weight": torch.zeros(shape)})
        pieces = match(MAP, MAP.pieces, source.headers).pieces
        with pytest.raises(WeightsError, match=complaint):
            Mapped(source, pieces)
            check_coverage(source, pieces)


def test_a_bad_pattern_is_named() -> None:
    with pytest.raises(WeightsError, match=r"\(\["):
        KeyMap({}, ignored=("([",))


def test_a_rank_looks_only_at_its_own_elements() -> None:
    """Turned matrices and rows of tensors too: whole columns of theirs are rows of ours."""
    source = Memory({"w": torch.arange(40 * 60.0).view(40, 60)})
    mapped = Mapped(source, {"ours": Piece("w", transpose=True, rows=(20, 60))})
    out = torch.zeros(400)
    read_all([Read(out, "ours", 800, 1200)], mapped)
    assert torch.equal(out, source.tensors["w"][:, 40:50].t().reshape(-1))
    assert source.count == 400
    out = torch.zeros(370)
    read_all([Read(out, "ours", 815, 1185)], mapped)  # two rows are cut
    assert torch.equal(out, source.tensors["w"][:, 40:50].t().reshape(-1)[15:385])
    assert source.count == 400 + 400


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ((0, 10, 1, 4), [0, 4, 8, 10]),
        ((3, 25, 10, 10), [3, 10, 20, 25]),
        ((3, 25, 10, 5), [3, 10, 20, 25]),
        ((0, 60, 10, 25), [0, 20, 40, 60]),
        ((12, 17, 10, 5), [12, 17]),
        ((5, 5, 10, 5), [5]),
        ((0, 10, 10, 100), [0, 10]),
    ],
)
def test_reads_are_cut_at_rows(arguments: tuple[int, int, int, int], want: list[int]) -> None:
    assert cuts(*arguments) == want


@pytest.mark.parametrize("chunk", [1, 24, 50, 10**6])
def test_reads_in_many_pieces_are_those_in_one(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Slices as ranks have them, which begin and end anywhere, read by several threads."""
    monkeypatch.setattr(reading, "CHUNK", chunk)
    tensors = theirs()
    mapped = Mapped(Memory(tensors), match(MAP, MAP.pieces, tensors).pieces)
    for num_ranks in (1, 2, 3, 5):
        for rank in range(num_ranks):
            sizes = {name: value.numel() for name, value in expected(tensors).items()}
            spans = {
                name: (size * rank // num_ranks, size * (rank + 1) // num_ranks)
                for name, size in sizes.items()
            }
            reads = [
                Read(torch.full((stop - start,), float("nan")), name, start, stop)
                for name, (start, stop) in spans.items()
            ]
            read_all(reads, mapped)
            for read in reads:
                assert torch.equal(
                    read.target, expected(tensors)[read.name].reshape(-1)[read.start : read.stop]
                ), (read.name, rank)


def test_an_error_of_one_read_ends_all() -> None:
    class Broken(Memory):
        def part(self, name: str, start: int, stop: int) -> torch.Tensor:
            if name == "b":
                raise OSError("the disk is gone")
            return super().part(name, start, stop)

    source = Broken({name: torch.ones(3) for name in "abc"})
    with pytest.raises(OSError, match="the disk is gone"):
        read_all([Read(torch.zeros(3), name, 0, 3) for name in "abc"], source)


def test_reads_convert_to_the_dtype_of_their_target() -> None:
    source = Memory({"a": torch.tensor([1.5, 2.0**-9, 70000.0]), "i": torch.tensor([1, 2, 3])})
    half, whole = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3)
    read_all([Read(half, "a", 0, 3), Read(whole, "i", 0, 3)], source)
    assert torch.equal(half, source.tensors["a"].bfloat16()) and torch.equal(
        whole, torch.tensor([1.0, 2.0, 3.0])
    )


def export(tensors: dict[str, torch.Tensor], folder: pathlib.Path, size: int = 10**9) -> None:
    headers = {name: Header(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    targets = targets_of(MAP, headers)
    exporter = Exporter(
        MAP,
        targets,
        SafetensorsWriter(folder, {name: target.header for name, target in targets.items()}, size),
    )
    for name, value in tensors.items():
        exporter.put([name], value)


def test_writing_is_the_inverse_of_reading(tmp_path: pathlib.Path) -> None:
    """Read by the format's own library."""
    from safetensors import safe_open

    tensors = theirs()
    ours = {
        **expected(tensors),
        "own": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 2),
    }
    export(ours, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    want = {**tensors, "own": ours["own"], "flags": ours["flags"], "none": ours["none"]}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"norm2.weight": torch.zeros(5)}, "'norm2.weight' and 'norm1.weight' are one tensor"),
        ({"k.bias": torch.zeros(3)}, "'k.bias', a part of 'model.qkv.bias'"),
        ({"k.weight": torch.zeros(4, 3).half()}, "float16"),
        ({"k.weight": None}, "needs 'k.weight'"),
        ({"table.weight": torch.zeros(2, dtype=torch.complex64)}, "safetensors files do not hold"),
    ],
)
def test_what_their_format_cannot_hold_is_an_error(
    tmp_path: pathlib.Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    tensors = {
        name: value for name, value in {**expected(theirs()), **change}.items() if value is not None
    }
    with pytest.raises(WeightsError, match=complaint):
        export(tensors, tmp_path)


def test_files_are_cut_by_size() -> None:
    headers = {
        name: Header((size,), torch.int8)
        for name, size in (("a", 4), ("b", 6), ("c", 1), ("d", 50), ("e", 10))
    }
    assert shards(headers, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert shards(headers, 100) == [["a", "b", "c", "d", "e"]]


@pytest.mark.parametrize(
    ("size", "want"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), (7, 7), ("300kb", 300_000)]
)
def test_sizes_are_understood(size: int | str, want: int) -> None:
    assert parse_size(size) == want


@pytest.mark.parametrize("size", ["", "5 bytes", "-1", 0, "GB"])
def test_other_sizes_are_refused(size: int | str) -> None:
    with pytest.raises(WeightsError, match="max_shard_size"):
        parse_size(size)
