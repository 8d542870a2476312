"""Chinese word segmentation, by jieba."""

from __future__ import annotations

import functools
import logging
from typing import Any

from model_center.optional import package


@functools.cache
def _jieba() -> Any:
    jieba = package("jieba", "this tokenizer")
    # else it tells stderr about its dictionary, which it reads when the first text comes
    jieba.setLogLevel(logging.WARNING)
    return jieba


def words(text: str) -> list[str]:
    """The words of `text`, in order: joined they are the text.

    Blanks and rare characters are words of their own.
    """
    return list(_jieba().cut(text, cut_all=False))
