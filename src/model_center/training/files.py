"""Files that are whole or absent, whatever moment the machine dies at."""

from __future__ import annotations

import os
import pathlib

from bmtrain.checkpoint.files import make_new

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
    to_disk(path.parent)


def to_disk(path: pathlib.Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
