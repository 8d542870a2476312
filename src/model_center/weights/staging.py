"""A folder of several files, put in place so that no half is taken for a checkpoint; a
single file likewise.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bmtrain.checkpoint.files import make_new
from bmtrain.checkpoint.writer import flush_to_disk
from model_center.errors import WeightsError

CONFIG = "config.json"
MODEL_CENTER_FILE = "pytorch_model.pt"
INCOMING = ".incoming"
# Weights that a reader would take, perhaps before the new ones.
WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    MODEL_CENTER_FILE,
    "*.safetensors.index.json",
    "*.bin.index.json",
)


class Staging:
    """Files on their way into `folder`: written into another folder, which then takes its place.

    The weights that were there before are removed, other files stay. Where the system can exchange
    two folders, a kill at any moment leaves the old files or the new ones. Where it cannot (NFS),
    and where `folder` has folders inside, is a mount point, the working directory or another
    user's, files move one by one: while they do, the folder has no `config`, which comes last
    and tells that the rest is there.

    Args:
        weights: patterns of the files that are removed.
        config: the file that comes last.

    Raises:
        WeightsError: if files cannot be made there.
    """

    def __init__(
        self, folder: pathlib.Path, weights: Sequence[str] = WEIGHTS, config: str = CONFIG
    ) -> None:
        self.folder = folder
        self._weights, self._config = weights, config
        self._place = pathlib.Path(os.path.realpath(folder))  # a link stays one
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # of a program that was killed
            for left in (self._place / INCOMING, self._sibling_folder):
                shutil.rmtree(left, ignore_errors=True)
            self._incoming = self._sibling_folder if self._is_movable() else self._place / INCOMING
            self._incoming.mkdir()

    @property
    def _sibling_folder(self) -> pathlib.Path:
        return self._place.with_name(f".{self._place.name}{INCOMING}")

    def _is_movable(self) -> bool:
        """Whether another folder may take its place."""
        place, parent = self._place.stat(), self._place.parent.stat()
        with os.scandir(self._place) as entries:
            is_flat = all(entry.is_file(follow_symlinks=False) for entry in entries)
        return (
            is_flat
            and place.st_dev == parent.st_dev
            and place.st_uid == os.geteuid()
            and os.access(self._place.parent, os.W_OK | os.X_OK)
            and not os.path.samefile(self._place, os.getcwd())
        )

    def path(self, name: str = "") -> pathlib.Path:
        """Where to write the file `name`; the folder of all without one."""
        return self._incoming / name

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` into the file `name`, keys sorted."""
        self.path(name).write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )

    def commit(self) -> None:
        """Put everything into place."""
        for name in os.listdir(self._incoming):
            flush_to_disk(self._incoming / name)
        if self._incoming == self._sibling_folder:
            try:
                self._exchange()
            except OSError:  # this file system cannot
                self._move()
            else:
                flush_to_disk(self._place.parent)
        else:
            self._move()
        shutil.rmtree(self._incoming, ignore_errors=True)

    def _exchange(self) -> None:
        """Let the new folder, with the old one's other files, take its place."""
        removed = set(self._old_weights())
        arriving = set(os.listdir(self._incoming))
        staying = [path for path in self._place.iterdir() if path not in removed]
        shutil.copystat(self._place, self._incoming)
        try:
            for path in staying:
                if path.name not in arriving:
                    os.link(path, self._incoming / path.name, follow_symlinks=False)
            flush_to_disk(self._incoming)
            exchange(self._incoming, self._place)
        except OSError:
            for path in staying:
                if path.name not in arriving:
                    (self._incoming / path.name).unlink(missing_ok=True)
            raise

    def _move(self) -> None:
        """Move the files one by one."""
        arriving = sorted(os.listdir(self._incoming), key=lambda name: name == self._config)
        (self._place / self._config).unlink(missing_ok=True)
        for old in self._old_weights():
            old.unlink()
        for name in arriving:
            target = self._place / name
            if target.is_dir():
                shutil.rmtree(target)
            shutil.move(self._incoming / name, target)  # copies out of a mount point's parent
        flush_to_disk(self._place)

    def _old_weights(self) -> list[pathlib.Path]:
        return [old for pattern in self._weights for old in self._place.glob(pattern)]

    def abandon(self) -> None:
        """Leave the folder as it was found."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else may have put something there
            for path in self._made:
                path.rmdir()


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Errors of the system are WeightsErrors that name the folder."""
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"cannot save to the folder {folder}: {error.strerror or error}; its files are "
            "unchanged. Free some space, or name another folder."
        ) from error


_HERE = -100  # AT_FDCWD: paths are relative to the working directory
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS


def exchange(first: pathlib.Path, second: pathlib.Path) -> None:
    """Let each of two paths of one file system name what the other named.

    No reader, and no kill, finds one of them missing.

    Raises:
        OSError: where the system or the file system (NFS, say) cannot, or a path is a mount point.

    Source: renameat2(2) of Linux, renamex_np(2) of macOS.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    one, other = os.fsencode(first), os.fsencode(second)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(one, other, ctypes.c_uint(_EXCHANGE))
        else:
            failed = libc.renameat2(_HERE, one, _HERE, other, ctypes.c_uint(_EXCHANGE))
    except AttributeError as error:  # an older C library, or another system
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(first)) from error
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(first), None, str(second))


PARTIAL = ".partial"


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, meets the old text or the new one."""
    beside = path.with_name(path.name + PARTIAL)
    make_new(beside)
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    flush_to_disk(path.parent)
