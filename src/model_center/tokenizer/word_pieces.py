"""CPM's tokens: those of blanks, and jieba's words, cut into the longest known pieces."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Container

from model_center.errors import DataError
from model_center.tokenizer import segmenter

SPACE = "\ufff2"  # stands for a space while words are looked for: a character that no text has
LINE = "\ufff3"  # and for the end of a line
LONGEST_WORD = 200

# U+3000 and the full-width forms of ASCII, to what they are the wide form of.
HALF_WIDTH = {0x3000: 0x20} | {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
VISIBLE_BLANKS = str.maketrans({" ": "\u2582", "\n": "\u2583"})


def read_vocabulary(path: str | os.PathLike[str]) -> list[str]:
    """The tokens of a vocabulary file, one a line: its number, from 0, is the id.

    Raises:
        DataError: for a file that is missing.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise DataError(
            f"there is no vocabulary {file}: expected a text file with a token on each line."
        )
    return file.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def mark_blanks(text: str, space_token: str, line_token: str) -> str:
    """`text` with blanks, ends of lines and their tokens as the two private characters."""
    lines_marked = text.replace("\n", LINE).replace(line_token, LINE)
    return lines_marked.replace(" ", SPACE).replace(space_token, SPACE)


def pieces(text: str, vocabulary: Container[str], unknown: str, *, half_width: bool) -> list[str]:
    """The pieces of a text with marked blanks.

    Args:
        unknown: the piece for a character that no known piece begins with, and for words of over
            200 characters.
        half_width: fold full-width characters first.
    """
    found: list[str] = []
    for word in segmenter.words(text):
        folded = word.translate(HALF_WIDTH) if half_width else word
        found += longest_pieces(folded.translate(VISIBLE_BLANKS), vocabulary, unknown)
    return found


def longest_pieces(word: str, vocabulary: Container[str], unknown: str) -> list[str]:
    """`word` cut from the left by the longest known piece each time; else `unknown`."""
    if len(word) > LONGEST_WORD:
        return [unknown]
    found, start = [], 0
    while start < len(word):
        stop = next(
            (stop for stop in range(len(word), start, -1) if word[start:stop] in vocabulary), start
        )
        found.append(word[start:stop] or unknown)
        start = max(stop, start + 1)
    return found
