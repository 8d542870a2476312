"""The manifest of a checkpoint of shards: which bytes of which file hold which elements."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bmtrain.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1
BLOCK = 2**26  # bytes of a file under one checksum
NUM_THREADS = 4  # that compute checksums: each does 3 to 4 GB/s, a disk fewer
_LARGEST = 2**31  # bytes of a manifest: more is no manifest
MODEL, OPTIMIZER = "model", "optimizer"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """Size in bytes of a file, and the CRC-32 of each BLOCK of it."""

    size: int
    checksums: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.checksums) != num_blocks(self.size):
            raise ValueError(f"{len(self.checksums)} checksums for {self.size} bytes")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened tensor, from byte `offset` of file `file` on.

    Attributes:
        part: of a tensor-parallel tensor, which part of it the elements are counted in.
    """

    file: str
    offset: int
    start: int
    stop: int
    part: int = 0


@dataclasses.dataclass(frozen=True)
class TensorFacts:
    """A tensor and where it lies.

    Attributes:
        shape, dtype: of the whole.
        dim, count: the parts that a tensor-parallel tensor is cut into, and along which dim; dim is
            -1 of a tensor of which no rank had a slice.
        pieces: which cover every part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    count: int
    pieces: tuple[Piece, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        if self.count == 1:
            return self.shape
        return tuple(
            length // self.count if place == self.dim else length
            for place, length in enumerate(self.shape)
        )

    def check(self, files: Mapping[str, FileFacts]) -> None:
        """Raise ValueError unless the pieces cover the tensor and lie within their files."""
        if self.count > 1 and (
            not 0 <= self.dim < len(self.shape) or self.shape[self.dim] % self.count
        ):
            raise ValueError(f"{self.count} parts along dim {self.dim} of {self.shape}")
        numel, size = math.prod(self.part_shape), self.dtype.itemsize
        for part in range(self.count):
            reached = 0
            for piece in sorted(
                (piece for piece in self.pieces if piece.part == part), key=lambda one: one.start
            ):
                end = piece.offset + (piece.stop - piece.start) * size
                if piece.start != reached or end > files[piece.file].size or piece.offset < 0:
                    raise ValueError(f"{piece} does not go on at element {reached}")
                reached = piece.stop
            if reached != numel:
                raise ValueError(f"{reached} elements of {numel}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: of the run.
        world: sizes of the run that wrote it: "world_size", "tp_size", "pipe_size".
        facts: the program's own, values as in JSON.
        files: all files but the manifest, by name.
        tensors: by section (MODEL, OPTIMIZER) and name.
        ties: by section, other names of tensors.
    """

    step: int
    world: dict[str, int]
    facts: dict[str, Any]
    files: dict[str, FileFacts]
    tensors: dict[str, dict[str, TensorFacts]]
    ties: dict[str, dict[str, str]]

    def to_json(self) -> str:
        """As text; `parse` reads it."""
        numbers = {name: number for number, name in enumerate(self.files)}
        tensors = {
            section: {name: _packed(one, numbers) for name, one in found.items()}
            for section, found in self.tensors.items()
        }
        content = {
            "format": FORMAT,
            "step": self.step,
            **self.world,
            "facts": self.facts,
            "files": {name: [one.size, *one.checksums] for name, one in self.files.items()},
            "ties": self.ties,
            "tensors": tensors,
        }
        text = json.dumps(content, allow_nan=False)
        return f'{{"crc32": {zlib.crc32(text.encode())}, "manifest": {text}}}\n'


