"""Rows of data as people have it: JSON lines, JSON arrays, Parquet, Arrow, CSV, texts, folders, the
hub, and token data of `preprocess`.

Every command reads rows here. A row is a dict; what is null in it is not there. Rows are read one
after the other, and a row that cannot be read is a DataError that names file and row.
"""

from __future__ import annotations

import bz2
import csv
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from model_center.dataset.indexed import MMapIndexedDataset
from model_center.errors import DataError
from model_center.optional import package

# Names of the hub, with a configuration, and a split behind a colon: org/name/config:split
_HUB = re.compile(r"[\w.-]+(?:/[\w.-]+){0,2}(?::[\w\[\]:%+-]+)?")
# What data sets of the hub say of themselves, and files that are documents.
DESCRIPTIONS = (
    *("readme.md", "license.md", "license.txt", "dataset_info.json", "dataset_infos.json"),
    *("state.json", "dataset_dict.json"),
)
TEXTS = {".txt", ".md"}
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)  # of files, compressed or not
_CHUNK = 2**22  # bytes that are hashed at a time
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_EXTRA = "install this package with its extra [data]"


class Row(NamedTuple):
    """One row.

    Attributes:
        location: for messages: "chat.jsonl, line 3".
        content: its fields, without those that are null.
    """

    location: str
    content: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """Data by its name: a file, a folder, or a data set of the hub.

    Attributes:
        name: as it was given.
        files: that are read, in order; none of a data set of the hub.
        passed_over: files of a folder that are not read.
    """

    name: str
    files: tuple[pathlib.Path, ...]
    passed_over: tuple[pathlib.Path, ...] = ()

    @property
    def is_tokens(self) -> bool:
        """Whether it is token data, which have no rows of text."""
        return bool(self.files) and self.files[0].suffix == ".bin"

    def rows(self) -> Iterator[Row]:
        """All rows, in order.

        Raises:
            DataError: naming file and row, for what cannot be read; for token data.
        """
        if self.is_tokens:
            raise DataError(f"{self.name} holds tokens: expected rows of text.")
        if not self.files:
            for number, content in enumerate(_from_hub(self.name), start=1):
                yield Row(f"{self.name}, row {number}", without_nulls(content))
        for path in self.files:
            try:
                yield from READERS.get(kind_of(path), _json_lines)(path)
            except UNREADABLE as error:
                raise DataError(f"{path} cannot be read: {error}") from error

    def digest(self) -> str:
        """A hash of the bytes that are read, wherever they lie."""
        found = hashlib.sha256(b"" if self.files else self.name.encode())
        files = self.files or [
            pathlib.Path(one["filename"]) for one in _from_hub(self.name).cache_files
        ]
        for path in files:
            try:
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        found.update(chunk)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error}") from error
            found.update(b"\0end of file\0" + kind_of(path).encode())
        return found.hexdigest()[:16]


def source(name: str | os.PathLike[str]) -> Source:
    """The data of this name; PREFIX of PREFIX.bin and PREFIX.idx for token data.

    A file of another ending than `READERS` knows is taken for JSON lines; in a folder, which is
    read with all that is below it, it is passed over, as are `DESCRIPTIONS` beside files of rows.
    Files whose names begin with a dot are none.

    Raises:
        DataError: where there is nothing of this name, or a folder holds nothing to read.
    """
    path = pathlib.Path(name)
    prefix = str(path.with_suffix("") if path.suffix in {".bin", ".idx"} else path)
    if not path.is_dir() and MMapIndexedDataset.exists(prefix):
        return Source(str(name), (pathlib.Path(f"{prefix}.bin"), pathlib.Path(f"{prefix}.idx")))
    if path.is_file():
        return Source(str(name), (path,))
    if path.is_dir():
        splits = sorted(one.parent.name for one in path.glob("*/state.json"))
        if len(splits) > 1 and (path / "dataset_dict.json").exists():
            raise DataError(
                f"the folder {path} holds the splits {', '.join(splits)}: name the folder of one, "
                f"{path / splits[-1]}."
            )
        inside = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
        ]
        kinds = {kind_of(file) for file in inside if file.name.lower() not in DESCRIPTIONS}
        others = DESCRIPTIONS if kinds & {*READERS} - TEXTS else ()
        known = tuple(
            file for file in inside if kind_of(file) in READERS and file.name.lower() not in others
        )
        if not known:
            raise DataError(
                f"the folder {path} holds no data: expected files that end with "
                f"{', '.join(READERS)}, or these with {', '.join(COMPRESSED)}."
            )
        return Source(str(name), known, tuple(file for file in inside if file not in known))
    if kind_of(path) in READERS or not _HUB.fullmatch(str(name)):
        raise DataError(
            f"there is no file {name}: expected a file, a folder, or a name of the hub."
        )
    return Source(str(name), ())


def kind_of(path: pathlib.Path) -> str:
    """The ending that tells how a file is read: ".json" of a.JSON.gz."""
    is_compressed = path.suffix.lower() in COMPRESSED
    return pathlib.Path(path.stem if is_compressed else path.name).suffix.lower()


