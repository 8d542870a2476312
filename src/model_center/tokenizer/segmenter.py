"""Chinese word segmentation, by jieba."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import tempfile
from typing import Any

from model_center.optional import package


@functools.cache
def _jieba() -> Any:
    jieba = package("jieba", "this tokenizer")
    # else it tells stderr about its dictionary, which it reads when the first text comes
    jieba.setLogLevel(logging.WARNING)
    # jieba's cache is unmarshalled: in the shared folder for temporary files, which it would take,
    # anybody could have put one
    own = pathlib.Path.home() / ".cache" / "model_center"
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = own.stat().st_uid == os.getuid() and not own.stat().st_mode & 0o022
    except OSError:
        is_ours = False
    jieba.dt.tmp_dir = str(own) if is_ours else tempfile.mkdtemp(prefix="jieba-")
    return jieba


def words(text: str) -> list[str]:
    """The words of `text`, in order: joined they are the text.

    Blanks and rare characters are words of their own.
    """
    return list(_jieba().cut(text, cut_all=False))
