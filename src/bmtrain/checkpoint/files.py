"""Files that others may have written: looked at before they are opened, refused with a reason."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from bmtrain.errors import CheckpointError, DamagedError, first_line

ZIP_MAGIC = b"PK\x03\x04"
LARGEST_TEXT = 2**28  # bytes: the largest tokenizers have some 2**25


def unreadable(path: pathlib.Path, reason: str) -> str:
    """The message about a file that cannot be read."""
    return f"cannot load {path}: {reason}."


def reason_of(error: BaseException) -> str:
    """Why a file could not be read or written, for a message."""
    if isinstance(error, CheckpointError):
        return str(error)
    plain = error.strerror if isinstance(error, OSError) else None
    return plain or f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """What the system refuses inside, memory too, is a CheckpointError that names the file."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise CheckpointError(unreadable(path, reason_of(error))) from error


def check_file(path: pathlib.Path) -> int:
    """The size of a regular file, in bytes; a named pipe would be waited for, a device read on.

    Raises:
        DamagedError: if there is none.
        CheckpointError: if that cannot be told.
    """
    if not is_there(path):
        raise DamagedError(unreadable(path, "No such file or directory"))
    with reading(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(
            unreadable(
                path, "it is a folder, a named pipe, a socket or a device, expected a regular file"
            )
        )
    return found.st_size


def is_there(path: pathlib.Path) -> bool:
    """Whether a file or folder is there; pathlib says no as well where nobody can tell.

    Raises:
        CheckpointError: if that cannot be told.
    """
    with reading(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def inside(folder: pathlib.Path, name: Any) -> pathlib.Path:
    """A file of a folder that a file there names.

    A link in the folder itself is followed, as those of Hugging Face's cache must be.

    Raises:
        CheckpointError: for a name that leads elsewhere.
    """
    parts = pathlib.PurePosixPath(name).parts if isinstance(name, str) and name else ("..",)
    path = folder.joinpath(*parts)
    is_outside = (
        ".." in parts
        or "\0" in str(path)
        or path.is_absolute() != folder.is_absolute()
        or pathlib.PurePosixPath(*parts).is_absolute()
    )
    # its folder, without links, must be inside too
    if is_outside or not pathlib.Path(os.path.realpath(path.parent)).is_relative_to(
        os.path.realpath(folder)
    ):
        raise CheckpointError(
            unreadable(folder, f"it names {name!r}, which is not a file inside it")
        )
    return path


def read_text(path: pathlib.Path, largest: int = LARGEST_TEXT) -> str:
    """A text file, in UTF-8.

    Raises:
        DamagedError: if it is none, or larger than `largest` bytes.
        CheckpointError: if it cannot be read.
    """
    size = check_file(path)
    if size > largest:
        raise DamagedError(unreadable(path, f"it has {size} bytes, expected {largest} at most"))
    with reading(path):
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DamagedError(unreadable(path, f"it is not text ({error})")) from error


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: if it holds none.
    """
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(unreadable(path, f"it is not JSON ({error})")) from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise CheckpointError(unreadable(path, f"it holds a {kind}, expected an object"))
    return content


def read_into(memory: memoryview, path: pathlib.Path, offset: int) -> None:
    """Fill `memory` with the bytes of a file from `offset` on; threads may do so together.

    Raises:
        DamagedError: if the file ends before.
        CheckpointError: if it cannot be read.
    """
    with reading(path), path.open("rb", buffering=0) as file:
        while memory:
            count = os.preadv(file.fileno(), [memory], offset)
            if count == 0:
                raise DamagedError(unreadable(path, "it became shorter while it was read"))
            memory, offset = memory[count:], offset + count


def read_torch(path: pathlib.Path, *, mmap: bool = True) -> Any:
    """What `torch.save` has written: tensors, numbers, texts and containers of them; nothing runs.

    Args:
        mmap: map tensors from the file, which must not change while they are used. Files from
            before torch 1.6 are read.

    Raises:
        CheckpointError: if it is damaged or holds anything else.
    """
    size = check_file(path)
    try:
        with path.open("rb") as file:
            is_archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        if is_archive:
            if not zipfile.is_zipfile(path):
                raise CheckpointError(unreadable(path, "it is truncated: its end is missing"))
            # torch compresses nothing: an archive that unpacks to more than its size is another's
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > size:
                reason = f"it is not a torch archive: it would unpack to {unpacked} bytes"
                raise CheckpointError(unreadable(path, reason))
        with warnings.catch_warnings():
            # torch warns about unusual pickles; they load or raise all the same.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", mmap=mmap and is_archive, weights_only=True)
    except CheckpointError:
        raise
    except OSError:
        with reading(path):
            raise
    except Exception as error:  # damaged files end in errors of any kind
        code = re.search(r"(?i)\bglobal:? ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and code is not None:
            reason = (
                f"it holds Python objects other than tensors ({code[1]}), which could run code and "
                "are not loaded; save a state dict instead"
            )
        elif isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            # torch's own message advises to load it without care
            reason = "it is damaged or not a checkpoint; any other pickle could run code"
        else:
            reason = f"it is damaged or not a checkpoint ({first_line(error)})"
        raise CheckpointError(unreadable(path, reason)) from error


def make_new(path: pathlib.Path) -> None:
    """Make an empty file in the place of what a program that died has left, or a link.

    Raises:
        OSError: if that cannot be done.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
