"""What a power failure would leave of files: what was flushed, and whether that was in time."""

import contextlib
import os
import pathlib

import pytest


class Flushes:
    """The calls of os.fsync, and the renames after them.

    Attributes:
        renamed: names that files have taken, and whether all that the file held was on the disk.
    """

    def __init__(self):
        self._contents = {}  # by inode
        self.renamed = []

    def has(self, path):
        """Whether a file's content, or the names that there are in a folder, are on the disk."""
        flushed = self._contents.get(os.stat(path).st_ino)
        if os.path.isdir(path):
            return isinstance(flushed, list) and {*os.listdir(path)} <= {*flushed}
        return flushed == _content(path)

    def fsync(self, descriptor):
        self._contents[os.fstat(descriptor).st_ino] = _content(f"/proc/self/fd/{descriptor}")

    def renaming(self, original):
        def rename(source, target):
            self.renamed.append((pathlib.Path(target).name, self.has(source)))
            original(source, target)

        return rename


def _content(path):
    return os.listdir(path) if os.path.isdir(path) else pathlib.Path(path).read_bytes()


@contextlib.contextmanager
def recorded_flushes():
    """Those of this process inside."""
    found = Flushes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", found.fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, found.renaming(getattr(os, name)))
        yield found
