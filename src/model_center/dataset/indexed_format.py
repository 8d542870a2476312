"""The index files of token data, read and written; all their numbers are little-endian.

`PREFIX.bin` holds all sequences back to back; `PREFIX.idx` says where each lies. Two kinds of index
are in use:

* ours to read and write, of Megatron-LM and ModelCenter ("mmap"):
  `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 N sequences, uint64 M document marks,
  int32[N] sizes in elements, int64[N] offsets in bytes, int64[M] document marks,
* that of older fairseq-like tools ("lazy", "cached"), which is read only:
  `TNTIDX\\0\\0`, uint64 version 1, uint64 dtype code, uint64 bytes of an element, uint64 N, uint64
  D dims of all sequences, uint64 M, int64[N+1] first dim of each, int64[N+1] first element of each,
  int64[D] dims, int64[M] document marks.

A document mark is the number of sequences before a document; the first is 0, the last N.

Code 6 is float32 here, read and written. Old tools wrote float64 under it; the size of the data
tells them apart.
"""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model_center.errors import DataError

MMAP_MAGIC = b"MMIDIDX\0\0"
OLD_MAGIC = b"TNTIDX\0\0"
VERSION = 1
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f4"),
    7: np.dtype("<f8"),
    8: np.dtype("<u2"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """Where the sequences of a `.bin` file lie.

    dtype: of the elements.
    sizes: int32 or int64 (N,), elements of each sequence.
    offsets: int64 (N,), bytes before each sequence.
    documents: int64 (M,), document marks.
    """

    dtype: np.dtype[Any]
    sizes: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data: the end of the last sequence."""
        if not len(self.sizes):
            return 0
        return int(self.offsets[-1]) + int(self.sizes[-1]) * self.dtype.itemsize


def code_of(dtype: npt.DTypeLike) -> int:
    """The code of a dtype.

    Raises:
        DataError: for one that the format does not know.
    """
    wanted = np.dtype(dtype).newbyteorder("<")
    codes = [code for code, known in CODES.items() if known.newbyteorder("<") == wanted]
    if not codes:
        raise DataError(
            f"dtype {np.dtype(dtype)} cannot be stored: expected one of "
            f"{', '.join(map(str, CODES.values()))}."
        )
    return codes[0]


def bin_path(prefix_path: str) -> str:
    """The file of the data."""
    return f"{prefix_path}.bin"


def idx_path(prefix_path: str) -> str:
    """The file of the index."""
    return f"{prefix_path}.idx"


def kind_of(prefix: str) -> str:
    """ "mmap" or "cached", from the first bytes of the index.

    Raises:
        DataError: when the index is missing or of neither kind.
    """
    start = _read(idx_path(prefix), 0, len(MMAP_MAGIC)).tobytes()
    if start == MMAP_MAGIC:
        return "mmap"
    if start.startswith(OLD_MAGIC):
        return "cached"
    raise DataError(
        f"{idx_path(prefix)} is not an index of token data: it starts with {start!r}, expected "
        f"{MMAP_MAGIC!r} or {OLD_MAGIC!r}."
    )


def read_index(prefix: str) -> Index:
    """The index of `prefix`, of either kind, mapped and checked against the size of the data.

    Raises:
        DataError: for files that are missing, truncated, of another format, or do not fit each
            other.
    """
    index = _read_mmap(prefix) if kind_of(prefix) == "mmap" else _read_old(prefix)
    return _checked(prefix, index)


def _read_mmap(prefix: str) -> Index:
    path = idx_path(prefix)
    header = struct.Struct("<9sQBQQ")
    _, version, code, count, marks = header.unpack(_read(path, 0, header.size).tobytes())
    dtype = _dtype(path, version, code)
    fields = [("<i4", count), ("<i8", count), ("<i8", marks)]
    sizes, offsets, documents = _arrays(path, header.size, fields)
    return Index(dtype=dtype, sizes=sizes, offsets=offsets, documents=documents)


def _read_old(prefix: str) -> Index:
    path = idx_path(prefix)
    header = struct.Struct("<8sQQQQQQ")
    _, version, code, itemsize, count, dims, marks = header.unpack(
        _read(path, 0, header.size).tobytes()
    )
    dtype = _dtype(path, version, code)
    if code == 6 and itemsize == 8:
        dtype = CODES[7]
    if dtype.itemsize != itemsize:
        raise DataError(
            f"{path} is damaged: elements of {itemsize} bytes, where its dtype {dtype} has "
            f"{dtype.itemsize}."
        )
    fields = [("<i8", count + 1), ("<i8", count + 1), ("<i8", dims), ("<i8", marks)]
    first_dim, first_element, shape, documents = _arrays(path, header.size, fields)
    if dims != count or not np.array_equal(first_dim, np.arange(count + 1)):
        raise DataError(
            f"{path} holds tensors of several dims: expected sequences of tokens, one dim each."
        )
    return Index(
        dtype=dtype, sizes=shape, offsets=first_element[:-1] * itemsize, documents=documents
    )


def _dtype(path: str, version: int, code: int) -> np.dtype[Any]:
    if version != VERSION or code not in CODES:
        raise DataError(
            f"{path} has version {version} and dtype code {code}: expected version "
            f"{VERSION} and a code of {list(CODES)}."
        )
    return CODES[code]


def _arrays(path: str, start: int, fields: list[tuple[str, int]]) -> list[npt.NDArray[Any]]:
    """The arrays (dtype, count) that fill the rest of the file from byte `start` on."""
    content = _read(path, 0, 0)
    want = start + sum(np.dtype(dtype).itemsize * count for dtype, count in fields)
    if len(content) != want:
        state = "truncated" if len(content) < want else "longer than its header says"
        raise DataError(
            f"{path} is {state}: {len(content)} bytes, expected {want}; write it again."
        )
    arrays = []
    for dtype, count in fields:
        size = np.dtype(dtype).itemsize * count
        arrays.append(content[start : start + size].view(dtype))
        start += size
    return arrays


def _checked(prefix: str, index: Index) -> Index:
    """The index, if the data has its size; code 6 means float64 where the size says so."""
    path = bin_path(prefix)
    if not Path(path).is_file():
        raise DataError(f"{path} is missing beside {idx_path(prefix)}: copy both files.")
    got = Path(path).stat().st_size
    if index.dtype == CODES[6] and got == 8 * int(index.sizes.sum(dtype=np.int64)):
        index = dataclasses.replace(index, dtype=CODES[7])
    if got != index.num_bytes:
        state = "truncated" if got < index.num_bytes else "longer than its index says"
        raise DataError(
            f"{path} is {state}: {got} bytes, where {idx_path(prefix)} says "
            f"{index.num_bytes} of {index.dtype}."
        )
    return index


def _read(path: str, start: int, count: int) -> npt.NDArray[np.uint8]:
    """`count` bytes of a file from `start` on, mapped into memory; 0 for all to the end."""
    if not Path(path).is_file():
        raise DataError(
            f"{path} is missing: expected an index file, made by `python -m model_center "
            "preprocess` for example."
        )
    size = Path(path).stat().st_size
    if size < max(start + count, 1):
        raise DataError(f"{path} is truncated: {size} bytes, expected at least {start + count}.")
    content: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    return content[start : start + count] if count else content[start:]


def index_bytes(
    dtype: np.dtype[Any], sizes: npt.NDArray[np.int32], documents: npt.NDArray[np.int64]
) -> list[bytes]:
    """An "mmap" index in parts: sequences of `sizes` back to back, and document marks."""
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(sizes)]
    header = struct.pack("<9sQBQQ", MMAP_MAGIC, VERSION, code_of(dtype), len(sizes), len(documents))
    arrays = sizes.astype("<i4"), offsets.astype("<i8"), documents.astype("<i8")
    return [header, *(array.tobytes() for array in arrays)]
