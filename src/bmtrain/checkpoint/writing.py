"""Writing a checkpoint of shards: every rank its files, then rank 0 the manifest, by which it
counts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from bmtrain.checkpoint.files import reason_of
from bmtrain.checkpoint.image import NUM_THREADS, Image, Live, Snapshot
from bmtrain.checkpoint.shards import BLOCK, NAME, FileFacts, Manifest, TensorFacts, parse
from bmtrain.checkpoint.writer import flush_to_disk, unsaved
from bmtrain.distributed.collectives import Board
from bmtrain.errors import CheckpointError, first_line
from bmtrain.runtime import world

# A new file or none: a link at its name is not followed.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ShardWriter:
    """Writes this rank's files, and on rank 0 the manifest.

    Threads begin with the tensors at once: none can be started when the interpreter ends, and the
    files may be asked for then.

    Args:
        folder: of the checkpoint.
        token: names the files of this attempt: those of a checkpoint that is there already stay.
        manifest: without files and tensors.
        image, blocks: the tensors.
        rest: what this rank keeps beside them, by `as_bytes`.
        board: for words to rank 0.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        token: str,
        manifest: Manifest,
        image: Image,
        blocks: Snapshot | Live,
        rest: bytes,
        board: Board,
    ) -> None:
        self._folder, self._token, self._manifest = folder, token, manifest
        self._image, self._blocks, self._rest, self._board = image, blocks, rest, board
        self._rank = world.rank()  # the run may have ended when it is needed
        self._file, self._beside = (
            folder / f"rank-{self._rank:05d}-{token}.{suffix}" for suffix in ("bin", "pt")
        )
        self._descriptor = os.open(self._file, _NEW, 0o666)
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "save")
        self._checksums = self._pool.map(self._write_block, range(image.num_blocks))

    def _write_block(self, number: int) -> int:
        with self._blocks.block(number) as memory:
            checksum = zlib.crc32(memory)
            _write_at(self._descriptor, memory, number * BLOCK)
        return checksum

    def finish(self) -> None:
        """Wait until the files of all ranks are on the disk, and rank 0 has published them.

        Raises:
            OSError and others: if that cannot be done on this rank.
            CheckpointError: on rank 0, if it cannot on another.
        """
        try:
            try:
                checksums = tuple(self._checksums)
                if isinstance(self._blocks, Snapshot):
                    self._blocks.check()
                os.fsync(self._descriptor)
            finally:
                self._pool.shutdown(cancel_futures=True)
                os.close(self._descriptor)
            files = {
                self._file.name: FileFacts(self._image.size, checksums),
                self._beside.name: _write_bytes(self._beside, self._rest),
            }
            flush_to_disk(self._folder)
        except BaseException as error:
            for path in (self._file, self._beside):
                with contextlib.suppress(OSError):
                    path.unlink()
            with contextlib.suppress(TimeoutError, CheckpointError):  # this error is the first one
                self._board.gather(json.dumps({"error": reason_of(error)}), self._publish)
            raise
        tensors = self._image.tensors(self._file.name)
        own = dataclasses.replace(self._manifest, facts={}, ties={}, files=files, tensors=tensors)
        self._board.gather(json.dumps({"manifest": own.to_json()}), self._publish)

    def _publish(self, texts: list[str]) -> None:
        """Join the parts of all ranks to the manifest, and let it take its name."""
        files: dict[str, FileFacts] = {}
        tensors: dict[str, dict[str, TensorFacts]] = {}
        for rank, part in enumerate(map(json.loads, texts)):
            if "error" in part:
                raise CheckpointError(unsaved(self._folder, f"{part['error']} (on rank {rank})"))
            one = parse(part["manifest"], is_part=True)
            files |= one.files
            for section, found in one.tensors.items():
                known = tensors.setdefault(section, {})
                for name, facts in found.items():
                    before = known[name].pieces if name in known else ()
                    known[name] = dataclasses.replace(facts, pieces=before + facts.pieces)
        text = dataclasses.replace(self._manifest, files=files, tensors=tensors).to_json()
        parse(text)  # that it contradicts itself must come out now, not when it is needed
        path, temporary = self._folder / NAME, self._folder / f"{NAME}.{self._token}"
        try:
            _write_bytes(temporary, text.encode())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _write_bytes(path: pathlib.Path, content: bytes) -> FileFacts:
    """Write a new file, and wait until it is on the disk."""
    descriptor = os.open(path, _NEW, 0o666)
    try:
        _write_at(descriptor, memoryview(content), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    starts = range(0, len(content), BLOCK)
    checksums = tuple(zlib.crc32(content[start : start + BLOCK]) for start in starts)
    return FileFacts(len(content), checksums)


def _write_at(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[count:], offset + count


def as_bytes(state: Mapping[str, Any]) -> bytes:
    """What one rank keeps beside tensors, as a file that holds no code.

    Raises:
        CheckpointError: for values of other types than a load accepts.
    """
    buffer = io.BytesIO()
    try:
        torch.save(dict(state), buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "the state of optimizers, schedules, modules and the program cannot be kept: expected "
            "numbers, strings, tensors, and lists, tuples and dicts of these "
            f"({first_line(error)})."
        ) from error
    return buffer.getvalue()