def num_blocks(size: int) -> int:
    """How many checksums a file of `size` bytes has."""
    return -(-size // BLOCK)


def _packed(one: TensorFacts, numbers: Mapping[str, int]) -> list[Any]:
    pieces = [[numbers[p.file], p.offset, p.start, p.stop, p.part] for p in one.pieces]
    return [list(one.shape), str(one.dtype).removeprefix("torch."), one.dim, one.count, pieces]


def parse(text: str, *, is_part: bool = False) -> Manifest:
    """The manifest that a text holds, or one rank's part of it.

    Raises:
        ValueError, KeyError, TypeError: if it holds none, or one that contradicts itself.
    """
    found = json.loads(text)
    content = found["manifest"]
    if zlib.crc32(json.dumps(content).encode()) != found["crc32"]:
        raise ValueError("its checksum is another")
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, expected {FORMAT}")
    files = {
        _file_name(name): FileFacts(one[0], tuple(one[1:]))
        for name, one in _items(content, "files")
    }
    names = list(files)
    tensors = {
        section: {name: _unpacked(one, names) for name, one in found.items()}
        for section, found in _items(content, "tensors")
    }
    for one in (one for found in tensors.values() for one in found.values() if not is_part):
        one.check(files)
    ties = {section: dict(found) for section, found in _items(content, "ties")}
    if any(kept not in tensors[section] for section in ties for kept in ties[section].values()):
        raise ValueError("a second name of a tensor that it does not hold")
    world = {name: int(content[name]) for name in ("world_size", "tp_size", "pipe_size")}
    return Manifest(int(content["step"]), world, dict(content["facts"]), files, tensors, ties)


def _items(content: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    found: dict[str, Any] = dict(content[name])
    return found.items()


def _unpacked(one: Sequence[Any], names: Sequence[str]) -> TensorFacts:
    shape, dtype, dim, count, pieces = one
    found = tuple(
        Piece(names[int(file)], int(offset), int(start), int(stop), int(part))
        for file, offset, start, stop, part in pieces
    )
    return TensorFacts(tuple(map(int, shape)), DTYPES[dtype], int(dim), int(count), found)


def _file_name(name: str) -> str:
    """A name that stays in the folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or name == NAME:
        raise ValueError(f"{name!r} is no name of a file in the folder")
    return name


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of a checkpoint, whose files are there with the sizes that it says.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path = folder / NAME
    try:
        size = _size(path)
        if size > _LARGEST:
            raise CheckpointError(f"cannot load {path}: it has {size} bytes.")
        manifest = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot load {path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot load {path}: it is damaged or no manifest ({type(error).__name__}: {error})."
        ) from error
    for name, facts in manifest.files.items():
        _check_size(folder / name, facts)
    return manifest


def _check_size(path: pathlib.Path, facts: FileFacts) -> None:
    try:
        size = _size(path)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path.parent} is damaged: {path.name}: {error.strerror or error}."
        ) from error
    if size != facts.size:
        raise CheckpointError(
            f"the checkpoint {path.parent} is damaged: {path.name} has {size} bytes, the manifest "
            f"says {facts.size}."
        )


def _size(path: pathlib.Path) -> int:
    """The size of a file; OSError for what is none: opening a FIFO would wait for ever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no regular file")
    return found.st_size


def verify(folder: pathlib.Path, manifest: Manifest, share: int = 0, num_shares: int = 1) -> None:
    """Compare the checksums of every `num_shares`-th block, from number `share` on.

    Raises:
        CheckpointError: naming the file and the place.
    """
    blocks = [
        (folder / name, number, facts)
        for name, facts in manifest.files.items()
        for number in range(num_blocks(facts.size))
    ]
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(_verify_block, *zip(*blocks[share::num_shares], strict=True)))


def _verify_block(path: pathlib.Path, number: int, facts: FileFacts) -> None:
    length = min(BLOCK, facts.size - number * BLOCK)
    try:
        with path.open("rb", buffering=0) as file:
            memory = bytearray(length)
            read_into(file.fileno(), memoryview(memory), number * BLOCK)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path.parent} is damaged: {path.name} cannot be read "
            f"({error.strerror or error})."
        ) from error
    if zlib.crc32(memory) != facts.checksums[number]:
        raise CheckpointError(
            f"the checkpoint {path.parent} is damaged: bytes {number * BLOCK} to "
            f"{number * BLOCK + length} of {path.name} are not those that were written."
        )


def read_into(descriptor: int, memory: memoryview, offset: int) -> None:
    """Fill `memory` with the bytes of a file from `offset` on; OSError where it ends before."""
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}")
        memory, offset = memory[count:], offset + count
