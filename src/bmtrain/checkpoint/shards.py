"""Checkpoints of shards: the manifest says which bytes of which file hold which elements; reading.

Elements come from the files of the ranks that had them, whatever ranks ask for them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from bmtrain.checkpoint.files import (
    check_file,
    read_into,
    read_text,
    read_torch,
    reading,
    unreadable,
)
from bmtrain.checkpoint.source import Header, Source
from bmtrain.errors import CheckpointError, DamagedError

NAME, BEGINNING = "manifest.json", '{"crc32": '
FORMAT = 1
BLOCK = 2**26  # bytes of a file under one checksum
NUM_THREADS = 4  # that compute checksums: each does 3 to 4 GB/s, a disk fewer
_LARGEST = 2**31  # bytes of a manifest: more is no manifest
SIZES = ("world_size", "tp_size", "pipe_size")  # of the run that wrote a checkpoint
MODEL, OPTIMIZER = "model", "optimizer"
_NAMES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu
float8_e4m3fnuz float8_e5m2fnuz complex128 complex64 complex32 int64 int32 int16 int8 uint64 uint32
uint16 uint8 bool"""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


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
        shape = [*self.shape]
        if self.count > 1:
            shape[self.dim] //= self.count
        return tuple(shape)

    def check(self, files: Mapping[str, FileFacts]) -> None:
        """Raise ValueError unless the pieces cover the tensor and lie within their files."""
        is_split = 0 <= self.dim < len(self.shape) and self.shape[self.dim] % self.count == 0
        if self.count < 1 or min(self.shape, default=0) < 0 or (self.count > 1 and not is_split):
            raise ValueError(f"{self.count} parts along dim {self.dim} of {self.shape}")
        numel, size = math.prod(self.part_shape), self.dtype.itemsize
        part = reached = 0
        for piece in sorted(self.pieces, key=lambda one: (one.part, one.start)):
            if reached == numel and piece.part == part + 1:
                part, reached = piece.part, 0
            end = piece.offset + (piece.stop - piece.start) * size
            is_next = piece.part == part and piece.start == reached <= piece.stop
            if not is_next or end > files[piece.file].size or piece.offset < 0:
                raise ValueError(f"{piece} does not go on at element {reached} of part {part}")
            reached = piece.stop
        if numel and (reached != numel or part + 1 != self.count):
            raise ValueError(f"{reached} elements of {numel}, {part + 1} parts of {self.count}")


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
            section: {
                name: [
                    list(one.shape),
                    str(one.dtype).removeprefix("torch."),
                    one.dim,
                    one.count,
                    [[numbers[p.file], p.offset, p.start, p.stop, p.part] for p in one.pieces],
                ]
                for name, one in found.items()
            }
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
        return f'{BEGINNING}{zlib.crc32(text.encode())}, "manifest": {text}}}\n'


