"""Writing files so that a reader, a full disk or a crash never meets half of one; in the background
if asked.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch

from bmtrain.distributed.agreement import agree
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World


class Writing:
    """A file on its way to the disk; what `save` returns.

    On ranks other than 0 there is nothing on its way.
    """

    def __init__(self, path: pathlib.Path, step: Callable[[], None] | None, axis: Axis) -> None:
        self.path = path
        self._axis, self._step = axis, step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in a thread that the interpreter waits for at its end."""
        if self._step is not None:
            self._thread = threading.Thread(
                target=self._run_and_tell, name=f"save {self.path.name}", daemon=False
            )
            self._thread.start()

    def run(self) -> None:
        """Write now."""
        step, self._step = self._step, None  # whoever keeps the handle shall not keep the tensors
        if step is None:
            return
        try:
            step()
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether nothing is on its way any more on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return on every rank when the file is there. Collective.

        Raises:
            CheckpointError: on every rank, if it could not be written; the previous file is intact.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        text = None if error is None else _explain(self.path, error)
        agree(text, self._axis, error)

    def _run_and_tell(self) -> None:
        self.run()
        if self._error is not None:
            # The program may never save again: say it now, whatever happens to the error later.
            sys.stderr.write(
                f"[rank {self._axis.ranks[self._axis.index]}] {_explain(self.path, self._error)}\n"
            )


class Writer:
    """The one writer of a run: at most one file at a time."""

    def __init__(self, current: World) -> None:
        self._axis = current.mesh.world
        self._latest: Writing | None = None

    def settle(self) -> None:
        """Wait for the file before, and raise what went wrong with it. Collective."""
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.wait()

    def write(
        self, path: pathlib.Path, tensors: Mapping[str, torch.Tensor], *, background: bool
    ) -> Writing:
        """Write the tensors of rank 0 to `path`."""
        step = (lambda: write_file(path, tensors)) if self._axis.index == 0 else None
        writing = Writing(path, step, self._axis)
        # When the interpreter has waited for its threads, it waits for no new one: a save in an
        # atexit function writes now.
        if background and threading.main_thread().is_alive():
            self._latest = writing
            writing.start()
        else:
            writing.run()
            writing.wait()
        return writing


def write_file(path: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put a checkpoint at `path`: written beside it, flushed to the disk, renamed.

    An error leaves nothing behind.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        if path.suffix == ".safetensors":
            _write_safetensors(temporary, tensors)
        else:
            _write_torch(temporary, tensors)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _flush_to_disk(path.parent)


class _File(io.FileIO):
    """A file that remembers the first OSError: torch's writer turns it into a message about
    positions in an archive.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path, "w")
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """All of `data`, however long."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += super().write(view[done:]) or 0
        except OSError as error:
            self.error = self.error or error
            raise
        return done


def _write_torch(temporary: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with _File(temporary) as out:
        try:
            torch.save(dict(tensors), out)
        except Exception:
            if out.error is not None:
                raise out.error from None
            raise
        os.fsync(out.fileno())


def _write_safetensors(temporary: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> None:
    first: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name, tensor in tensors.items():
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            metadata[name] = kept  # as safetensors.torch.save_model notes tied names
    safetensors.torch.save_file(
        {name: tensors[name] for name in first.values()}, temporary, metadata
    )
    _flush_to_disk(temporary)


def _flush_to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(path: pathlib.Path, error: BaseException) -> str:
    before = (
        "the file that was there before is intact" if path.exists() else "nothing was left behind"
    )
    plain = error.strerror if isinstance(error, OSError) else None
    reason = plain or f"{type(error).__name__}: {error}"
    return (
        f"cannot save to {path}: {reason}; {before}. Free some space or choose another "
        "folder, and save again."
    )
