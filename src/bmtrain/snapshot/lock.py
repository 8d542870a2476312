"""One run owns a folder of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import socket
import time

from bmtrain.errors import CheckpointError
from bmtrain.runtime import log

NAME = "lock"
PATIENCE_S = 10.0  # for processes of a run that has just been killed
_PAUSE_S = 0.1
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Lock:
    """A lock on a folder, which the system takes away from a process that ends in any way."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._path = folder / NAME
        self._descriptor: int | None = None

    def take(self) -> None:
        """Become the owner.

        Raises:
            CheckpointError: saying who is, or why nobody can be.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise CheckpointError(
                f"cannot use {self._path.parent} for checkpoints: {error.strerror}."
            ) from error
        if self._is_taken(descriptor):
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise CheckpointError(
                f"{self._path.parent} belongs to another run: {holder or 'unknown'}. "
                "Wait for its end, stop it, or give another folder."
            )
        self._descriptor = descriptor
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode() + b"\n", 0)

    def _is_taken(self, descriptor: int) -> bool:
        """Whether another process holds the lock, for longer than one that is being ended."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    log.warn(
                        f"{self._path.parent} is on a file system without locks: nothing keeps "
                        "another run from writing there too."
                    )
                    return False
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > end:
                    return True
            time.sleep(_PAUSE_S)

    def release(self) -> None:
        """Let others have the folder; safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