def num_blocks(size: int) -> int:
    """How many checksums a file of `size` bytes has."""
    return -(-size // BLOCK)


def parse(text: str, *, is_part: bool = False) -> Manifest:
    """The manifest that a text holds, or one rank's part of it.

    Raises:
        ValueError, KeyError, TypeError, ...: if it holds none, or one that contradicts itself.
        CheckpointError: for one of another format.
    """
    found = json.loads(text)
    content = found["manifest"]
    if zlib.crc32(json.dumps(content).encode()) != found["crc32"]:
        raise ValueError("its checksum does not match")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"its format is {content['format']!r}, and this version of bmtrain reads {FORMAT}: "
            "update bmtrain, or give another folder"
        )
    files: dict[str, FileFacts] = {}
    for name, (size, *checksums) in dict(content["files"]).items():
        if name in ("", ".", "..", NAME) or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file in the folder")
        files[name] = FileFacts(size, tuple(checksums))
    names = list(files)
    tensors: dict[str, dict[str, TensorFacts]] = {}
    for section, entries in dict(content["tensors"]).items():
        tensors[section] = {}
        for name, (shape, dtype, dim, count, pieces) in entries.items():
            places = tuple(
                Piece(names[int(file)], int(offset), int(start), int(stop), int(part))
                for file, offset, start, stop, part in pieces
            )
            facts = TensorFacts(tuple(map(int, shape)), DTYPES[dtype], int(dim), int(count), places)
            if not is_part:
                facts.check(files)
            tensors[section][name] = facts
    ties = {section: dict(known) for section, known in dict(content["ties"]).items()}
    if any(kept not in tensors[section] for section in ties for kept in ties[section].values()):
        raise ValueError("a second name of a tensor that it does not hold")
    world, step = {name: int(content[name]) for name in SIZES}, int(content["step"])
    if step not in range(2**63):
        raise ValueError(f"{step} is not a number of steps")
    return Manifest(step, world, dict(content["facts"]), files, tensors, ties)


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of a checkpoint, whose files are there with the sizes that it says.

    Raises:
        DamagedError: naming the file and what is wrong with it.
        CheckpointError: for a file that cannot be read, or a manifest of another format.
    """
    path = folder / NAME
    text = read_text(path, _LARGEST)
    try:
        manifest = parse(text)
    except CheckpointError as error:
        raise CheckpointError(unreadable(path, str(error))) from error
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = f"it is damaged or not a manifest ({type(error).__name__}: {error})"
        raise DamagedError(unreadable(path, reason)) from error
    for name, facts in manifest.files.items():
        size = check_file(folder / name)
        if size != facts.size:
            raise DamagedError(
                f"the checkpoint {folder} is damaged: {name} has {size} bytes, the manifest says "
                f"{facts.size}."
            )
    return manifest


def verify(folder: pathlib.Path, share: int = 0, num_shares: int = 1) -> Manifest:
    """The manifest of a checkpoint, after every `num_shares`-th block, from number `share` on, has
    been compared with its checksum.

    Raises:
        DamagedError: naming the file and the place.
        CheckpointError: for a file that cannot be read.
    """
    manifest = read_manifest(folder)
    blocks = [
        (folder / name, number, facts)
        for name, facts in manifest.files.items()
        for number in range(len(facts.checksums))
    ]
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(lambda block: check_block(*block), blocks[share::num_shares]))
    return manifest


def check_block(path: pathlib.Path, number: int, facts: FileFacts) -> None:
    """Compare a block of a file with its checksum, twice if it is another.

    Raises:
        DamagedError: naming the file and the place.
        CheckpointError: if it cannot be read.
    """
    offset = number * BLOCK
    length = min(BLOCK, facts.size - offset)
    with reading(path):
        memory = bytearray(length)
        for _ in range(2):
            read_into(memoryview(memory), path, offset)
            if zlib.crc32(memory) == facts.checksums[number]:
                return
            if sys.platform == "linux":  # the second time from the disk
                with path.open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
    raise DamagedError(
        f"the checkpoint {path.parent} is damaged: bytes {offset} to {offset + length} of "
        f"{path.name} are not those that were written."
    )


def read_rest(path: pathlib.Path, manifest: Manifest) -> dict[str, Any]:
    """What one rank has kept beside tensors.

    Raises:
        CheckpointError: for a file that cannot be read, is damaged, or is another's.
    """
    facts = manifest.files[path.name]
    for number in range(len(facts.checksums)):
        check_block(path, number, facts)
    found: dict[str, Any] = read_torch(path, mmap=False)
    if not isinstance(found, dict) or not {"random", "state", "optim_manager"} <= set(found):
        raise CheckpointError(f"cannot load {path}: it holds no state of a rank.")
    return found


class ShardedCheckpoint(Source):
    """The tensors of one section of a checkpoint, whole or in part.

    What is read is compared with its checksums first.

    Attributes:
        manifest: of the checkpoint.
    """

    def __init__(self, folder: pathlib.Path, section: str = MODEL) -> None:
        self.manifest = read_manifest(folder)
        self._own = self.manifest.tensors.get(section, {})
        self._ties = self.manifest.ties.get(section, {})
        self._tensors = {**self._own, **{name: self._own[k] for name, k in self._ties.items()}}
        headers = {name: Header(one.shape, one.dtype) for name, one in self._tensors.items()}
        self._checked: set[tuple[str, int]] = set()
        beside = min((name for name in self.manifest.files if name.endswith(".pt")), default=None)
        others: dict[str, Any] = {}
        if section == MODEL and beside is not None:
            rest = read_rest(folder / beside, self.manifest)
            self.has_extra = "own" in rest  # not in those of earlier versions
            others = rest["own"]["extra"] if self.has_extra else {}
        super().__init__(folder, headers, others)

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        facts = self._tensors[name]
        values = scratch[: (stop - start) * facts.dtype.itemsize].view(facts.dtype)
        if facts.count == 1 or start == stop:
            self._fill(values, facts, 0, start)
            return values
        width = math.prod(facts.part_shape[facts.dim :])  # of a part's rows
        row = width * facts.count
        first, last = start // row, -(-stop // row)
        if last - first > 1:
            rows = torch.empty(last - first, facts.count, width, dtype=facts.dtype, device="cpu")
            for part in range(facts.count):
                own = torch.empty((last - first) * width, dtype=facts.dtype, device="cpu")
                self._fill(own, facts, part, first * width)
                rows[:, part] = own.view(-1, width)
            return values.copy_(rows.view(-1)[start - first * row : stop - first * row])
        for part in range(facts.count):  # one row, which may be all of the tensor
            begin = first * row + part * width
            low, high = max(start, begin), min(stop, begin + width)
            if low < high:
                own = values[low - start : high - start]
                self._fill(own, facts, part, first * width + low - begin)
        return values

    def is_cut(self, name: str) -> bool:
        """Whether ranks had slices of the tensor, and not each all of it."""
        return self._tensors[name].dim >= 0

    def all(self) -> dict[str, torch.Tensor]:
        """All tensors by all names; tied ones are one object."""
        found = {name: self.whole(name) for name in self._own}
        return found | {name: found[kept] for name, kept in self._ties.items()}

    def _fill(self, values: torch.Tensor, facts: TensorFacts, part: int, start: int) -> None:
        """Fill `values`, 1-D, with the elements of a part from `start` on."""
        stop, size = start + values.numel(), facts.dtype.itemsize
        memory = memoryview(values.view(torch.uint8).numpy().data)
        for piece in facts.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if piece.part == part and low < high:
                path, offset = self.path / piece.file, piece.offset + (low - piece.start) * size
                last = (offset + (high - low) * size - 1) // BLOCK
                for number in range(offset // BLOCK, last + 1):
                    if (piece.file, number) not in self._checked:
                        check_block(path, number, self.manifest.files[piece.file])
                        self._checked.add((piece.file, number))
                read_into(memory[(low - start) * size : (high - start) * size], path, offset)
