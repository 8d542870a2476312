"""CPM's tokens: those of blanks, and jieba's words, cut into the longest known pieces."""

from __future__ import annotations

import os
import pathlib
from collections import OrderedDict
from collections.abc import Container, Mapping

from bmtrain.checkpoint.files import read_text
from bmtrain.errors import CheckpointError
from model_center.errors import DataError
from model_center.tokenizer import segmenter

SPACE = "\ufff2"  # replaces a space while words are split: a character that no text has
LINE = "\ufff3"  # and for the end of a line
LONGEST_WORD = 200

# U+3000 and the full-width forms of ASCII, to what they are the wide form of.
HALF_WIDTH = {0x3000: 0x20} | {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
VISIBLE_BLANKS = str.maketrans({" ": "\u2582", "\n": "\u2583"})


def read_vocabulary(path: str | os.PathLike[str]) -> list[str]:
    """The tokens of a vocabulary file, one a line: its number, from 0, is the id.

    Raises:
        DataError: for a file that is missing or no text.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise DataError(
            f"there is no vocabulary {file}: expected a text file with a token on each line."
        )
    try:
        return read_text(file).removesuffix("\n").split("\n")
    except CheckpointError as error:
        raise DataError(str(error)) from error


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


def longest_pieces(
    word: str, vocabulary: Container[str], unknown: str, longest: int = LONGEST_WORD
) -> list[str]:
    """`word` cut from the left by the longest known piece each time; else, and for a word of more
    than `longest` characters, `unknown`.
    """
    if len(word) > longest:
        return [unknown]
    found, start = [], 0
    while start < len(word):
        stop = next(
            (stop for stop in range(len(word), start, -1) if word[start:stop] in vocabulary), start
        )
        found.append(word[start:stop] or unknown)
        start = max(stop, start + 1)
    return found


class WordpieceTokenizer:
    """Words cut into pieces, as ModelCenter's programs call it; see `longest_pieces`."""

    def __init__(
        self,
        vocab: Mapping[str, int],
        unk_token: str = "<unk>",
        max_input_chars_per_word: int = LONGEST_WORD,
    ) -> None:
        self.vocab, self.unk_token = vocab, unk_token
        self.max_input_chars_per_word = max_input_chars_per_word

    def tokenize(self, token: str | bytes) -> list[str]:
        """The pieces of a word."""
        word = convert_to_unicode(token)
        return longest_pieces(word, self.vocab, self.unk_token, self.max_input_chars_per_word)


def load_vocab(vocab_file: str | os.PathLike[str]) -> OrderedDict[str, int]:
    """The ids of the tokens of a vocabulary file, without blanks around them.

    Of a token that is there twice the last id counts, at the place of the first.

    Raises:
        DataError: for a file that is missing or no text.
    """
    lines = read_vocabulary(vocab_file)
    return OrderedDict((line.strip(), number) for number, line in enumerate(lines))


def convert_to_unicode(text: str | bytes) -> str:
    """Text as it is, bytes from UTF-8 without those that are none.

    Raises:
        DataError: for anything else.
    """
    if not isinstance(text, (str, bytes)):
        raise DataError(f"text is {type(text).__name__}: expected str or bytes.")
    return text if isinstance(text, str) else text.decode("utf-8", "ignore")


def is_contain_chinese(check_str: str) -> bool:
    """Whether there is a character of the first block of Chinese ones, U+4E00 to U+9FFF."""
    return any("\u4e00" <= character <= "\u9fff" for character in check_str)


def is_contain_point(check_str: str) -> bool:
    """Whether there is a digit, 0 to 9."""
    return any("0" <= character <= "9" for character in check_str)
