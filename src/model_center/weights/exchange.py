"""Two folders exchange their names in one step, as the system offers it."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
import sys

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
