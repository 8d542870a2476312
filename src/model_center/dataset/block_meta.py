"""What a block dataset's folder says of itself: its files, and the numbers of their blocks.

`meta.json` is ours. `meta.bin` is a pickle, as ModelCenter wrote it; it is read when the caller
allows pickles and there is no `meta.json`, which is written beside it at the first change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bmtrain.checkpoint.files import check_file, inside, read_text
from bmtrain.errors import CheckpointError
from model_center.errors import DataError

META, OLD_META = "meta.json", "meta.bin"
VERSION = 2
BLOCK_SIZE = 16 * 2**20
LARGEST_BLOCK, MOST_BLOCKS = 2**32 - 1, 2**28


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """One data file.

    block_begin, block_end: its blocks in the row of all blocks of the dataset.
    nbytes: of its records, without the padding of blocks.
    nlines: its records.
    mask: readers leave it out.
    """

    file_name: str
    block_begin: int
    block_end: int
    nbytes: int
    nlines: int
    mask: bool = False


@dataclasses.dataclass(frozen=True)
class Meta:
    """A block dataset: bytes of a block, and its files in the order of their blocks."""

    block_size: int
    files: tuple[FileInfo, ...]

    @property
    def num_blocks(self) -> int:
        """Of all files."""
        return self.files[-1].block_end if self.files else 0

    def numbered(self) -> Meta:
        """The same files with blocks numbered without gaps."""
        files, begin = [], 0
        for file in self.files:
            end = begin + file.block_end - file.block_begin
            files.append(dataclasses.replace(file, block_begin=begin, block_end=end))
            begin = end
        return dataclasses.replace(self, files=tuple(files))


def exists(path: str) -> bool:
    """Whether there is a block dataset of either kind in a folder."""
    return Path(path, META).exists() or Path(path, OLD_META).exists()


def signature(path: str) -> tuple[int, int, int]:
    """Changes whenever the meta file does."""
    name = META if Path(path, META).exists() else OLD_META
    stat = Path(path, name).stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_meta(path: str, block_size: int | None = None, allow_pickle: bool = False) -> Meta:
    """The meta data of a folder.

    Args:
        block_size: what the caller takes it for; None for what the dataset says. An old `meta.bin`
            does not say: 16 MiB then.
        allow_pickle: read a `meta.bin`.

    Raises:
        DataError: when there is none, it is damaged, a pickle that is not allowed, or of another
            block size.
    """
    if Path(path, META).exists():
        meta = _parse(Path(path, META))
    elif Path(path, OLD_META).exists():
        if not allow_pickle:
            raise DataError(
                f"{Path(path, OLD_META)} is a pickle, which can run code when it is read: pass "
                "allow_pickle=True if you trust whoever wrote this dataset; shuffle_dataset(..., "
                "allow_pickle=True) makes one without pickles of it."
            )
        meta = Meta(block_size or BLOCK_SIZE, tuple(_unpickle(Path(path, OLD_META))))
    else:
        raise DataError(
            f"{path} holds no block dataset: expected {META} in it, as build_dataset writes it."
        )
    if block_size not in (None, meta.block_size):
        raise DataError(
            f"{path} has blocks of {meta.block_size} bytes, not {block_size}: leave out block_size."
        )
    is_ordered = all(file.block_begin <= file.block_end for file in meta.files)
    if not is_ordered or meta != meta.numbered():
        raise DataError(
            f"the meta file of {path} is damaged: its files' blocks do not follow each other."
        )
    if not 0 < meta.block_size <= LARGEST_BLOCK or meta.num_blocks > MOST_BLOCKS:
        raise DataError(
            f"the meta file of {path} is damaged: it has {meta.num_blocks} blocks of "
            f"{meta.block_size} bytes."
        )
    return meta


def write_meta(path: str, meta: Meta) -> None:
    """Replace the meta data of a folder at once: a reader finds the old or the new."""
    partial = Path(path, f".{META}.partial-{os.getpid()}")
    content = {
        "version": VERSION,
        "block_size": meta.block_size,
        "files": [dataclasses.asdict(file) for file in meta.files],
    }
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(Path(path, META))
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: str) -> Iterator[None]:
    """No other process changes the meta data of this folder meanwhile."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _parse(path: Path) -> Meta:
    try:
        content = json.loads(read_text(path))
        if content["version"] != VERSION:
            raise DataError(f"{path} has version {content['version']}: expected {VERSION}.")
        return Meta(
            int(content["block_size"]), tuple(_file(path, **file) for file in content["files"])
        )
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged: {error}.") from error


def _file(
    path: Path,
    file_name: str,
    block_begin: int,
    block_end: int,
    nbytes: int,
    nlines: int,
    mask: bool,
) -> FileInfo:
    """What a meta file says of a file, in the types it must have; names are the file's.

    Raises:
        CheckpointError: for a file outside of the meta file's folder.
    """
    inside(path.parent, str(file_name))
    return FileInfo(
        str(file_name), int(block_begin), int(block_end), int(nbytes), int(nlines), bool(mask)
    )


class _OldFileInfo:
    """Stands in for the class that old meta files name; takes both pickled forms of its state."""

    def __init__(self, *fields: Any) -> None:
        self.fields = fields

    @classmethod
    def load_from_state(cls, version: int, fields: tuple[Any, ...]) -> _OldFileInfo:
        if version != 1:
            raise pickle.UnpicklingError(f"FileInfo of version {version}")
        return cls(*fields)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.fields = tuple(state)


class _OldUnpickler(pickle.Unpickler):
    """Knows the one class of old meta files and nothing else."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if name == "FileInfo":
            return _OldFileInfo
        if (module, name) == ("builtins", "getattr"):
            return _loader_of
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _loader_of(kind: type[_OldFileInfo], name: str) -> Callable[..., _OldFileInfo]:
    """How pickle spells a class method: `getattr(FileInfo, "_load_from_state")`."""
    if name != "_load_from_state":
        raise pickle.UnpicklingError(f"it names FileInfo.{name}")
    return _OldFileInfo.load_from_state


def _unpickle(path: Path) -> list[FileInfo]:
    try:
        check_file(path)
        content = _OldUnpickler(io.BytesIO(path.read_bytes())).load()
        return [_file(path, *file.fields) for file in content]
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        TypeError,
        ValueError,
        LookupError,
    ) as error:
        raise DataError(f"{path} is not a meta file of a block dataset: {error}.") from error
