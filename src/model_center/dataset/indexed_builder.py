"""Writing token data: sequences in, `PREFIX.bin` and `PREFIX.idx` out, both or neither."""

from __future__ import annotations

import array
import os
import shutil
import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from model_center.dataset import indexed_format as format
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.errors import DataError


class MMapIndexedDatasetBuilder:
    """Appends sequences to a file that takes its name when it is complete.

    Until `finalize` all lies in `BIN_PATH.partial-PID`; a program that ends before leaves nothing,
    and what was there before stays. As a context manager it removes what it has written if the
    block raises, or ends without `finalize`.

    Args:
        bin_path: of the data, ending in `.bin`.
        dtype: of the elements: one of the format's eight.

    Raises:
        DataError: for an unknown dtype.
    """

    def __init__(self, bin_path: str, dtype: npt.DTypeLike = np.int32) -> None:
        self.dtype = format.CODES[format.code_of(dtype)]
        self._target = str(bin_path)
        self._partial = f"{self._target}.partial-{os.getpid()}"
        self._sizes, self._documents = array.array("i"), array.array("q", [0])
        self._file: IO[bytes] = Path(self._partial).open("wb")  # noqa: SIM115 (closed by finalize, abort or the finalizer)
        self._discard = weakref.finalize(self, _discard, self._file, self._partial)

    def __enter__(self) -> MMapIndexedDatasetBuilder:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.abort()

    def __len__(self) -> int:
        """Sequences added so far."""
        return len(self._sizes)

    def add_item(self, tensor: torch.Tensor | npt.ArrayLike) -> None:
        """Append one sequence: a tensor, an array or a list of numbers, 1-D.

        Raises:
            DataError: when a number does not fit the dtype; nothing is appended then.
        """
        given = np.asarray(
            tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) else tensor
        )
        if given.size == 0:
            given = given.astype(self.dtype)  # an empty list is one of float64 to numpy
        if given.ndim != 1:
            raise DataError(
                f"add_item got an array of shape {given.shape}: expected one sequence, 1-D."
            )
        if self.dtype.kind in "iu" and (
            given.dtype.kind not in "iu" or not _fits(given, self.dtype)
        ):
            raise DataError(
                f"add_item got {given.dtype} from {given.min()} to {given.max()}: "
                f"expected numbers that fit {self.dtype}."
            )
        self._file.write(given.astype(self.dtype, casting="unsafe").tobytes())
        self._sizes.append(len(given))

    def end_document(self) -> None:
        """The sequences since the last mark are a document."""
        self._documents.append(len(self._sizes))

    def merge_file_(self, another_file: str) -> None:
        """Append all sequences and documents of the token data with this prefix.

        Raises:
            DataError: when its dtype is another one.
        """
        other = MMapIndexedDataset(another_file)
        if other.dtype != self.dtype:
            raise DataError(
                f"{another_file} holds {other.dtype}, this file {self.dtype}: write both "
                "with one dtype."
            )
        self._documents.extend((other.doc_idx[1:] + len(self._sizes)).tolist())
        self._sizes.extend(other.sizes.tolist())
        with Path(format.bin_path(another_file)).open("rb") as source:
            shutil.copyfileobj(source, self._file, 2**24)

    def finalize(self, index_file: str) -> None:
        """Give both files their names, never leaving data beside the index of others."""
        sizes, documents = np.array(self._sizes, np.int32), np.array(self._documents, np.int64)
        partial_index = f"{index_file}.partial-{os.getpid()}"
        try:
            with Path(partial_index).open("wb") as file:
                file.writelines(format.index_bytes(self.dtype, sizes, documents))
                _flush(file)
            _flush(self._file)
            self._file.close()
            Path(index_file).unlink(missing_ok=True)
            os.replace(self._partial, self._target)
            os.replace(partial_index, index_file)
        finally:
            Path(partial_index).unlink(missing_ok=True)
            self.abort()

    def abort(self) -> None:
        """Remove what has been written, unless it was finalized."""
        self._discard()


def make_builder(
    bin_path: str, impl: str, dtype: npt.DTypeLike = np.int32
) -> MMapIndexedDatasetBuilder:
    """A builder of the data file `bin_path`.

    Args:
        impl: "mmap"; the older kinds of index are read, not written.
        dtype: of the elements. A vocabulary of at most 65536 fits uint16, which halves the file.
    """
    if impl != "mmap":
        raise DataError(
            f"data of kind {impl!r} are not written: expected impl='mmap', which every "
            "reader of them understands."
        )
    return MMapIndexedDatasetBuilder(bin_path, dtype)


def _fits(given: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return not given.size or bool(limits.min <= given.min() and given.max() <= limits.max)


def _flush(file: IO[bytes]) -> None:
    """To the disk: a rename must not outrun its content."""
    file.flush()
    os.fsync(file.fileno())


def _discard(file: IO[bytes], path: str) -> None:
    try:
        file.close()  # writes what is buffered, which a full disk refuses
    finally:
        Path(path).unlink(missing_ok=True)
