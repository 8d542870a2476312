"""Files that others may have written: looked at before they are opened, refused with a reason."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import stat
import warnings
import zipfile
from typing import Any

import torch

from bmtrain.errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"
LARGEST_TEXT = 2**28  # bytes: the largest tokenizers have some 2**25
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def unreadable(path: pathlib.Path, reason: str) -> str:
    """The message about a file that cannot be read."""
    return f"cannot load {path}: {reason}."


def check_file(path: pathlib.Path) -> int:
    """The size of a regular file, in bytes; a named pipe would be waited for, a device read on.

    Raises:
        CheckpointError: if there is none.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(unreadable(path, error.strerror or str(error))) from error
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise CheckpointError(unreadable(path, f"it is {kind}, expected a regular file"))
    return found.st_size


def inside(folder: pathlib.Path, name: Any) -> pathlib.Path:
    """A file of a folder that a file there names.

    A link in the folder itself is followed, as those of Hugging Face's cache must be.

    Raises:
        CheckpointError: for a name that leads elsewhere.
    """
    parts = pathlib.PurePosixPath(name).parts if isinstance(name, str) and name else ("..",)
    path = folder.joinpath(*parts)
    if ".." in parts or "\0" in str(path) or path.is_absolute() != folder.is_absolute():
        raise CheckpointError(unreadable(folder, f"it names {name!r}, no file inside of it"))
    if pathlib.PurePosixPath(*parts).is_absolute() or not _is_below(folder, path.parent):
        raise CheckpointError(unreadable(folder, f"it names {name!r}, no file inside of it"))
    return path


def _is_below(folder: pathlib.Path, path: pathlib.Path) -> bool:
    """Whether a folder inside of another one is so without its links, too."""
    return pathlib.Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def read_text(path: pathlib.Path, largest: int = LARGEST_TEXT) -> str:
    """A text file, in UTF-8.

    Raises:
        CheckpointError: if it is none, or larger than `largest` bytes.
    """
    size = check_file(path)
    if size > largest:
        raise CheckpointError(unreadable(path, f"it has {size} bytes, expected {largest} at most"))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(unreadable(path, error.strerror or str(error))) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(unreadable(path, f"it is no text ({error})")) from error


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: if it holds none.
    """
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(unreadable(path, f"it is no JSON ({error})")) from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise CheckpointError(unreadable(path, f"it holds a {kind}, expected an object"))
    return content


def read_torch(path: pathlib.Path, *, mmap: bool = True) -> Any:
    """What `torch.save` has written: tensors, numbers, texts and containers of them; nothing runs.

    Args:
        mmap: map tensors from the file, which must not change while they are used. Files from
            before torch 1.6 are read.

    Raises:
        CheckpointError: if it is damaged or holds anything else.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(ZIP_MAGIC))
        if magic == ZIP_MAGIC:
            _check_archive(path)
        with warnings.catch_warnings():
            # torch warns about unusual pickles; they load or raise all the same.
            warnings.simplefilter("ignore")
            return torch.load(
                path, map_location="cpu", mmap=mmap and magic == ZIP_MAGIC, weights_only=True
            )
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(unreadable(path, _pickle_reason(error, magic))) from error
    except OSError as error:
        raise CheckpointError(unreadable(path, error.strerror or str(error))) from error
    except Exception as error:  # damaged files end in errors of any kind
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # torch's advice is to load what it cannot read without care
        detail = "" if "weights_only" in str(error) else f" ({reason})"
        raise CheckpointError(
            unreadable(path, f"it is damaged or no checkpoint{detail}")
        ) from error


def _check_archive(path: pathlib.Path) -> None:
    """torch compresses nothing: an archive that unpacks to more than its size is none of torch's.

    Raises:
        CheckpointError: for such a one, and for one whose end is missing.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(unreadable(path, "it is truncated: its end is missing"))
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > path.stat().st_size:
        raise CheckpointError(
            unreadable(path, f"it is no archive of torch: it would unpack to {unpacked} bytes")
        )


def _pickle_reason(error: pickle.UnpicklingError, magic: bytes) -> str:
    """What the file holds. Torch's own message advises loading it with weights_only=False."""
    found = re.search(r"(?i)\bglobal:? ([\w.]+)", str(error))
    if found is not None:
        return (
            f"it holds Python objects other than tensors ({found[1]}), which could run "
            "code and are not loaded; "
            "save a state dict instead"
        )
    if magic != ZIP_MAGIC:
        return (
            "it is no checkpoint: neither an archive of torch nor a pickle of tensors, and "
            "others could run code"
        )
    detail = re.search(r"WeightsUnpickler error: (.*)", str(error))
    return (
        "it is damaged "
        f"({detail[1].strip() if detail is not None else 'its list of tensors cannot be read'})"
    )


def make_new(path: pathlib.Path) -> None:
    """Make an empty file in the place of what a program that died has left, or a link.

    Raises:
        OSError: if that cannot be done.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
