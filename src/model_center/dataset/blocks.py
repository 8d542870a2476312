"""A block: records in a fixed number of bytes, none of which crosses into the next block.

A record starts with a byte that says its kind: 0x1E ours (uint32 length, uint32 CRC-32, the bytes
of `records.dumps`), 0x1F a pickle, as ModelCenter wrote it. 0x00 says that the rest of the block is
empty.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

from model_center.dataset import records
from model_center.errors import DataError

EMPTY, OURS, PICKLE = 0x00, 0x1E, 0x1F
_HEADER = struct.Struct("<BII")


def wrap(value: Any) -> bytes:
    """A record with its header."""
    content = records.dumps(value)
    return _HEADER.pack(OURS, len(content), zlib.crc32(content)) + content


def is_end(block: bytes, at: int) -> bool:
    """Whether no record starts at byte `at`."""
    return at >= len(block) or block[at] == EMPTY


def skip(block: bytes, at: int) -> int:
    """Where the record of our kind that starts at byte `at` ends; its checksum is right.

    Raises:
        DataError: when it is damaged.
    """
    content = block[at + _HEADER.size : at + _HEADER.size]
    if at + _HEADER.size <= len(block):
        _, length, checksum = _HEADER.unpack_from(block, at)
        content = block[at + _HEADER.size : at + _HEADER.size + length]
        if len(content) == length and zlib.crc32(content) == checksum:
            return at + _HEADER.size + length
    raise DataError(
        f"the record at byte {at} of a block is damaged: its length or checksum is wrong."
    )


def read(block: bytes, at: int, allow_pickle: bool) -> tuple[Any, int]:
    """The record that starts at byte `at`, and where it ends.

    Raises:
        DataError: when it is damaged, or a pickle that is not allowed.
    """
    if block[at] == OURS:
        end = skip(block, at)
        return records.loads(block[at + _HEADER.size : end]), end
    if block[at] != PICKLE:
        raise DataError(
            f"byte {at} of a block is {block[at]:#x}, which starts no record: damaged, or "
            "of another block size."
        )
    if not allow_pickle:
        raise DataError(
            "this record is a pickle, which can run code when it is read: pass "
            "allow_pickle=True if you trust whoever wrote the "
            "dataset; shuffle_dataset(..., allow_pickle=True) makes one without pickles of it."
        )
    stream = io.BytesIO(block)
    stream.seek(at + 1)
    return pickle.load(stream), stream.tell()
