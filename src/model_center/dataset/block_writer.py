"""Writing a block dataset: a file of blocks, part of the dataset once it is complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from model_center.dataset import block_meta, blocks
from model_center.dataset.block_meta import (
    BLOCK_SIZE,
    LARGEST_BLOCK,
    META,
    OLD_META,
    FileInfo,
    Meta,
)
from model_center.errors import DataError


class DatasetWriter:
    """Appends records to a file, block by block."""

    def __init__(self, file: IO[bytes], block_size: int) -> None:
        self._file, self._block_size = file, block_size
        self._end = 0  # of the last record
        self.nbytes, self.nlines = 0, 0

    @property
    def nblocks(self) -> int:
        """Blocks so far, the one that is being filled included."""
        return -(-self._end // self._block_size)

    def write(self, value: Any) -> None:
        """Append a record of the types that `records.dumps` writes.

        Raises:
            DataError: for a value of another type or one that fits no block; nothing is written
                then.
        """
        record = blocks.wrap(value)
        self.write_record(record)

    def write_record(self, record: bytes) -> None:
        """Append the bytes of a record."""
        if len(record) > self._block_size:
            raise DataError(
                f"a record of {len(record)} bytes fits no block of {self._block_size}: use "
                "a larger block_size."
            )
        room = -self._end % self._block_size
        if len(record) > room:
            self._end += room
            self._file.seek(self._end)  # what is left out is zeros, the mark of an empty rest
        self._file.write(record)
        self._end += len(record)
        self.nbytes, self.nlines = self.nbytes + len(record), self.nlines + 1

    def close(self) -> None:
        """Fill the last block; all is on the disk then."""
        self._file.truncate(self.nblocks * self._block_size)
        self._file.flush()
        os.fsync(self._file.fileno())


@contextlib.contextmanager
def build_dataset(path: str, dbname: str, block_size: int | None = None) -> Iterator[DatasetWriter]:
    """Add the file `dbname` to the block dataset in the folder `path`, which is made if need be.

    `with build_dataset(path, "part1") as dataset: dataset.write({"text": "..."})`. Readers see the
    file when the block ends; if it raises, they never do, and nothing is left. Several processes
    may add files at once.

    Args:
        dbname: a new name in the folder.
        block_size: bytes that are read at once and belong to one rank; None for that of the
            dataset, 16 MiB for a new one.

    Raises:
        DataError: for a name that is taken or none, or another block size than the dataset has.
    """
    if Path(dbname).name != dbname or dbname.startswith(".") or dbname in {META, OLD_META}:
        raise DataError(
            f"{dbname!r} cannot name a data file: expected a plain file name, without "
            "folders or a leading dot."
        )
    if block_size is not None and not 0 < block_size <= LARGEST_BLOCK:
        raise DataError(f"block_size is {block_size}: expected bytes, from 1 to {LARGEST_BLOCK}.")
    Path(path).mkdir(parents=True, exist_ok=True)
    meta = _current(path, block_size)
    _check_new(path, meta, dbname)
    partial = Path(path, f".{dbname}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            writer = DatasetWriter(file, meta.block_size)
            yield writer
            writer.close()
        _publish(path, partial, dbname, meta.block_size, writer)
    finally:
        partial.unlink(missing_ok=True)


def _current(path: str, block_size: int | None) -> Meta:
    """The dataset's meta data, or that of an empty one."""
    if block_meta.exists(path):
        return block_meta.read_meta(path, block_size)
    return Meta(block_size or BLOCK_SIZE, ())


def _check_new(path: str, meta: Meta, dbname: str) -> None:
    if any(file.file_name == dbname for file in meta.files):
        raise DataError(f"{path} has a file {dbname!r} already: choose a new name.")
    if Path(path, dbname).exists():
        raise DataError(
            f"{Path(path, dbname)} exists but is no part of the dataset: move it away or "
            "choose a new name."
        )


def _publish(path: str, partial: Path, dbname: str, block_size: int, writer: DatasetWriter) -> None:
    """Give the file its name and enter it into the meta data, or neither."""
    with block_meta.lock(path):
        meta = _current(path, block_size)
        _check_new(path, meta, dbname)
        new = FileInfo(
            dbname, meta.num_blocks, meta.num_blocks + writer.nblocks, writer.nbytes, writer.nlines
        )
        partial.rename(Path(path, dbname))
        try:
            block_meta.write_meta(path, Meta(meta.block_size, (*meta.files, new)))
        except BaseException:
            Path(path, dbname).unlink()
            raise
