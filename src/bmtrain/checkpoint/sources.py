"""Checkpoint files, one class per format."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Collection
from typing import Any

import safetensors
import torch

from bmtrain.checkpoint.files import check_file, inside, read_object, read_torch, unreadable
from bmtrain.checkpoint.manifest import NAME as MANIFEST
from bmtrain.checkpoint.shards import ShardedCheckpoint
from bmtrain.checkpoint.source import Header, Source
from bmtrain.errors import CheckpointError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt")

# The dtype names of the safetensors format.
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TorchFile(Source):
    """A `torch.save`d dict of tensors, memory-mapped: pages are read when they are copied."""

    def __init__(self, path: pathlib.Path) -> None:
        content = _read_torch(path)
        self._tensors = {
            name: value for name, value in content.items() if isinstance(value, torch.Tensor)
        }
        headers = {
            name: Header(tuple(value.shape), value.dtype) for name, value in self._tensors.items()
        }
        others = {
            name: type(value).__name__ for name, value in content.items() if name not in headers
        }
        super().__init__(path, headers, others)

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.mapped(name).reshape(-1)[start:stop]

    def mapped(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()


class SafetensorsFile(Source):
    """A .safetensors file: reads exactly the bytes that are asked for."""

    def __init__(self, path: pathlib.Path) -> None:
        try:
            self._file = safetensors.safe_open(path, framework="pt", device="cpu")
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(
                unreadable(path, f"it is truncated or no safetensors file ({error})")
            ) from error
        headers = {name: self._header(name) for name in self._file.offset_keys()}
        self._stored = {name: name for name in headers}
        for name, kept in (self._file.metadata() or {}).items():  # tied names, as save writes them
            if kept in headers and name not in self._stored:
                self._stored[name] = kept
        self._offsets = _offsets(path)
        super().__init__(path, {name: headers[kept] for name, kept in self._stored.items()}, {})

    def _header(self, name: str) -> Header:
        piece = self._file.get_slice(name)
        dtype = SAFETENSORS_DTYPES.get(piece.get_dtype())
        if dtype is None:
            dtype = self._file.get_tensor(name).dtype
        return Header(tuple(piece.get_shape()), dtype)

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        size = (stop - start) * self.headers[name].dtype.itemsize
        return self.read(name, start, stop, torch.empty(size, dtype=torch.uint8, device="cpu"))

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        dtype = self.headers[name].dtype
        held = scratch[: (stop - start) * dtype.itemsize]
        self._fill(
            memoryview(held.numpy().data),
            self._offsets[self._stored[name]] + start * dtype.itemsize,
        )
        return held.view(dtype)

    def _fill(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes of the file from `offset` on."""
        # A file object has one position: threads that share it would race between seek and read.
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise CheckpointError(
                        unreadable(self.path, "it became shorter while it was read")
                    )
                memory = memory[count:]

    def mapped(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        values: torch.Tensor = self._file.get_tensor(stored)
        if sys.platform == "linux":  # read ahead: one page fault at a time is slow
            with self.path.open("rb", buffering=0) as file:
                os.posix_fadvise(
                    file.fileno(), self._offsets[stored], values.nbytes, os.POSIX_FADV_WILLNEED
                )
        return values


def _offsets(path: pathlib.Path) -> dict[str, int]:
    """The byte offset of each tensor in a safetensors file, which has been validated before.

    The format: the length of a JSON header in 8 bytes, little-endian; the header; the bytes of all
    tensors. Offsets in the header count from the end of the header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + about["data_offsets"][0]
        for name, about in header.items()
        if name != "__metadata__"
    }


class Folder(Source):
    """Several files and an index that maps each tensor to its file."""

    def __init__(self, path: pathlib.Path, index: pathlib.Path) -> None:
        places = _read_index(index)
        files = {name: open_file(inside(path, name)) for name in sorted(set(places.values()))}
        headers: dict[str, Header] = {}
        self._owners: dict[str, Source] = {}
        for name, file in places.items():
            if name not in files[file].headers:
                raise CheckpointError(
                    unreadable(index, f"it says that {name!r} is in {file}, which does not hold it")
                )
        for file_source in files.values():
            for name, header in file_source.headers.items():
                headers[name], self._owners[name] = header, file_source
        super().__init__(path, headers, {})

    def file_of(self, name: str) -> pathlib.Path:
        return self._owners[name].path

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._owners[name].part(name, start, stop)

    def mapped(self, name: str) -> torch.Tensor:
        return self._owners[name].mapped(name)

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        return self._owners[name].read(name, start, stop, scratch)


class Renamed(Source):
    """Another source, with `prefix` removed from every name."""

    def __init__(self, source: Source, prefix: str) -> None:
        cut = len(prefix)
        headers = {name[cut:]: header for name, header in source.headers.items()}
        super().__init__(
            source.path, headers, {name[cut:]: kind for name, kind in source.others.items()}
        )
        self._source, self.prefix = source, prefix

    def file_of(self, name: str) -> pathlib.Path:
        return self._source.file_of(self.prefix + name)

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._source.part(self.prefix + name, start, stop)

    def mapped(self, name: str) -> torch.Tensor:
        return self._source.mapped(self.prefix + name)

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        return self._source.read(self.prefix + name, start, stop, scratch)


def without_prefix(source: Source, wanted: Collection[str]) -> Source:
    """The source without a prefix that all its names share and the `wanted` names lack.

    Files saved from a wrapped model have such a prefix, `module.` for example. The source itself is
    returned if any of its names is wanted as it is, or if no prefix helps.
    """
    names = [*source.headers, *source.others]
    if not names or not set(names).isdisjoint(wanted):
        return source
    for place in [place for place, letter in enumerate(names[0], start=1) if letter == "."]:
        prefix = names[0][:place]
        is_common = all(name.startswith(prefix) for name in names)
        if is_common and not {name[place:] for name in names}.isdisjoint(wanted):
            return Renamed(source, prefix)
    return source


def open_source(file: str | os.PathLike[str]) -> Source:
    """Open a checkpoint: a `torch.save`d file, a .safetensors file, or a folder of either.

    A folder may be a checkpoint of shards, have an index, or hold a single file under one of the
    names in `SINGLES`.

    Raises:
        CheckpointError: with the file and the reason why it cannot be read.
    """
    path = pathlib.Path(file)
    if not path.exists():
        raise CheckpointError(f"cannot load {path}: there is no such file or folder{_like(path)}.")
    return _open_folder(path) if path.is_dir() else open_file(path)


def open_file(path: pathlib.Path) -> Source:
    """Open one file; its suffix selects the format."""
    check_file(path)
    try:
        return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
    except OSError as error:
        raise CheckpointError(unreadable(path, error.strerror or str(error))) from error


def _open_folder(path: pathlib.Path) -> Source:
    if (path / MANIFEST).exists():
        return ShardedCheckpoint(path)
    indexes = [path / name for name in INDEXES if (path / name).is_file()]
    indexes = indexes or sorted(path.glob("*.safetensors.index.json"))
    if indexes:
        return Folder(path, indexes[0])
    for name in SINGLES:
        if (path / name).is_file():
            return open_file(path / name)
    held = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
    expected = ", ".join((*INDEXES, *SINGLES))
    raise CheckpointError(
        f"cannot load the folder {path}: it holds {held}; expected one of {expected}."
    )


def _read_torch(path: pathlib.Path) -> dict[str, Any]:
    content = read_torch(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        kind = type(content).__name__
        raise CheckpointError(
            unreadable(path, f"it holds a {kind}, expected a dict of tensors by name")
        )
    if content and not any(isinstance(value, torch.Tensor) for value in content.values()):
        held = ", ".join(list(content)[:5])
        raise CheckpointError(
            unreadable(path, f"it holds no tensors but {held}; save the model's part by itself")
        )
    return content


def _read_index(index: pathlib.Path) -> dict[str, str]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(
            unreadable(index, "expected JSON with a weight_map of names to files")
        )
    return places


def _like(path: pathlib.Path) -> str:
    """A hint for a mistyped name: files of the same suffix in the same folder."""
    with contextlib.suppress(OSError):
        near = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == path.suffix)[
            :5
        ]
        return f"; {path.parent} holds {', '.join(near)}" if near else ""
    return ""
