"""Where the text comes from: Python's standard library, its documentation or its source, or the
user's files.

Needs no process group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import runpy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FORMAT = 2  # part of the digest: raise it when the same files would be cut into other documents
# below this many text files, files are cut into documents so that some can be held out
FEW_FILES = 64
# bytes; longer text files are cut at line ends, so that none must fit in memory whole
LONGEST_DOCUMENT = 2**20
# packages that happen to be installed; tables of characters
LEFT_OUT = {"site-packages", "encodings"}
# of the standard library too: what they document is not for readers
TESTS = {"test", "tests", "idle_test", "lib2to3"}
HELP_TOPICS = "pydoc_data/topics.py"  # the language reference, as help() prints it
PARAGRAPHS = 50  # of a document of documentation
_STRINGS = re.compile(r'"""(.*?)"""', re.DOTALL)
_SENTENCES = re.compile(r"[A-Z](?:(?!>>>)[^{}|\\]){30,}[.:]")
SUFFIXES = (".txt", ".text", ".md", ".jsonl")


class DataError(ValueError):
    """Text that cannot be used, said in words the user can act on."""


class Document(NamedTuple):
    """One text and the name by which it is hashed."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A fixed list of files, read as a stream of documents.

    root: folder against which files are named, so that the digest does not depend on where the
    folder lies. files: sorted, hence the same order everywhere. text_field: field of a JSONL line
    that holds its text. own: whether the files are the user's: then a broken one is an error, and
    an edit that keeps the size is noticed. prose: whether the sentences of docstrings are the text.
    """

    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"
    own: bool = True
    prose: bool = False

    def digest(self) -> str:
        """16 hexadecimal digits that change with the list of files, their sizes or the way they are
        read.
        """
        parts = [str(FORMAT), self.text_field, "prose" if self.prose else "whole"]
        for path in self.files:
            facts = path.stat()
            parts.append(
                f"{path.relative_to(self.root).as_posix()} {facts.st_size} "
                f"{facts.st_mtime_ns if self.own else 0}"
            )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def documents(self) -> Iterator[Document]:
        """All documents that hold any text, in the order of the files.

        Raises:
            DataError: for a file that is not UTF-8 or a JSONL line without the text field, naming
                file and line.
        """
        limit = self._document_limit()
        for path in self.files:
            name = path.relative_to(self.root).as_posix()
            if self.prose:
                stream = _sentences(path, name)
            elif path.suffix.lower() == ".jsonl":
                stream = _json_lines(path, name, self.text_field)
            else:
                stream = _text_pieces(path, name, limit)
            try:
                for document in stream:
                    if document.text.strip():
                        yield document
            except UnicodeDecodeError as error:
                if self.own:
                    raise DataError(
                        f"{path} is not UTF-8 text ({error.reason} near byte "
                        f"{error.start}): convert it or leave it out."
                    ) from error

    def _document_limit(self) -> int:
        if len(self.files) >= FEW_FILES:
            return LONGEST_DOCUMENT
        total = sum(path.stat().st_size for path in self.files)
        return min(max(total // FEW_FILES, 512), 2**16)


def standard_library(text: str = "source") -> Corpus:
    """The running Python's standard library: real text, on every machine, nothing to download.

    Args:
        text: "source" for the code as it is, "documentation" for the sentences of its docstrings
            and of the help topics: less text, in English.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    prose = text == "documentation"
    left_out = LEFT_OUT | TESTS if prose else LEFT_OUT
    files = sorted(
        path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)
    )
    if not files:
        raise DataError(
            f"no .py files under {root}, where this Python says its standard library "
            "is: give your own text with --data PATH."
        )
    return Corpus(root=root, files=tuple(files), own=False, prose=prose)


def own_text(path: Path, text_field: str = "text") -> Corpus:
    """The user's text: a text file, a JSONL file, or a folder of such files.

    Raises:
        DataError: when there is nothing to read at `path`.
    """
    if not path.exists():
        raise DataError(
            f"--data {path} does not exist: give a text file, a .jsonl file or a folder of "
            "such files."
        )
    if path.is_file():
        corpus = Corpus(root=path.parent, files=(path,), text_field=text_field)
    else:
        files = sorted(
            file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()
        )
        corpus = Corpus(root=path, files=tuple(files), text_field=text_field)
    if not corpus.files:
        raise DataError(
            f"--data {path} holds no text: expected files ending in {', '.join(SUFFIXES)} "
            "somewhere in this folder."
        )
    if all(file.stat().st_size == 0 for file in corpus.files):
        raise DataError(f"--data {path} is empty: {len(corpus.files)} file(s) of 0 bytes.")
    return corpus


def _sentences(path: Path, name: str) -> Iterator[Document]:
    """The paragraphs of the file's docstrings that are sentences, each as one line."""
    if name == HELP_TOPICS:
        strings = list(runpy.run_path(str(path))["topics"].values())
    else:
        strings = _STRINGS.findall(path.read_text("utf-8"))
    paragraphs = (
        " ".join(part.split()) for string in strings for part in re.split(r"\n\s*\n", string)
    )
    kept = [part for part in paragraphs if _SENTENCES.fullmatch(part)]
    for first in range(0, len(kept), PARAGRAPHS):
        yield Document(f"{name}#{first}", "\n".join(kept[first : first + PARAGRAPHS]))


def _text_pieces(path: Path, name: str, limit: int) -> Iterator[Document]:
    """The file as one document, or cut at line ends into documents of about `limit` characters."""
    lines: list[str] = []
    size = number = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line in file:
            lines.append(line)
            size += len(line)
            if size >= limit:
                yield Document(f"{name}#{number}", "".join(lines))
                lines, size, number = [], 0, number + 1
    if lines:
        yield Document(f"{name}#{number}", "".join(lines))


def _json_lines(path: Path, name: str, field: str) -> Iterator[Document]:
    """One document per line: the string under `field` of the line's JSON object.

    Blank lines are skipped.
    """
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}."
                ) from error
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, line {number} is a JSON {type(record).__name__}: "
                    f"expected an object with the field {field!r}."
                )
            if not isinstance(record.get(field), str):
                fields = ", ".join(repr(key) for key in record) or "none"
                raise DataError(
                    f"{path}, line {number} has no string under {field!r} (its fields: {fields}): "
                    "name the right one with --text-field."
                )
            yield Document(f"{name}#{number}", record[field])
