"""Chinese word segmentation, by jieba."""

from __future__ import annotations

import importlib
import logging
import warnings

# jieba's source makes Python warn when it is compiled, which is at its first import: its business, not the user's.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jieba = importlib.import_module("jieba")

jieba.setLogLevel(logging.WARNING)  # else it tells stderr about its dictionary, which it reads when the first text comes


def words(text: str) -> list[str]:
    """The words of `text`, in order: joined they are the text. Blanks and rare characters are words of their own."""
    return list(jieba.cut(text, cut_all=False))
