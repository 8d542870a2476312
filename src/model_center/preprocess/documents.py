"""Text files as batches of lines, each of which is a document."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from model_center.dataset.rows import UNREADABLE, not_utf8, opened
from model_center.errors import DataError

BATCH_BYTES = 1_000_000  # text that is tokenised at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive lines of a file, as bytes; `first_line` counts from 1."""

    path: str
    first_line: int
    lines: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Of all lines."""
        return sum(map(len, self.lines))

    def texts(self, key: str | None) -> Iterator[str]:
        """The document of each line, without the end of the line.

        Args:
            key: of a line that is a JSON object, where the text is; None for lines that are the
                text. Lines of white space are no JSON and give an empty document.

        Raises:
            DataError: naming file and line, when a line is not UTF-8, no JSON object or has no text
                there.
        """
        for number, line in enumerate(self.lines, self.first_line):
            where = f"{self.path}:{number}"
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is {not_utf8(error)}") from error
            yield text if key is None else _value(text, key, where)


def check_files(paths: Sequence[str]) -> int:
    """The bytes of all files.

    Raises:
        DataError: naming the first that is no file.
    """
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise DataError(f"{missing[0]} is not a file: expected text or JSONL files.")
    return sum(Path(path).stat().st_size for path in paths)


def batches(paths: Sequence[str], batch_bytes: int) -> Iterator[Batch]:
    """All lines of all files in order, about `batch_bytes` at a time.

    Raises:
        DataError: naming the file that cannot be read.
    """
    for path in paths:
        try:
            with opened(Path(path)) as file:
                first = 1
                while lines := tuple(file.readlines(batch_bytes)):
                    yield Batch(path=path, first_line=first, lines=lines)
                    first += len(lines)
        except UNREADABLE as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _value(text: str, key: str, where: str) -> str:
    """The text of a JSON line."""
    if not text.strip():
        return ""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is a JSON {type(record).__name__}: expected an object with the text "
            f"under {key!r}."
        )
    if not isinstance(record.get(key), str):
        got = (
            f"{type(record[key]).__name__} under {key!r}"
            if key in record
            else f"only the keys {', '.join(map(repr, record))}"
        )
        raise DataError(f"{where} has {got}: expected text under {key!r}; name its key with --key.")
    # JSON may hold half of a surrogate pair, which is no character; it becomes a question mark.
    return str(record[key]).encode("utf-8", "replace").decode("utf-8")
