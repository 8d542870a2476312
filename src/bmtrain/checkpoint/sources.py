"""Checkpoint files, one class per format."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

import safetensors
import torch

from bmtrain.checkpoint.files import (
    check_file,
    inside,
    is_there,
    read_into,
    read_object,
    read_text,
    read_torch,
    reading,
    unreadable,
)
from bmtrain.checkpoint.shards import BEGINNING, ShardedCheckpoint
from bmtrain.checkpoint.shards import NAME as MANIFEST
from bmtrain.checkpoint.source import Header, Source
from bmtrain.errors import CheckpointError
from bmtrain.runtime import log, world

# In transformers' order: what was saved last comes before what an earlier save has left.
HUGGING_FACE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MODEL_CENTER = "pytorch_model.pt"
CONFIG, ADAPTERS = "config.json", "adapter_config.json"


class TorchFile(Source):
    """A `torch.save`d dict of tensors, memory-mapped: pages are read when they are copied."""

    def __init__(self, path: pathlib.Path) -> None:
        content = read_torch(path)
        if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
            kind = type(content).__name__
            raise CheckpointError(
                unreadable(path, f"it holds a {kind}, expected a dict of tensors by name")
            )
        self._tensors = {
            name: value for name, value in content.items() if isinstance(value, torch.Tensor)
        }
        headers = {
            name: Header(tuple(value.shape), value.dtype) for name, value in self._tensors.items()
        }
        others = {name: value for name, value in content.items() if name not in headers}
        if others and not headers:
            held = ", ".join(list(others)[:5])
            raise CheckpointError(
                unreadable(
                    path, f"it holds {held} instead of tensors; save the model's part separately"
                )
            )
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
        # The format: the length of a JSON header in 8 bytes, little-endian; the header; the bytes
        # of all tensors. Offsets in the header count from the end of the header.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            about = json.loads(file.read(length))
        ties = about.pop("__metadata__", {})  # among it tied names, as save writes them
        headers: dict[str, Header] = {}
        self._offsets: dict[str, int] = {}
        for name, one in sorted(about.items(), key=lambda item: item[1]["data_offsets"]):
            headers[name] = Header(tuple(one["shape"]), self._file.get_tensor(name).dtype)
            self._offsets[name] = 8 + length + one["data_offsets"][0]
        self._stored = {name: name for name in headers}
        self._stored |= {
            name: kept for name, kept in ties.items() if kept in headers and name not in headers
        }
        super().__init__(path, {name: headers[kept] for name, kept in self._stored.items()}, {})

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        dtype = self.headers[name].dtype
        held = scratch[: (stop - start) * dtype.itemsize]
        offset = self._offsets[self._stored[name]] + start * dtype.itemsize
        read_into(memoryview(held.numpy().data), self.path, offset)
        return held.view(dtype)

    def mapped(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        values: torch.Tensor = self._file.get_tensor(stored)
        if sys.platform == "linux":  # read ahead: one page fault at a time is slow
            with self.path.open("rb", buffering=0) as file:
                os.posix_fadvise(
                    file.fileno(), self._offsets[stored], values.nbytes, os.POSIX_FADV_WILLNEED
                )
        return values


class Collected(Source):
    """Tensors of other sources, under names of their own: a folder of files, or other names.

    Args:
        path: for messages.
        places: of each tensor, its source and its name there.
        others: as those of a Source.
        prefix: what has been left out of all names.
    """

    def __init__(
        self,
        path: pathlib.Path,
        places: Mapping[str, tuple[Source, str]],
        others: Mapping[str, Any],
        prefix: str = "",
    ) -> None:
        headers = {name: source.headers[theirs] for name, (source, theirs) in places.items()}
        super().__init__(path, headers, others)
        self._places, self.prefix = places, prefix

    def file_of(self, name: str) -> pathlib.Path:
        source, theirs = self._places[name]
        return source.file_of(theirs)

    def mapped(self, name: str) -> torch.Tensor:
        source, theirs = self._places[name]
        return source.mapped(theirs)

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        source, theirs = self._places[name]
        return source.read(theirs, start, stop, scratch)


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
            others = {name[place:]: value for name, value in source.others.items()}
            places = {name[place:]: (source, name) for name in source.headers}
            return Collected(source.path, places, others, prefix)
    return source


def open_source(file: str | os.PathLike[str]) -> Source:
    """Open a checkpoint: a `torch.save`d file, a .safetensors file, or a folder of either.

    Of a folder that file counts which `transformers_weights` of its configuration names, else the
    first of HUGGING_FACE, with a warning if there are others. Without any of these it may be a
    checkpoint of shards, hold MODEL_CENTER, or an index under another name.

    Raises:
        CheckpointError: with the file and the reason why it cannot be read, or with the files of
            which any might be meant.
    """
    path = pathlib.Path(file)
    if not is_there(path):
        held = f"; {path.parent} holds {_held(path.parent)}" if is_there(path.parent) else ""
        raise CheckpointError(f"cannot load {path}: there is no such file or folder{held}.")
    if not path.is_dir():
        return open_file(path)
    config = path / CONFIG
    named = read_object(config).get("transformers_weights") if is_there(config) else None
    found = [name for name in HUGGING_FACE if is_there(path / name) and name != named]
    found = found if named is None else [inside(path, named).name, *found]
    others = [name for name in (MANIFEST, MODEL_CENTER) if is_there(path / name)]
    if found:
        others += [ADAPTERS] if is_there(path / ADAPTERS) else []
        if MANIFEST in others and not read_text(path / MANIFEST).startswith(BEGINNING):
            others.remove(MANIFEST)  # another program's
    else:
        others += sorted(one.name for one in path.glob("*.safetensors.index.json"))
    if len(others) > 1 or (found and others):
        raise CheckpointError(
            f"cannot load the folder {path}: {', '.join([*found, *others])} may hold other "
            "weights. Remove those you do not want, or name the file itself."
        )
    if not (found or others):
        expected = ", ".join((*HUGGING_FACE, MODEL_CENTER))
        raise CheckpointError(
            f"cannot load the folder {path}: it holds {_held(path)}; expected one of {expected}."
        )
    first, *rest = [*found, *others]
    if rest and world.rank() == 0:
        log.warn(f"{path}: {first} is read, as transformers does, and not {', '.join(rest)}.")
    return open_file(path / first)


def _held(folder: pathlib.Path) -> str:
    with reading(folder):
        return ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"


def open_file(path: pathlib.Path) -> Source:
    """Open one file, a manifest or an index; its name selects the format."""
    if path.name == MANIFEST:
        return ShardedCheckpoint(path.parent)
    if path.name.endswith(".index.json"):
        return _open_indexed(path.parent, path)
    check_file(path)
    with reading(path):
        return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _open_indexed(path: pathlib.Path, index: pathlib.Path) -> Source:
    """Several files and an index that maps each tensor to its file."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(
            unreadable(index, "expected JSON with a weight_map of names to files")
        )
    sources = {file: open_file(inside(path, file)) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in sources[file].headers:
            raise CheckpointError(
                unreadable(index, f"it says that {name!r} is in {file}, which does not hold it")
            )
    places: dict[str, tuple[Source, str]] = {}
    for source in sources.values():
        for name in source.headers:
            first, _ = places.setdefault(name, (source, name))
            if first is not source and not torch.equal(first.mapped(name), source.mapped(name)):
                both = f"{first.path.name} and {source.path.name}"
                raise CheckpointError(unreadable(index, f"{name!r} differs in {both}"))
    return Collected(path, places, {})
