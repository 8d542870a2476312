"""Atomic checkpoint writes, optionally in a background thread: no reader sees a partial file."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import stat
import threading
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch

from bmtrain.checkpoint.files import make_new, reason_of
from bmtrain.distributed.agreement import agree
from bmtrain.errors import CheckpointError
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.process import say
from bmtrain.runtime.world import World, unwatched


class Writing:
    """The handle that `save` returns: a file, or a checkpoint, that is being written.

    A rank that writes nothing has no work of its own: its `done` is True.

    Attributes:
        path: of the file, or the folder of the checkpoint.
    """

    def __init__(self, path: pathlib.Path, step: Callable[[], None] | None, axis: Axis) -> None:
        self.path = path
        self._axis, self._step = axis, step
        self._failure: str | None = None
        self.is_told = False  # whether `wait` has returned or raised
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in a non-daemon thread: the interpreter joins it at exit, so no save is lost."""

        def run() -> None:
            self.run()
            if self._failure is not None:
                # Only the next wait, save or load raises the error, and there may be none.
                rank = self._axis.ranks[self._axis.index]
                say(f"[rank {rank}] {self._failure}\n")

        if self._step is not None:
            self._thread = threading.Thread(target=run, name=f"save {self.path.name}", daemon=False)
            self._thread.start()

    def run(self) -> None:
        """Write in this thread; the text of an error is kept for `wait`. The error itself would pin
        the tensors that were written.
        """
        step, self._step = self._step, None  # a handle that outlives the write must not pin tensors
        try:
            if step is not None:
                step()
        except CheckpointError as error:
            self._failure = str(error)
        except Exception as error:
            self._failure = unsaved(self.path, reason_of(error))

    @property
    def done(self) -> bool:
        """Whether this rank has no write in flight."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait for this rank's part; errors are left for `wait`."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Return on every rank once the file is complete. Collective.

        Raises:
            CheckpointError: on every rank, if it could not be written; the previous file is intact.
                Raised by every call.
        """
        # A disk may take minutes: the ranks that wait for this one do not hang.
        with unwatched():
            self.join()
            self.is_told = True  # on all ranks, since this is collective
            agree(self._failure, self._axis)


class Writer:
    """The writer of a run: at most one file is in flight."""

    def __init__(self, current: World) -> None:
        self._latest: Writing | None = None
        current.at_end.callback(self.join)

    def join(self) -> None:
        """Wait for this rank's part of the file in flight, whatever becomes of it."""
        if self._latest is not None:
            self._latest.join()

    def settle(self) -> None:
        """Wait for the previous file and raise its error, unless `wait` has. Collective."""
        if self._latest is not None and not self._latest.is_told:
            self._latest.wait()

    def begin(self, writing: Writing, *, background: bool) -> Writing:
        """Let each rank do its part, in a thread if `background`."""
        # At exit the interpreter joins its threads once. A thread started later, by a save in an
        # atexit function, would be refused or killed halfway: such a save writes in the foreground.
        if background and threading.main_thread().is_alive():
            self._latest = writing
            writing.start()
        else:
            writing.run()
            writing.wait()
        return writing


def write_file(path: pathlib.Path, tensors: Mapping[str, Any]) -> None:
    """Write a checkpoint to `<path>.tmp`, flush it to disk and rename it to `path`.

    An error before the rename leaves `path` as it was and no temporary file behind.

    Raises:
        CheckpointError: if the file is in its place, but a power failure could undo that.
        OSError and others: if it could not be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        make_new(temporary)
        mode = stat.S_IMODE(temporary.stat().st_mode)
        if path.suffix == ".safetensors":
            _write_safetensors(temporary, tensors)
        else:
            _write_torch(temporary, tensors)
        temporary.chmod(mode)  # safetensors writes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    try:  # the rename is an entry in the folder
        flush_to_disk(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was written, but its folder could not be flushed to disk "
            f"({error.strerror or error}): a power failure could undo that. Save again."
        ) from error


class _File(io.FileIO):
    """A file that keeps its first OSError, and takes what comes after it for written.

    An error that passed through torch's writer would stay there for good, with all tensors that
    hang on its traceback; and torch would replace it by one about positions in an archive.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path, "w")
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`: a single write may stop short, at 2 GiB on Linux for example."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view) and self.error is None:
                done += super().write(view[done:]) or 0
        except OSError as error:
            self.error = error.with_traceback(None)
        return len(view)


def _write_torch(temporary: pathlib.Path, tensors: Mapping[str, Any]) -> None:
    with _File(temporary) as out:
        torch.save(dict(tensors), out)
        if out.error is not None:
            raise out.error
        # Without this, a crash after the rename could leave `path` with missing data.
        os.fsync(out.fileno())


def _write_safetensors(temporary: pathlib.Path, tensors: Mapping[str, Any]) -> None:
    first: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name, tensor in tensors.items():
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            metadata[name] = kept  # the form in which safetensors.torch.save_model records ties
    content = {}
    for name in first.values():
        value = tensors[name]
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"cannot save to {temporary.with_suffix('')}: {name!r} is a "
                f"{type(value).__name__}, and safetensors hold tensors alone. Give the file "
                "another ending, .pt for example."
            )
        content[name] = value.contiguous()
    safetensors.torch.save_file(content, temporary, metadata)
    flush_to_disk(temporary)  # for the reason given in _write_torch


def flush_to_disk(path: pathlib.Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unsaved(path: pathlib.Path, reason: str) -> str:
    """The message about a file, or a checkpoint, that could not be written."""
    return (
        f"cannot save to {path}: {reason}; what was saved before is intact. Free some space or "
        "choose another folder, and save again."
    )
