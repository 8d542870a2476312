"""Examples in a text file, one or several a line, read when they are asked for."""

from __future__ import annotations

import array
import json
import pathlib
from collections.abc import Iterator, Sequence

from model_center.dataset.protocols import Example, Reader
from model_center.errors import DataError

UNLABELLED = -1


class LineFile(Sequence[Example]):
    """The examples of a file, every line of which is checked at construction.

    An example costs 24 bytes of memory until it is asked for; then its line is read and parsed
    again. No file is held open, so that loader workers share no position and the object pickles.

    Attributes:
        labels: int64 array, the label of each example, `UNLABELLED` where the file holds none.
        groups: int64 array, the number of each example's group: 0, 1, ... in order of appearance.
        group_names: the names of these groups.
    """

    def __init__(
        self,
        path: pathlib.Path,
        read: Reader,
        *,
        labelled: bool,
        header: bool = False,
        missing: bool = False,
    ) -> None:
        """Index `path`.

        Args:
            read: gives the examples of a line.
            labelled: whether every example must have a label.
            header: whether the first line names columns and is no example.
            missing: whether there is no such file, and so no example.

        Raises:
            DataError: naming file and line, for a line that cannot be read, and for a file without
                examples.
        """
        self.path = path
        self.labels = array.array("q")
        self.groups = array.array("q")
        self._read = read
        self._offsets = array.array("q")
        self._firsts = array.array("q")  # by line: the number of its first example
        self._lines = array.array("q")  # by example: its line's place in _offsets
        names: dict[str, int] = {}
        for number, offset, line in () if missing else _lines_of(path, header):
            self._firsts.append(len(self.labels))
            for example in self._checked(line, number, labelled):
                self._lines.append(len(self._offsets))
                self.labels.append(UNLABELLED if example.label is None else example.label)
                self.groups.append(names.setdefault(example.group, len(names)))
            self._offsets.append(offset)
        self.group_names = list(names) or [""]
        if not self.labels and not missing:
            raise DataError(f"{path} holds no examples: expected at least one line.")

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        """Example `index`; negative ones count from the end."""
        index = range(len(self))[index]
        line = self._lines[index]
        with self.path.open("rb") as file:
            file.seek(self._offsets[line])
            text = file.readline().decode()
        return self._read(text)[index - self._firsts[line]]

    @property
    def grouped(self) -> bool:
        """Whether examples belong to questions that have several each."""
        return self.group_names != [""]

    def _checked(self, line: bytes, number: int, labelled: bool) -> list[Example]:
        try:
            examples = self._read(line.decode())
        except KeyError as error:
            raise DataError(f"{self.path}, line {number}: there is no field {error}.") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.path}, line {number}: not JSON ({error.msg} at column {error.pos + 1})."
            ) from error
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.path}, line {number}: {error}") from error
        if labelled and any(example.label is None for example in examples):
            raise DataError(
                f"{self.path}, line {number}: there is no label. Only the split 'test' may "
                "have none."
            )
        return examples


def _lines_of(path: pathlib.Path, header: bool) -> Iterator[tuple[int, int, bytes]]:
    """Number (from 1), byte offset and content of every line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and not (header and number == 1):
                yield number, offset, line
            offset += len(line)
