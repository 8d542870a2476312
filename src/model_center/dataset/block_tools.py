"""A block dataset as a whole: shuffle it, hide a file, forget files that are gone."""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
import rich.progress

from model_center.dataset import block_meta, blocks
from model_center.dataset.block_dataset import BlockFiles
from model_center.dataset.block_writer import build_dataset
from model_center.dataset.sampler import permutation
from model_center.errors import DataError

Step = TypeVar("Step")


def shuffle_dataset(
    path_src: str,
    path_tgt: str,
    block_size: int | None = None,
    bucket_size: int = 2**30,
    progress_bar: bool = False,
    seed: int | None = None,
    allow_pickle: bool = False,
) -> None:
    """Write all records of a block dataset in random order into a new one, as its file "shuffled".

    Records are thrown into as many buckets as it takes for each to fit in `bucket_size`, at random,
    and each bucket is shuffled in memory: every order is equally likely. The buckets lie in the
    target's folder meanwhile. Pickled records are written as plain ones.

    Args:
        path_src: the folder of the old dataset.
        path_tgt: the folder of the new one, which has none yet.
        block_size: of the new dataset; None for that of the old one. It may be smaller, so that
            more ranks have blocks.
        bucket_size: bytes of memory, about.
        progress_bar: show how far it is.
        seed: of the order; None for another one each time.
        allow_pickle: read datasets of ModelCenter, which can run code.

    Raises:
        DataError: when there is no source, or a target.
    """
    if block_meta.exists(path_tgt):
        raise DataError(f"{path_tgt} holds a block dataset already: give a new folder.")
    if bucket_size < 1:
        raise DataError(f"bucket_size is {bucket_size}: expected bytes, from 1 on.")
    seed = secrets.randbits(63) if seed is None else seed
    files = BlockFiles(path_src, None, allow_pickle)
    num_buckets = max(1, -(-sum(file.nbytes for file in files.files()) // bucket_size))
    # Every bucket is an open file while records are thrown.
    num_buckets = min(num_buckets, 512)
    numbers = np.flatnonzero(files.live).tolist()
    Path(path_tgt).mkdir(parents=True, exist_ok=True)
    with (
        build_dataset(path_tgt, "shuffled", block_size or files.meta.block_size) as target,
        tempfile.TemporaryDirectory(dir=path_tgt, prefix=".buckets-") as folder,
    ):
        buckets = [Path(folder, str(number)) for number in range(num_buckets)]
        _throw(files, _watched(numbers, "reading", progress_bar), buckets, seed)
        for number, bucket in enumerate(_watched(buckets, "writing", progress_bar)):
            for record in _shuffled(bucket.read_bytes(), seed, number):
                target.write_record(record)


def _throw(files: BlockFiles, numbers: Iterable[int], buckets: list[Path], seed: int) -> None:
    """Append every record to a bucket drawn for it."""
    draws = np.random.default_rng([seed % 2**64, 0])
    with ExitStack() as stack:
        opened = [stack.enter_context(bucket.open("wb")) for bucket in buckets]
        for number in numbers:
            for record in _raw_records(files, number):
                opened[draws.integers(len(opened))].write(record)


def _raw_records(files: BlockFiles, number: int) -> Iterator[bytes]:
    """The records of a block as bytes of our kind."""
    block, at = files.read(number), 0
    while not blocks.is_end(block, at):
        if block[at] == blocks.OURS:
            end = blocks.skip(block, at)
            yield block[at:end]
        else:
            value, end = blocks.read(block, at, files.allow_pickle)
            yield blocks.wrap(value)
        at = end


def _shuffled(content: bytes, seed: int, number: int) -> Iterator[bytes]:
    """The records of a bucket in an order that seed and number give."""
    ends = [0]
    while not blocks.is_end(content, ends[-1]):
        ends.append(blocks.skip(content, ends[-1]))
    for record in permutation(len(ends) - 1, seed, 1, number).tolist():
        yield content[ends[record] : ends[record + 1]]


def _watched(steps: list[Step], what: str, progress_bar: bool) -> Iterable[Step]:
    """The steps, with a bar that follows them."""
    return rich.progress.track(steps, what, transient=True) if progress_bar else steps


def mask_dataset(path: str, dbname: str, mask: bool = True, allow_pickle: bool = False) -> None:
    """Hide a file of a block dataset from readers, or show it again.

    Args:
        path: the folder.
        dbname: the file, by the name that it got from `build_dataset`.
        mask: False to show it again.
        allow_pickle: read datasets of ModelCenter, which can run code.

    Raises:
        DataError: when there is no such file, naming those there are.
    """
    with block_meta.lock(path):
        meta = block_meta.read_meta(path, allow_pickle=allow_pickle)
        names = [file.file_name for file in meta.files]
        if dbname not in names:
            raise DataError(f"{path} has no file {dbname!r}: expected one of {', '.join(names)}.")
        files = (
            dataclasses.replace(file, mask=mask) if file.file_name == dbname else file
            for file in meta.files
        )
        block_meta.write_meta(path, dataclasses.replace(meta, files=tuple(files)))


def compact_dataset(path: str, allow_pickle: bool = False) -> None:
    """Forget files that are gone from a block dataset's folder, and number the other blocks anew.

    Open readers raise an error that asks to open the dataset again; saved places mean other blocks
    then.

    Args:
        path: the folder.
        allow_pickle: read datasets of ModelCenter, which can run code.

    Raises:
        DataError: when not one file is there: the folder is more likely wrong than empty.
    """
    with block_meta.lock(path):
        meta = block_meta.read_meta(path, allow_pickle=allow_pickle)
        there = tuple(
            file for file in meta.files if os.path.exists(os.path.join(path, file.file_name))
        )
        if meta.files and not there:
            raise DataError(
                f"none of the {len(meta.files)} files of {path} exists: nothing was changed."
            )
        block_meta.write_meta(path, dataclasses.replace(meta, files=there).numbered())