def without_nulls(value: Any) -> Any:
    """What a table means: a struct has all fields that any row has, those it lacks are null."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def parsed(text: bytes, place: str) -> Any:
    """A value of JSON.

    Raises:
        DataError: naming the place, for what is none, or no Unicode.
    """
    try:
        value = json.loads(text.decode())
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1].encode("unicode_escape").decode()
        raise DataError(
            f"{place}: {half} is half of a surrogate pair, which is no character."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: {not_utf8(error)}") from error
    except json.JSONDecodeError as error:
        where = (
            f"line {error.lineno}, column {error.colno}"
            if error.lineno > 1
            else f"column {error.colno}"
        )
        raise DataError(f"{place}: not JSON ({error.msg} at {where}).") from error
    except RecursionError as error:
        raise DataError(f"{place}: nested too deeply to be read.") from error
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{place}: {error}") from error
    return value


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong, and what to do."""
    return f"not UTF-8 ({error.reason} at byte {error.start}): save the text as UTF-8."


def _zstandard(path: pathlib.Path) -> Any:
    arrow = package("pyarrow", "Zstandard", DataError, instead=_EXTRA)
    return arrow.input_stream(str(path), compression="zstd")


COMPRESSED: dict[str, Callable[[pathlib.Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstandard,
}


def opened(path: pathlib.Path) -> IO[bytes]:
    """The bytes of a file, behind the mark that some programs put at its beginning."""
    file = io.BufferedReader(COMPRESSED.get(path.suffix.lower(), io.FileIO)(path))
    if file.peek(3).startswith(b"\xef\xbb\xbf"):
        file.read(3)
    return file


def _row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{place}: got {type(value).__name__}: expected a JSON object.")
    return Row(place, {key: one for key, one in value.items() if one is not None})


def _json_lines(path: pathlib.Path) -> Iterator[Row]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield _row(place, parsed(line, place))


def _json(path: pathlib.Path) -> Iterator[Row]:
    """An array, or lines under this name, as many are."""
    with opened(path) as file:
        first = file.readline()
        while first and not first.strip():
            first = file.readline()
        if not first.lstrip().startswith(b"["):
            yield from _json_lines(path)
            return
        whole = parsed(first + file.read(), str(path))
    for number, value in enumerate(whole, start=1):
        yield _row(f"{path}, row {number}", value)


def _parquet(path: pathlib.Path) -> Iterator[Row]:
    """Parquet, or Arrow's stream, which `save_to_disk` of datasets writes."""
    arrow = package("pyarrow", "Parquet", DataError, instead=_EXTRA)
    parquet = package("pyarrow.parquet", "Parquet", DataError, name="pyarrow", instead=_EXTRA)
    try:
        number = 0
        for batch in (
            arrow.ipc.open_stream(arrow.memory_map(str(path)))
            if kind_of(path) == ".arrow"
            else parquet.ParquetFile(path).iter_batches(1000)
        ):
            for value in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", without_nulls(value))
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}, behind row {number}: {error}") from error


def _table(path: pathlib.Path) -> Iterator[Row]:
    """CSV, with names in the first line; what is empty is not given."""
    # A cell may be a document. The limit is one for all readers of a process: put back at the end
    # of one file, it would refuse the cells of another that is read meanwhile.
    csv.field_size_limit(2**31 - 1)
    with opened(path) as file:
        lines = csv.DictReader(
            io.TextIOWrapper(file, encoding="utf-8", newline=""),
            delimiter="\t" if kind_of(path) == ".tsv" else ",",
            strict=True,
        )
        try:
            names = [name for name in lines.fieldnames or () if name]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise DataError(f"{path}, line 1: got the name {twice} twice: rename a column.")
            for value in lines:
                place = f"{path}, line {lines.line_num}"
                if None in value:
                    raise DataError(f"{place}: more cells than names in the first line.")
                yield Row(place, {key: one for key, one in value.items() if one})
        except csv.Error as error:
            raise DataError(f"{path}, line {lines.line_num + 1}: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {lines.line_num + 1}: {not_utf8(error)}") from error


def _text(path: pathlib.Path) -> Iterator[Row]:
    """A file is a document."""
    with opened(path) as file:
        try:
            yield Row(str(path), {"text": file.read().decode()})
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: {not_utf8(error)}") from error


READERS: dict[str, Callable[[pathlib.Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _parquet,
    ".csv": _table,
    ".tsv": _table,
    ".txt": _text,
    ".md": _text,
}


def _from_hub(name: str) -> Any:
    """A data set of the hub, its split "train" unless one is named."""
    library = package(
        "datasets",
        f"there is no file or folder {name}, and a data set of the hub",
        DataError,
        instead=f"{_EXTRA}, or name a file",
    )
    repository, _, split = name.partition(":")
    parts = repository.split("/")
    try:
        return library.load_dataset("/".join(parts[:2]), *parts[2:], split=split or "train")
    except Exception as error:  # whatever its many readers and the network raise
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"there is no file or folder {name}, and it could not be loaded as a data set of the "
            f"hub: {type(error).__name__}: {reason}"
        ) from error
