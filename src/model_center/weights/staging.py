"""A folder of several files, put in place so that no half is taken for a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from model_center.errors import WeightsError

CONFIG = "config.json"
MODEL_CENTER_FILE = "pytorch_model.pt"
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
    """Files on their way into `folder`: written into a folder inside it, then moved.

    While files move, the folder has no config.json: it comes last, and tells that the rest is
    there. The weights that were there before are removed, other files stay.

    Raises:
        WeightsError: if files cannot be made there.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self._incoming = folder, folder / ".incoming"
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._incoming, ignore_errors=True)  # of a program that was killed
            self._incoming.mkdir()

    def path(self, name: str = "") -> pathlib.Path:
        """Where to write the file `name`; the folder of all without one."""
        return self._incoming / name

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` into the file `name`, keys sorted."""
        self.path(name).write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )

    def commit(self) -> None:
        """Move everything into place."""
        arriving = sorted(os.listdir(self._incoming), key=lambda name: name == CONFIG)
        (self.folder / CONFIG).unlink(missing_ok=True)
        for pattern in WEIGHTS:
            for old in self.folder.glob(pattern):
                old.unlink()
        for name in arriving:
            _flush(self._incoming / name)
            target = self.folder / name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(self._incoming / name, target)
        self._incoming.rmdir()
        _flush(self.folder)

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
            f"cannot save to the folder {folder}: {error.strerror or error}; what was there is "
            "unchanged. Free some space, or name another folder."
        ) from error


def _flush(path: pathlib.Path) -> None:
    """Have the bytes of a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
