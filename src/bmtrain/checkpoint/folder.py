"""A folder of checkpoints: which run owns it, which of them count, which go, which are damaged."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import socket
import time

from bmtrain.checkpoint.files import is_there, reading
from bmtrain.checkpoint.shards import NAME, read_manifest
from bmtrain.checkpoint.writer import flush_to_disk
from bmtrain.errors import CheckpointError
from bmtrain.runtime import log

LOCK = "lock"
PATIENCE_S = 10.0  # for processes of a run that has just been killed
_PAUSE_S = 0.1
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_STEP = re.compile(r"step-([0-9]{8,})")
_OURS = re.compile(r"rank-[0-9]{5,}-[0-9a-f]+\.(bin|pt)|manifest\.json\.[0-9a-f]+")
DAMAGED = ".damaged"


class Lock:
    """A lock on a folder, which the system takes away from a process that ends in any way."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._path = folder / LOCK
        self._descriptor: int | None = None

    def take(self) -> None:
        """Become the owner of the folder, which is made if it is not there.

        Raises:
            CheckpointError: saying who is, or why nobody can be.
        """
        folder = self._path.parent
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise CheckpointError(
                f"cannot use {folder} for checkpoints: {error.strerror or error}."
            ) from error
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    log.warn(
                        f"{folder} is on a file system without locks: nothing keeps another run "
                        "from writing there too."
                    )
                    break
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > end:
                    holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
                    os.close(descriptor)
                    raise CheckpointError(
                        f"{folder} belongs to another run: {holder.strip() or 'unknown'}. Wait for "
                        "its end, stop it, or give another folder."
                    ) from error
            time.sleep(_PAUSE_S)
        self._descriptor = descriptor
        # who may only read could hold a lock, too: nobody may do that alone
        writers = os.fstat(descriptor).st_mode & 0o222
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, writers | writers << 1)
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode() + b"\n", 0)

    def release(self) -> None:
        """Let others have the folder; safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def step_of(path: pathlib.Path) -> int | None:
    """The step of a checkpoint; None for what is no name of one."""
    found = _STEP.fullmatch(path.name)
    return None if found is None else int(found[1])


def complete(
    folder: pathlib.Path, before: int | None = None, name: str = NAME
) -> list[pathlib.Path]:
    """The checkpoints that have a manifest, in the order of their steps, those from `before` on
    left out.

    Args:
        name: of the manifest: NAME + DAMAGED for those that were set aside.

    Raises:
        CheckpointError: if the folder cannot be read: it must not pass for one without checkpoints.
    """
    found: dict[int, pathlib.Path] = {}
    with reading(folder):
        paths = list(folder.iterdir()) if is_there(folder) else []
    for path in paths:
        step = step_of(path)
        if step is not None and (before is None or step < before) and is_there(path / name):
            found[step] = path
    return [found[step] for step in sorted(found)]


def usable(folder: pathlib.Path) -> list[pathlib.Path]:
    """Those whose files are there, with their sizes."""
    good = []
    for path in complete(folder):
        with contextlib.suppress(CheckpointError):
            read_manifest(path)
            good.append(path)
    return good


def set_aside(path: pathlib.Path) -> None:
    """Let a damaged checkpoint no longer count; its files stay, for whoever wants to look."""
    with contextlib.suppress(OSError):  # the next run sees the damage too
        os.replace(path / NAME, path / (NAME + DAMAGED))


def tidy(folder: pathlib.Path, keep: int, keep_every: int | None, newest: pathlib.Path) -> None:
    """Remove old checkpoints, and what attempts that were broken off have left.

    Those whose step is a multiple of `keep_every` stay, the last `keep` whose files are there, and
    the `newest`, the one just written: a run that went back has later steps in its folder. What is
    damaged, or of another kind, is not touched and not counted.
    """
    flush_to_disk(newest)  # else a power failure could take the new manifest and those before it
    good = usable(folder)
    for path in good[:-keep]:
        if path != newest and (not keep_every or (step_of(path) or 0) % keep_every):
            # the manifest first, so that it does not count while its files go
            with contextlib.suppress(FileNotFoundError):
                (path / NAME).unlink()
                flush_to_disk(path)
            shutil.rmtree(path)
    for path in folder.glob("step-*"):
        if step_of(path) is None or not path.is_dir() or path.is_symlink():
            continue
        is_good = path in good
        if (path / (NAME + DAMAGED)).exists() or (not is_good and (path / NAME).exists()):
            continue
        named = set(read_manifest(path).files) if is_good else set()
        for file in path.iterdir():
            if _OURS.fullmatch(file.name) and file.name not in named:
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.rmdir()
