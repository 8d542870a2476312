"""One record of a block dataset as bytes; reading one runs no code of whoever wrote it.

A value is a byte that says its kind, and what the kind needs; numbers are little-endian:

    N        None
    T, F     True, False
    i        int64
    I        any other int: text
    d        float64
    s        text (UTF-8)
    b        bytes
    l, t, m  list, tuple, dict: count, members
    a, x     numpy array, torch tensor: dtype, shape, elements

Texts, bytes, counts and elements are preceded by their uint32 length (elements: uint64).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from model_center.errors import DataError

_KINDS = "biufcSU"  # of numpy dtypes: plain numbers and texts of fixed size
_ARRAY_DTYPE = re.compile(rf"[<|][{_KINDS}]\d+")
_INT64 = range(-(2**63), 2**63)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}


def dumps(value: Any) -> bytes:
    """The bytes of a value: what JSON has, bytes, tuples, numpy arrays and numbers, tensors.

    Raises:
        DataError: for a value of another type, saying where in the record it is.
    """
    parts: list[bytes] = []
    _write(value, parts, "")
    return b"".join(parts)


def loads(content: bytes) -> Any:
    """The value of these bytes; tensors are on the CPU.

    Raises:
        DataError: when they are no record.
    """
    reader = _Reader(content)
    try:
        value = reader.value()
    except (struct.error, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"a record of {len(content)} bytes is damaged: {error}.") from error
    if reader.at != len(content):
        raise DataError(f"a record of {len(content)} bytes is damaged: it ends after {reader.at}.")
    return value


def _write(value: Any, parts: list[bytes], where: str) -> None:
    """Append the bytes of `value`, which is found at `where` in the record."""
    write = _WRITERS.get(type(value))
    if write is not None:
        write(value, parts, where)
    elif isinstance(value, np.generic):
        _write(value.item(), parts, where)
    else:
        raise DataError(
            f"a record cannot hold {type(value).__name__} (at record{where}): expected None, bool, "
            "int, float, str, bytes, numpy arrays, torch tensors, and lists, tuples, dicts of them."
        )


def _sized(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content


def _write_int(value: int, parts: list[bytes], where: str) -> None:
    parts.append(
        b"i" + struct.pack("<q", value) if value in _INT64 else _sized(b"I", b"%d" % value)
    )


def _write_sequence(value: Sequence[Any], parts: list[bytes], where: str) -> None:
    parts.append((b"l" if isinstance(value, list) else b"t") + struct.pack("<I", len(value)))
    for number, member in enumerate(value):
        _write(member, parts, f"{where}[{number}]")


def _write_dict(value: dict[Any, Any], parts: list[bytes], where: str) -> None:
    parts.append(b"m" + struct.pack("<I", len(value)))
    for key, member in value.items():
        _write(key, parts, f"{where} (a key)")
        _write(member, parts, f"{where}[{key!r}]")


def _write_array(value: np.ndarray[Any, Any], parts: list[bytes], where: str) -> None:
    if value.dtype.kind not in _KINDS:
        raise DataError(
            f"a record cannot hold an array of {value.dtype} (at record{where}): expected "
            "numbers or fixed-size text."
        )
    _write_elements(
        b"a",
        value.dtype.newbyteorder("<").str,
        value.shape,
        value.astype(value.dtype.newbyteorder("<")).tobytes(),
        parts,
    )


def _write_tensor(value: torch.Tensor, parts: list[bytes], where: str) -> None:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES or value.layout != torch.strided:
        raise DataError(
            f"a record cannot hold a {value.layout} tensor of {value.dtype} (at "
            f"record{where}): make it a dense one."
        )
    plain = value.detach().cpu().contiguous().reshape(-1)
    _write_elements(
        b"x",
        name,
        tuple(value.shape),
        plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
        parts,
    )


def _write_elements(
    kind: bytes, dtype: str, shape: tuple[int, ...], content: bytes, parts: list[bytes]
) -> None:
    parts.append(
        _sized(kind, dtype.encode())
        + struct.pack(f"<I{len(shape)}qQ", len(shape), *shape, len(content))
    )
    parts.append(content)


_WRITERS: dict[type, Callable[[Any, list[bytes], str], None]] = {
    type(None): lambda value, parts, where: parts.append(b"N"),
    bool: lambda value, parts, where: parts.append(b"T" if value else b"F"),
    int: _write_int,
    float: lambda value, parts, where: parts.append(b"d" + struct.pack("<d", value)),
    str: lambda value, parts, where: parts.append(
        _sized(b"s", value.encode("utf-8", "surrogatepass"))
    ),
    bytes: lambda value, parts, where: parts.append(_sized(b"b", value)),
    list: _write_sequence,
    tuple: _write_sequence,
    dict: _write_dict,
    np.ndarray: _write_array,
    torch.Tensor: _write_tensor,
    torch.nn.Parameter: _write_tensor,
}


class _Reader:
    """A position in the bytes of a record."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def value(self) -> Any:
        """The value that starts here."""
        kind = self.take(1)
        if kind not in _READERS:
            raise ValueError(f"no value starts with {kind!r}")
        return _READERS[kind](self)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if self.at + count > len(self.content):
            raise IndexError(f"{count} bytes are missing at {self.at}")
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, form: str) -> Any:
        """One number of a struct format."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def sized(self) -> bytes:
        """Bytes after their length."""
        return self.take(self.number("I"))

    def members(self) -> list[Any]:
        """Values after their count."""
        return [self.value() for _ in range(self.number("I"))]

    def pairs(self) -> dict[Any, Any]:
        """Keys and values after their count."""
        return {self.value(): self.value() for _ in range(self.number("I"))}

    def elements(self) -> tuple[str, list[int], bytes]:
        """dtype, shape and content of an array or tensor."""
        name = self.sized().decode()
        shape = [self.number("q") for _ in range(self.number("I"))]
        if min(shape, default=0) < 0:
            raise ValueError(f"a shape {shape}")
        return name, shape, self.take(self.number("Q"))

    def array(self) -> np.ndarray[Any, Any]:
        """A numpy array, writable."""
        name, shape, content = self.elements()
        if not _ARRAY_DTYPE.fullmatch(name):
            raise ValueError(f"an array of {name!r}")
        return np.frombuffer(bytearray(content), name).reshape(shape)

    def tensor(self) -> torch.Tensor:
        """A torch tensor."""
        name, shape, content = self.elements()
        dtype = _DTYPES[name]
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(content)} bytes for a tensor of shape {shape}")
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda reader: None,
    b"T": lambda reader: True,
    b"F": lambda reader: False,
    b"i": lambda reader: reader.number("q"),
    b"I": lambda reader: int(reader.sized()),
    b"d": lambda reader: reader.number("d"),
    b"s": lambda reader: reader.sized().decode("utf-8", "surrogatepass"),
    b"b": _Reader.sized,
    b"l": _Reader.members,
    b"t": lambda reader: tuple(reader.members()),
    b"m": _Reader.pairs,
    b"a": _Reader.array,
    b"x": _Reader.tensor,
}
