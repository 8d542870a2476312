"""Writing safetensors files tensor by tensor, in any order, one in memory at a time.

The format: the length of a JSON header in 8 bytes, little-endian; the header, padded with blanks to
a multiple of 8: for each tensor its dtype, shape and the place of its bytes behind the header; the
bytes of all tensors without gaps. Its library writes a dict of tensors that are all in memory.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping

import torch

from bmtrain.checkpoint.shards import DTYPES
from bmtrain.checkpoint.source import Header
from model_center.errors import WeightsError

# The format's names of dtypes, before torch's.
_TYPES = """F64 float64 F32 float32 F16 float16 BF16 bfloat16
I64 int64 I32 int32 I16 int16 I8 int8 U8 uint8 BOOL bool"""
NAMES = {
    DTYPES[ours]: name for name, ours in zip(_TYPES.split()[::2], _TYPES.split()[1::2], strict=True)
}
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
INDEX = "model.safetensors.index.json"


class SafetensorsWriter:
    """One file, or several with an index, of these tensors; their values follow by `write`.

    Args:
        folder: an empty folder.
        headers: shape and dtype of each tensor, by name, in the order of the files.
        max_shard_size: bytes of tensors in one file, at most; a tensor that is larger has a file of
            its own.
    """

    def __init__(
        self, folder: pathlib.Path, headers: Mapping[str, Header], max_shard_size: int
    ) -> None:
        groups = shards(headers, max_shard_size)
        self.folder, self._headers = folder, headers
        self._places: dict[str, tuple[pathlib.Path, int]] = {}
        for number, names in enumerate(groups, start=1):
            single = len(groups) == 1
            file = folder / (
                "model.safetensors"
                if single
                else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            )
            self._begin(file, {name: headers[name] for name in names})
        if len(groups) > 1:
            self._write_index(folder)

    def _begin(self, file: pathlib.Path, headers: Mapping[str, Header]) -> None:
        """Write the header of one file and keep the places of its tensors."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        places: dict[str, int] = {}
        end = 0
        # The widest numbers first: all are aligned then.
        for name, header in sorted(headers.items(), key=lambda item: -item[1].dtype.itemsize):
            places[name], end = end, end + nbytes(header)
            table[name] = {
                "dtype": _dtype_name(name, header),
                "shape": header.shape,
                "data_offsets": [places[name], end],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = memoryview(len(text).to_bytes(8, "little") + text)
        _write_at(file, 0, data)
        self._places.update({name: (file, len(data) + place) for name, place in places.items()})

    def _write_index(self, folder: pathlib.Path) -> None:
        index = {
            "metadata": {"total_size": sum(nbytes(header) for header in self._headers.values())},
            "weight_map": {name: self._places[name][0].name for name in sorted(self._places)},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put the values of a tensor, as large as announced and on any device, in their place."""
        file, offset = self._places[name]
        values = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        _write_at(file, offset, values.numpy().data)


def _write_at(file: pathlib.Path, offset: int, left: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        while left:
            count = os.pwrite(descriptor, left, offset)
            left, offset = left[count:], offset + count
    finally:
        os.close(descriptor)


def shards(headers: Mapping[str, Header], max_shard_size: int) -> list[list[str]]:
    """Names in order, in groups of at most so many bytes; larger tensors are alone."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, header in headers.items():
        if groups[-1] and size + nbytes(header) > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes(header)
    return groups


def nbytes(header: Header) -> int:
    """Bytes of a tensor's values."""
    return torch.Size(header.shape).numel() * header.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Bytes in "5GB" (decimal), "512MiB" (binary) or a number.

    Raises:
        WeightsError: for anything else, and for nothing at all.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if found is None or found[2].upper() not in UNITS or float(found[1]) <= 0:
        raise WeightsError(
            f'max_shard_size is {size!r}: expected bytes as a number, or "5GB", "500MB", "2GiB".'
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def _dtype_name(name: str, header: Header) -> str:
    if header.dtype not in NAMES:
        known = ", ".join(NAMES.values())
        raise WeightsError(
            f"{name!r} is {header.dtype}, which safetensors files do not hold: expected "
            f"one of {known}."
        )
    return NAMES[header.dtype]
